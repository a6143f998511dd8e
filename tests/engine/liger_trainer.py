"""Train a tiny model twice under the Trainer with `use_liger_kernel`: as it is, and in chunks.

    python -m tests.engine.liger_trainer FAMILY DEVICE

The last line written is JSON: of both runs a list of (loss, gradients' norm), one for each step. On
a CPU Liger's kernels are left out.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from sppo_hf import SPPOPlugin
from sppo_hf.testing.tiny_models import build_tiny_model, image_batch, make_batch, takes_images

STEPS = 4
CHUNKED = SPPOPlugin(
    offload="full", min_offload_size=1, num_chunks=3, show_plan=False, show_progress=False
)


class Repeated(torch.utils.data.Dataset[dict[str, Any]]):
    """One batch for every step."""

    def __init__(self, batch: dict[str, Any]) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._batch


def make(family: str, device: str) -> tuple[Any, dict[str, Any]]:
    """A model and its batch."""
    model = build_tiny_model(family, dtype=torch.float32)
    if takes_images(model):
        return model, image_batch(model)
    return model, make_batch(tokens=2048 if device == "cuda" else 60)


def train(
    model: Any, batch: dict[str, Any], plugin: SPPOPlugin | None, device: str
) -> list[tuple[float, float]]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=1,
            learning_rate=1e-4,
            bf16=True,
            use_cpu=device == "cpu",
            use_liger_kernel=device == "cuda",
            parallelism_config=plugin,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(
            model, arguments, train_dataset=Repeated(batch), data_collator=lambda rows: rows[0]
        )
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(entry["loss"], entry["grad_norm"]) for entry in logged]


def main(family: str, device: str) -> None:
    # Its trials of all forms of a kernel take minutes.
    os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")
    # Both before Liger's patches, with which encoders run on a GPU only.
    made = [(plugin, *make(family, device)) for plugin in (None, CHUNKED)]
    runs = [train(model, batch, plugin, device) for plugin, model, batch in made]
    sys.stdout.write(json.dumps(runs) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
