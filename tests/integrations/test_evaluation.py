"""Evaluation with metrics and predictions: what the plain Trainer gives, and no more logits."""

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import Trainer, TrainerCallback, default_data_collator

from sppo_hf import BudgetError, ConfigError, SPPOPlugin
from sppo_hf.engine.convert import get_engine
from sppo_hf.engine.logits import LogitsRequest
from sppo_hf.integrations.evaluation import TrainerEvaluation
from sppo_hf.pipeline.pipeline_engine import PipelineEngine
from sppo_hf.testing.tiny_models import build_tiny_model
from tests.integrations.training import (
    ROW_TOKENS,
    VOCABULARY,
    make_arguments,
    make_model,
    make_rows,
)

TILE = 5
SETTINGS = {"num_chunks": 3, "loss_tile_tokens": TILE, "show_plan": False}


# -- functions for logits, as users write them ---------------------------------------------------


def argmax(logits: Any, labels: Tensor) -> Tensor:
    """Do what the language modelling examples of Transformers do."""
    if isinstance(logits, tuple):
        logits = logits[0]
    return logits.argmax(dim=-1)


def log_probabilities(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logs = logits.log_softmax(-1)
    return logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0], -(logs.exp() * logs).sum(-1)


def best_three(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    values, ids = logits.topk(3)
    return {"values": values, "ids": ids, "kept": labels != -100}


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return logits[:, :-1].argmax(-1) == labels[:, 1:]


def centred(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits - logits.mean(1, keepdim=True)).amax(-1)


def of_rows(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.flatten(1).amax(-1)


def of_whole_rows(logits: Tensor, labels: Tensor) -> Tensor:
    assert logits.shape[1] == ROW_TOKENS
    return logits.argmax(-1)


class Watched:
    """A function for logits that writes down what it is given."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, logits: Tensor, labels: Tensor) -> Any:
        self.shapes.append(tuple(logits.shape))
        return self.function(logits, labels)


def accuracy(prediction: Any) -> dict[str, float]:
    """Compare as the language modelling examples of Transformers do."""
    guesses, labels = prediction.predictions, prediction.label_ids
    guesses = guesses.argmax(-1) if guesses.ndim == 3 else guesses
    return {"accuracy": float((guesses[:, :-1] == labels[:, 1:]).mean())}


def moments(prediction: Any) -> dict[str, float]:
    """Boil down predictions of any form."""
    found: list[float] = []

    def visit(nest: Any) -> None:
        if isinstance(nest, dict):
            nest = list(nest.values())
        if isinstance(nest, list | tuple):
            for item in nest:
                visit(item)
            return
        found.extend([float(np.asarray(nest, dtype=np.float64).mean()), *nest.shape])

    visit(prediction.predictions)
    visit(prediction.label_ids)
    return {str(index): value for index, value in enumerate(found)}


# -- trainers ----------------------------------------------------------------------------------


def _padded_rows(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Rows that end in padding, with labels in the middle alone."""
    rows = make_rows(count, seed)
    for index, row in enumerate(rows):
        used = ROW_TOKENS - 4 * (index % 4)
        row["attention_mask"] = (torch.arange(ROW_TOKENS) < used).long()
        row["labels"] = row["input_ids"].clone()
        row["labels"][:9] = -100
        row["labels"][used:] = -100
    return rows


def _trainer(
    folder, plugin, *, kind=Trainer, make=make_model, eval_rows=None, arguments=None, **given
):
    AcceleratorState._reset_state(reset_partial_state=True)
    settings = {"parallelism_config": plugin, "max_steps": 1, **(arguments or {})}
    return kind(
        make(),
        make_arguments(folder, **settings),
        train_dataset=make_rows(4),
        eval_dataset=make_rows(5, seed=2) if eval_rows is None else eval_rows,
        **given,
    )


def _evaluated(trainer: Trainer) -> dict[str, float]:
    metrics = trainer.evaluate()
    return {k: v for k, v in metrics.items() if "second" not in k and "time" not in k}


def _same_nest(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        ours, theirs = list(ours.values()), list(theirs.values())
    if isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            _same_nest(mine, other)
        return
    if theirs is not None:
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


CASES: dict[str, dict[str, Any]] = {
    "whole logits": {"compute_metrics": accuracy},
    "argmax": {"compute_metrics": accuracy, "function": argmax},
    "tuple": {"compute_metrics": moments, "function": log_probabilities},
    "dict": {"compute_metrics": moments, "function": best_three},
    "shifted": {"compute_metrics": moments, "function": shifted},
    "centred": {"compute_metrics": moments, "function": centred},
    "of rows": {"compute_metrics": moments, "function": of_rows},
    "of whole rows": {"compute_metrics": moments, "function": of_whole_rows},
    "padding": {"compute_metrics": moments, "function": argmax, "eval_rows": _padded_rows(5, 2)},
    "padding, whole": {"compute_metrics": moments, "eval_rows": _padded_rows(5, 2)},
    "bfloat16": {
        "compute_metrics": moments,
        "function": log_probabilities,
        "arguments": {"bf16": True},
        "near": 2e-2,
    },
    "batch by batch": {
        "compute_metrics": lambda prediction, compute_result: {"rows": len(prediction.label_ids)},
        "function": argmax,
        "arguments": {"batch_eval_metrics": True},
    },
    "everything included": {
        "compute_metrics": lambda prediction: {
            "inputs": float(prediction.inputs.sum()),
            **moments(prediction),
        },
        "function": argmax,
        "arguments": {"include_for_metrics": ["inputs", "loss"], "eval_accumulation_steps": 1},
    },
    "loss only": {
        "compute_metrics": accuracy,
        "function": argmax,
        "arguments": {"prediction_loss_only": True},
    },
    "no metrics": {"function": argmax},
    "label smoothing": {
        "compute_metrics": accuracy,
        "function": argmax,
        "arguments": {"label_smoothing_factor": 0.1},
    },
    "label smoothing, a missing label": {
        "arguments": {"label_smoothing_factor": 0.1, "label_names": ["labels", "weights"]},
    },
}
TOKEN_WISE = ("argmax", "tuple", "dict", "padding", "bfloat16", "batch by batch",
              "everything included", "no metrics")  # fmt: skip
NOT_TOKEN_WISE = ("shifted", "centred", "of rows", "of whole rows")


@pytest.mark.parametrize("by_config", [True, False], ids=["config", "batch"])
def test_a_function_for_logits_gets_the_router_loss_beside_them(tmp_path, by_config):
    def of_second(outputs: Any, labels: Tensor) -> Tensor:
        return outputs[1].argmax(-1)

    def asking(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
        switch = {} if by_config else {"output_router_logits": True}
        return {**default_data_collator(rows), **switch}

    def make() -> Any:
        model = build_tiny_model("mixtral-router-loss", vocab_size=VOCABULARY, dtype=torch.float32)
        model.config.output_router_logits = by_config
        return model

    def evaluated(plugin: SPPOPlugin | None) -> tuple[dict[str, float], Any]:
        trainer = _trainer(
            tmp_path,
            plugin,
            make=make,
            data_collator=asking,
            compute_metrics=accuracy,
            preprocess_logits_for_metrics=of_second,
        )
        return _evaluated(trainer), trainer.predict(make_rows(3, seed=3)).predictions

    (ours, our_guesses), (plain, guesses) = evaluated(SPPOPlugin(SETTINGS)), evaluated(None)
    assert ours == pytest.approx(plain, rel=1e-4)
    np.testing.assert_array_equal(our_guesses, guesses)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:logits of the whole sequence")
def test_evaluate_and_predict_give_what_the_plain_trainer_gives(tmp_path, name, caplog):
    case = dict(CASES[name])
    function, near = case.pop("function", None), case.pop("near", 1e-4)
    watched = None if function is None else Watched(function)
    plain = _trainer(tmp_path, None, preprocess_logits_for_metrics=function, **case)
    expected = _evaluated(plain), plain.predict(make_rows(3, seed=3))
    with caplog.at_level(logging.WARNING, logger="sppo_hf"):
        trainer = _trainer(
            tmp_path, SPPOPlugin(SETTINGS), preprocess_logits_for_metrics=watched, **case
        )
        ours = _evaluated(trainer), trainer.predict(make_rows(3, seed=3))
    assert ours[0] == pytest.approx(expected[0], rel=near, abs=near)
    if near < 1e-3:
        _same_nest(ours[1].predictions, expected[1].predictions)
        _same_nest(ours[1].label_ids, expected[1].label_ids)
    engine = get_engine(trainer.model)
    assert engine.logits_request is None
    assert trainer.preprocess_logits_for_metrics is watched
    assert ("does not treat tokens one by one" in caplog.text) == (name in NOT_TOKEN_WISE)
    if name in TOKEN_WISE:
        whole = [shape for shape in watched.shapes if shape[1] == ROW_TOKENS]
        assert len(whole) == 1, "the first batch alone is compared with whole logits"
        assert max(shape[1] for shape in watched.shapes if shape[1] != ROW_TOKENS) == TILE


def test_metrics_between_training_steps(tmp_path):
    def history(plugin):
        trainer = _trainer(
            tmp_path,
            plugin,
            compute_metrics=accuracy,
            preprocess_logits_for_metrics=argmax,
            arguments={"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2},
        )
        trainer.train()
        return [log for log in trainer.state.log_history if "eval_accuracy" in log]

    plain, ours = history(None), history(SPPOPlugin(SETTINGS))
    assert len(ours) == len(plain) == 2
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine["eval_accuracy"] == theirs["eval_accuracy"]
        assert mine["eval_loss"] == pytest.approx(theirs["eval_loss"], abs=1e-4)


class _LooksAtLogits(Trainer):
    """A Trainer whose loss reads logits in evaluation."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss
        if not model.training and return_outputs:
            loss = loss + outputs.logits.float().pow(2).mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.filterwarnings("ignore:logits of the whole sequence")
def test_a_subclass_that_looks_at_logits_gets_them_whole(tmp_path):
    given = {"kind": _LooksAtLogits, "compute_metrics": accuracy,
             "preprocess_logits_for_metrics": argmax}  # fmt: skip
    expected = _evaluated(_trainer(tmp_path, None, **given))
    ours = _evaluated(_trainer(tmp_path, SPPOPlugin(SETTINGS), **given))
    assert ours == pytest.approx(expected, abs=1e-4)


def test_predicting_rows_without_labels(tmp_path):
    rows = [{"input_ids": row["input_ids"]} for row in make_rows(3)]
    expected = _trainer(tmp_path, None).predict(rows).predictions
    ours = _trainer(tmp_path, SPPOPlugin(SETTINGS)).predict(rows).predictions
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", [None, argmax])
def test_a_trainer_without_the_plugin_evaluates_a_converted_model(tmp_path, function):
    given = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": function}
    expected = _evaluated(_trainer(tmp_path, None, **given))
    converted = SPPOPlugin(SETTINGS).convert(make_model())
    trainer = _trainer(tmp_path, None, make=lambda: converted, **given)
    assert _evaluated(trainer) == pytest.approx(expected, abs=1e-4)
    assert "training_step" not in trainer.__dict__
    assert "evaluation_loop" not in _trainer(tmp_path, None).__dict__


def test_whole_logits_warn_in_one_line(tmp_path):
    trainer = _trainer(tmp_path, SPPOPlugin(SETTINGS), compute_metrics=accuracy)
    line = rf"asked for by compute_metrics: 2 x {ROW_TOKENS} x {VOCABULARY} values"
    with pytest.warns(UserWarning, match=line) as warned:
        trainer.evaluate()
    assert len([w for w in warned if "whole sequence" in str(w.message)]) == 1


def test_an_error_of_the_users_function_leaves_the_trainer_as_it_was(tmp_path):
    def fails(logits: Tensor, labels: Tensor) -> Tensor:
        raise ZeroDivisionError("mine")

    trainer = _trainer(tmp_path, SPPOPlugin(SETTINGS), preprocess_logits_for_metrics=fails,
                       compute_metrics=accuracy)  # fmt: skip
    with pytest.raises(ZeroDivisionError, match="mine"):
        trainer.evaluate()
    assert trainer.preprocess_logits_for_metrics is fails
    assert get_engine(trainer.model).logits_request is None


def test_a_function_that_changes_its_mind_is_refused(tmp_path):
    calls = []

    def fickle(logits: Tensor, labels: Tensor) -> Tensor:
        calls.append(logits.shape)
        # The first batch is 10 tiles and one whole call.
        return logits.argmax(-1) if len(calls) < 16 else logits.flatten(1)

    trainer = _trainer(tmp_path, SPPOPlugin(SETTINGS), preprocess_logits_for_metrics=fickle,
                       compute_metrics=accuracy)  # fmt: skip
    with pytest.raises(ConfigError, match=r"does not treat tokens one by one.*return_logits=True"):
        trainer.evaluate()


# -- where whole logits do not fit -------------------------------------------------------------

LARGE_VOCABULARY = 20_000
SMALL = {**SETTINGS, "loss_tile_tokens": 4, "device_memory": "6MiB"}
"""Room for 2.5 MiB of weights and for a tile of 16 tokens' logits, not for 3.7 MiB of a batch's."""


class _Steps(TrainerCallback):
    """Counts steps."""

    ended = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ended += 1


def _large_trainer(folder, **given):
    AcceleratorState._reset_state(reset_partial_state=True)
    steps = _Steps()
    model = make_model(vocab_size=LARGE_VOCABULARY, tie_word_embeddings=True)
    model.lm_head.requires_grad_(False)
    trainer = Trainer(
        model,
        make_arguments(
            folder,
            parallelism_config=SPPOPlugin(SMALL),
            max_steps=1,
            eval_strategy="steps",
            eval_steps=1,
        ),
        train_dataset=make_rows(4),
        eval_dataset=make_rows(4, seed=2),
        callbacks=[steps],
        **given,
    )
    return trainer, steps


@pytest.mark.parametrize("function", [None, centred, of_rows])
def test_metrics_that_exceed_the_budget_are_refused_before_training(tmp_path, function):
    trainer, steps = _large_trainer(
        tmp_path, compute_metrics=accuracy, preprocess_logits_for_metrics=function
    )
    with pytest.raises(BudgetError, match=r"compute_metrics needs .* 2 x 24 x 20000 values.*bytes"):
        trainer.train()
    assert steps.ended == 0


def test_logits_are_budgeted_on_the_device_of_the_batches(tmp_path, monkeypatch):
    """Weights may rest on the host, where the first parameter then is."""
    trainer = _trainer(tmp_path, SPPOPlugin(SETTINGS), compute_metrics=accuracy)
    trainer.evaluate()
    engine = get_engine(trainer.model)
    asked = []

    def need(batch_rows, total_tokens, device):
        asked.append(device)
        return 0, None

    monkeypatch.setattr(engine.plans, "device_bytes_with_logits", need)
    monkeypatch.setattr(trainer.accelerator.state, "device", torch.device("cuda", 3))
    TrainerEvaluation(trainer).before_training()
    assert asked == [torch.device("cuda", 3)]


def test_a_token_wise_function_runs_where_whole_logits_do_not_fit(tmp_path):
    watched = Watched(argmax)
    trainer, _ = _large_trainer(
        tmp_path, compute_metrics=accuracy, preprocess_logits_for_metrics=watched
    )
    trainer.train()
    # Eight tokens of noise were tried before training.
    assert max(rows * tokens for rows, tokens, _ in watched.shapes) == 8
    (logged,) = [log for log in trainer.state.log_history if "eval_accuracy" in log]
    plain = trainer.accelerator.parallelism_config.revert(trainer.model)
    rows = make_rows(4, seed=2)
    with torch.no_grad():
        guesses = plain(input_ids=torch.stack([row["input_ids"] for row in rows])).logits.argmax(-1)
    right = guesses[:, :-1] == torch.stack([row["labels"] for row in rows])[:, 1:]
    assert logged["eval_accuracy"] == pytest.approx(right.float().mean().item())


def test_a_row_wise_function_is_refused_where_whole_logits_do_not_fit(tmp_path):
    trainer, _ = _large_trainer(tmp_path, preprocess_logits_for_metrics=centred)
    with pytest.raises(ConfigError, match="does not treat tokens one by one"):
        trainer.predict(make_rows(2))


def test_predict_over_the_budget_is_refused_with_bytes(tmp_path):
    trainer, _ = _large_trainer(tmp_path)
    with pytest.raises(BudgetError, match=r"predict\(\) needs .*preprocess_logits_for_metrics"):
        trainer.predict(make_rows(2))


def test_looking_at_rows_before_training_changes_no_random_number(tmp_path):
    def losses(metrics):
        trainer = _trainer(tmp_path, SPPOPlugin(SETTINGS), arguments={"max_steps": 3},
                           eval_rows=_Noisy(), **metrics)  # fmt: skip
        trainer.train()
        return [log["loss"] for log in trainer.state.log_history if "loss" in log]

    assert losses({"compute_metrics": accuracy}) == losses({})


def test_before_training_the_longest_rows_with_token_labels_are_looked_at():
    """Of what has others or none, the evaluation itself will say so."""

    def rows(*tokens: int) -> list[dict[str, Tensor]]:
        return [{"input_ids": torch.ones(n), "labels": torch.ones(n)} for n in tokens]

    def collate(chosen: list[dict[str, Tensor]]) -> dict[str, Any]:
        lengths = [len(row["input_ids"]) for row in chosen]
        labels = {3: None, 4: torch.ones(2), 5: [1, 2]}
        return {"labels": labels.get(max(lengths), torch.ones(len(chosen), max(lengths)))}

    trainer = SimpleNamespace(
        eval_dataset={"long": rows(6, 7, 9), **{str(n): rows(n, 1) for n in (3, 4, 5)}},
        args=SimpleNamespace(per_device_eval_batch_size=2),
        data_collator=collate,
        _get_collator_with_removed_columns=lambda collate: collate,
    )
    evaluation: Any = SimpleNamespace(_trainer=trainer)
    found = [labels.shape for labels in TrainerEvaluation._longest_labels(evaluation)]
    assert found == [(2, 9)]


class _Noisy(torch.utils.data.Dataset):
    """A dataset that draws its rows."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCABULARY, (ROW_TOKENS,))
        return {"input_ids": ids, "labels": ids}


# -- several ranks -----------------------------------------------------------------------------


@pytest.mark.parametrize("function", [argmax, log_probabilities, best_three])
def test_results_are_padded_to_the_longest_rank(function):
    trainer = SimpleNamespace(accelerator=SimpleNamespace(native_amp=False))
    evaluation = TrainerEvaluation(trainer)
    evaluation._function = function
    logits, labels = torch.randn(2, 6, 11), torch.randint(0, 11, (2, 6))
    padded = torch.nn.functional.pad(logits, (0, 0, 0, 3), value=-100)
    expected = function(padded, torch.nn.functional.pad(labels, (0, 3), value=-100))
    request = LogitsRequest(whole=False, reduce=function, reduced=function(logits, labels),
                            logits_tokens=6, vocab_size=11, logits_dtype=logits.dtype)  # fmt: skip
    ours = evaluation._pad_as_gathered(request, torch.zeros(2, 9))
    torch.testing.assert_close(ours, expected)


def test_logits_are_refused_in_a_pipeline_before_training(tmp_path, monkeypatch):
    trainer = _trainer(tmp_path, SPPOPlugin(SETTINGS), compute_metrics=accuracy)
    engine = PipelineEngine.__new__(PipelineEngine)
    engine.config = SPPOPlugin(pp_size=2).config
    monkeypatch.setattr(TrainerEvaluation, "_engine", lambda self: engine)
    remedy = r"compute_metrics needs logits.*pp_size=2.*prediction_loss_only=True"
    with pytest.raises(ConfigError, match=remedy):
        trainer.train()
    with pytest.raises(ConfigError, match=remedy):
        trainer.evaluate()
    trainer.compute_metrics = None
    with pytest.raises(ConfigError, match=r"predict\(\) needs logits"):
        trainer.predict(make_rows(2))
