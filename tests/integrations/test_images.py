"""Images under the standard Trainer: training, evaluation and predictions are the plain one's."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer

from sppo_hf import SPPOPlugin
from sppo_hf.engine.convert import get_engine
from sppo_hf.engine.model_parts import suppress_peft_warnings
from sppo_hf.testing.tiny_models import build_tiny_model
from tests.integrations.training import (
    checkpointing,
    collate_images,
    make_arguments,
    make_rows,
    with_image,
)
from tests.sweeps import sample


def _train(folder: Any, name: str, plugin: SPPOPlugin | None, *, lora: bool) -> dict[str, Any]:
    model: Any = build_tiny_model(name, dtype=torch.float32)
    # A batch of two rows has images in both, in one of them, or in none.
    rows = [with_image(model, row, index % 6 < 3) for index, row in enumerate(make_rows(16))]
    if lora:
        peft = pytest.importorskip("peft")
        torch.manual_seed(3)
        with suppress_peft_warnings():
            settings = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
            model = peft.get_peft_model(model, settings)
    args = make_arguments(
        folder,
        parallelism_config=plugin,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        learning_rate=1e-3,
        remove_unused_columns=False,
        **(checkpointing() if plugin is not None else {}),
    )
    trainer = Trainer(
        model, args, train_dataset=rows, eval_dataset=rows[:5], data_collator=collate_images
    )
    trainer.train()
    losses = [entry[key] for key in ("loss", "eval_loss", "grad_norm")
              for entry in trainer.state.log_history if key in entry]  # fmt: skip
    if plugin is not None:
        assert get_engine(model).counters["attention_forwards"] > 0
    predicted = trainer.predict(rows[:4]).predictions
    # The plain model returns Qwen-VL's `rope_deltas`, too.
    return {"losses": losses, "logits": predicted if plugin is not None else predicted[0]}


@pytest.mark.parametrize(
    ("name", "lora"), sample([("qwen3_vl", True), ("gemma3", False), ("qwen3_5", False)], 2)
)
def test_training_evaluation_and_predictions(tmp_path: Any, name: str, lora: bool) -> None:
    plain = _train(tmp_path / "plain", name, None, lora=lora)
    plugin = SPPOPlugin(num_chunks=3, show_plan=False)
    ours = _train(tmp_path / "ours", name, plugin, lora=lora)
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert len(ours["losses"]) == 10, "four steps, and two evaluations"
    np.testing.assert_allclose(ours["logits"], plain["logits"], rtol=2e-3, atol=2e-3)
