"""The same Trainer script with the plugin and without: the numbers it logs must be the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn
from transformers import Trainer

from sppo_hf import SPPOPlugin
from sppo_hf.engine.family_guard import family_check_disabled
from sppo_hf.testing.exactness import float64_everywhere
from sppo_hf.testing.tiny_models import build_tiny_model
from tests.integrations.training import VOCABULARY, make_arguments, make_model, make_rows
from tests.sweeps import ALL

NEAR = 1e-4


def _history(
    folder,
    plugin: SPPOPlugin | None,
    compute_loss_func=None,
    make: Callable[[], nn.Module] = make_model,
    **changes,
) -> list[dict[str, float]]:
    AcceleratorState._reset_state(reset_partial_state=True)
    trainer = Trainer(
        make(),
        make_arguments(folder, parallelism_config=plugin, **changes),
        train_dataset=make_rows(40),
        eval_dataset=make_rows(10, seed=2),
        compute_loss_func=compute_loss_func,
    )
    trainer.train()
    return trainer.state.log_history


def _series(history: list[dict[str, float]], name: str) -> list[float]:
    return [entry[name] for entry in history if name in entry]


BATCH = {"per_device_train_batch_size": 4}
ACCUMULATED = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.3,
}


def _steps(count: int) -> dict[str, Any]:
    return {"max_steps": count, "eval_strategy": "steps", "eval_steps": count // 2}


FEW = 50 if ALL else 4
"""Steps of runs that differ in settings from one of fifty."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Callable[[dict[str, Any]], list[dict[str, float]]]:
    """Runs without the plugin, each once for all tests that compare with it."""
    made: dict[str, list[dict[str, float]]] = {}

    def history(changes: dict[str, Any]) -> list[dict[str, float]]:
        if str(changes) not in made:
            made[str(changes)] = _history(tmp_path_factory.mktemp("plain"), None, **changes)
        return made[str(changes)]

    return history


@pytest.mark.parametrize(
    ("settings", "changes", "steps"),
    [
        ({"num_chunks": 3}, BATCH, 50),
        ({"num_chunks": 3}, ACCUMULATED, FEW),
        ({"chunk_lengths": (5, 1, 18), "recompute": "none"}, BATCH, FEW),
        ({"chunk_tokens": 7, "offload": "full", "min_offload_size": 1}, ACCUMULATED, FEW),
    ],
    ids=["recompute", "recompute-accumulated", "keep-uneven", "offload-accumulated"],
)
def test_many_steps_log_the_same_numbers(tmp_path, plain, settings, changes, steps):
    changes = {**_steps(steps), **changes}
    ours = _history(tmp_path, SPPOPlugin(settings, show_plan=False), **changes)
    for name, count in (("loss", steps), ("grad_norm", steps), ("eval_loss", 2)):
        expected = _series(plain(changes), name)
        assert len(expected) == count
        assert _series(ours, name) == pytest.approx(expected, rel=NEAR, abs=NEAR), name
    losses = _series(ours, "loss")
    if steps == 50:
        assert losses[-1] < losses[0] - 0.5, "a curve that stands still would agree with anything"


@pytest.mark.slow
def test_many_steps_of_a_hybrid_log_the_same_numbers(tmp_path):
    def history(folder, plugin: SPPOPlugin | None) -> list[dict[str, float]]:
        tiny = build_tiny_model("qwen3_5_text", vocab_size=VOCABULARY)
        torch.manual_seed(0)
        # With Transformers' own first weights: those of tiny models let a step decide the next.
        model = type(tiny)(tiny.config).double()
        with float64_everywhere(), family_check_disabled():  # what it would find is found here
            return _history(folder, plugin, make=lambda: model, **_steps(FEW))

    plugin = SPPOPlugin(chunk_lengths=(5, 2, 17), recompute="full", show_plan=False)
    plain, ours = history(tmp_path, None), history(tmp_path, plugin)
    for name, count in (("loss", FEW), ("grad_norm", FEW), ("eval_loss", 2)):
        expected = _series(plain, name)
        assert len(expected) == count
        assert _series(ours, name) == pytest.approx(expected, rel=1e-9), name
    losses = _series(ours, "loss")
    if FEW == 50:
        assert losses[-1] < losses[0] - 0.2, "a curve that stands still would agree with anything"


def _squared(outputs, labels, num_items_in_batch=None):
    return outputs["logits"].float().pow(2).mean()


def test_a_loss_outside_of_the_model_is_named_with_what_it_costs(tmp_path):
    settings = {"max_steps": 2}
    for given, requested_by in (
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
        ({"compute_loss_func": _squared}, "compute_loss_func"),
    ):
        plain = _history(tmp_path, None, **settings, **given)
        with pytest.warns(
            UserWarning, match=f"whole sequence are made, asked for by {requested_by}:"
        ):
            ours = _history(
                tmp_path, SPPOPlugin(num_chunks=3, show_plan=False), **settings, **given
            )
        assert _series(ours, "loss") == pytest.approx(_series(plain, "loss"), abs=NEAR)


def test_neftune_draws_the_same_noise(tmp_path):
    """On a CPU trained embeddings are of the whole sequence; chunks': test_engine.py."""
    settings = {"neftune_noise_alpha": 15.0, "max_steps": 3, "eval_strategy": "steps"}
    settings |= {"eval_steps": 3}
    plain, without = _history(tmp_path, None, **settings), _history(tmp_path, None, max_steps=3)
    ours = _history(tmp_path, SPPOPlugin(num_chunks=3, show_plan=False), **settings)
    for name in ("loss", "grad_norm", "eval_loss"):
        assert _series(ours, name) == pytest.approx(_series(plain, name), abs=NEAR)
    assert _series(plain, "loss") != pytest.approx(_series(without, "loss"), abs=1e-4)


def test_evaluating_without_training(tmp_path):
    def eval_loss(plugin: SPPOPlugin | None) -> float:
        AcceleratorState._reset_state(reset_partial_state=True)
        args = make_arguments(tmp_path, parallelism_config=plugin)
        return Trainer(make_model(), args, eval_dataset=make_rows(6)).evaluate()["eval_loss"]

    ours = eval_loss(SPPOPlugin(num_chunks=3, show_plan=False))
    assert ours == pytest.approx(eval_loss(None), abs=NEAR)


def test_a_checkpoint_is_resumed_by_a_plain_trainer_and_by_ours(tmp_path):
    def train(plugin: SPPOPlugin | None, **changes) -> nn.Module:
        AcceleratorState._reset_state(reset_partial_state=True)
        args = make_arguments(
            tmp_path,
            parallelism_config=plugin,
            max_steps=6,
            save_strategy="steps",
            save_steps=3,
            lr_scheduler_type="constant",
        )
        trainer = Trainer(make_model(), args, train_dataset=make_rows(40))
        trainer.train(**changes)
        return trainer.model

    plugin = SPPOPlugin(num_chunks=3, show_plan=False)
    whole = train(plugin)
    for resumed_with in (plugin, None):
        checkpoint = str(tmp_path / "checkpoint-3")
        resumed = train(resumed_with, resume_from_checkpoint=checkpoint)
        for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
