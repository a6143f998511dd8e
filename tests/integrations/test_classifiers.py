"""Classifiers under the standard Trainer: training, evaluation, predictions are the plain one's."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer

from sppo_hf import SPPOPlugin
from sppo_hf.engine.convert import get_engine
from sppo_hf.engine.model_parts import suppress_peft_warnings
from sppo_hf.integrations.evaluation import TrainerEvaluation
from sppo_hf.testing.tiny_models import build_tiny_classifier
from tests.integrations.training import make_arguments
from tests.sweeps import sample

CLASSES = 3
TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}


def _rows(kind: str, count: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng(1)
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        tokens = int(draw.integers(12, 40))
        row: dict[str, Any] = {"input_ids": draw.integers(1, 97, tokens).tolist()}
        if kind == "ForSequenceClassification":
            row["labels"] = int(draw.integers(CLASSES))
        elif kind == "ForTokenClassification":
            row["labels"] = draw.integers(0, CLASSES, tokens).tolist()
        else:
            row["start_positions"], row["end_positions"] = sorted(draw.integers(0, tokens, 2))
        rows.append(row)
    return rows


def _collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100}
    batch = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if isinstance(values[0], list):
            values = [value + [fill[name]] * (longest - len(value)) for value in values]
        batch[name] = torch.tensor(values)
    return {**batch, "attention_mask": (batch["input_ids"] != 0).long()}


def _train(folder: Any, kind: str, plugin: SPPOPlugin | None, *, lora: bool) -> dict[str, Any]:
    model: Any = build_tiny_classifier("qwen3", kind, dtype=torch.float32, pad_token_id=0)
    if lora:
        peft = pytest.importorskip("peft")
        torch.manual_seed(3)
        with suppress_peft_warnings():
            # PEFT trains the head as well.
            model = peft.get_peft_model(model, peft.LoraConfig(task_type=TASKS[kind], r=4))
    # Not Adam: of a bias that no softmax notices it would make rounding into whole steps.
    optimizer = {"optim": "sgd", "learning_rate": 0.05}
    steps = {"max_steps": 2, "gradient_accumulation_steps": 2}
    args = make_arguments(folder, parallelism_config=plugin, **steps, **optimizer)
    rows = _rows(kind, 16)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows,
        eval_dataset=rows[:5],
        data_collator=_collate,
        compute_metrics=lambda seen: {"sum": float(np.abs(seen.predictions[0]).sum())},
    )
    trainer.train()
    if plugin is not None:
        assert get_engine(model).counters["attention_forwards"] >= 2 * 2 * 3 * 3
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return {
        "losses": [log["loss"] for log in logs],
        "norms": [log["grad_norm"] for log in logs],
        "evaluated": [trainer.evaluate()[key] for key in ("eval_loss", "eval_sum")],
        "predicted": np.concatenate(
            [np.ravel(part) for part in trainer.predict(rows[5:10]).predictions]
        ).tolist(),
    }


@pytest.mark.parametrize(
    ("kind", "lora"), sample([(kind, lora) for lora in (True, False) for kind in TASKS], 2)
)
def test_as_the_plain_trainer_does(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, kind: str, lora: bool
) -> None:
    def refuse(*_: Any) -> None:
        pytest.fail("its logits are as small as without SPPO, whatever the vocabulary")

    monkeypatch.setattr(TrainerEvaluation, "_check_logits_fit", refuse)
    expected = _train(tmp_path, kind, None, lora=lora)
    ours = _train(tmp_path, kind, SPPOPlugin(num_chunks=3, show_plan=False), lora=lora)
    assert len(expected["losses"]) == 2
    assert min(expected["norms"]) > 0.01
    for name, values in expected.items():
        assert ours[name] == pytest.approx(values, rel=1e-4, abs=1e-5), name
