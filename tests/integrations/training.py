"""A tiny Llama, rows for it and arguments to train it with, shared by the tests of this folder."""

from __future__ import annotations

import inspect
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from packaging.version import Version
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from sppo_hf.integrations.validation import FSDP2_TORCH
from sppo_hf.testing.tiny_models import IMAGE_TOKEN, add_images

VOCABULARY = 64
ROW_TOKENS = 24

FSDP2: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "SHARDED_STATE_DICT",
    },
}
"""Arguments of a run on several ranks that shard the model."""
needs_fsdp2 = pytest.mark.skipif(
    Version(torch.__version__).release < FSDP2_TORCH, reason="this PyTorch's FSDP2 is refused"
)


def make_model(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Build a Llama in float32, of two layers by default; a seed always gives the same weights."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))


def make_rows(count: int, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Draw rows whose labels are masked over a different number of tokens each."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        tokens = torch.randint(0, VOCABULARY, (ROW_TOKENS,), generator=generator)
        labels = tokens.clone()
        labels[: 1 + index % 7] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def with_image(model: Any, row: dict[str, torch.Tensor], has_one: bool) -> dict[str, torch.Tensor]:
    """Return a row for a tiny multimodal model, with an image or without."""
    ids = row["input_ids"].masked_fill(row["input_ids"] == IMAGE_TOKEN, IMAGE_TOKEN + 1)
    row = {**row, "input_ids": ids}
    if not has_one:
        names = inspect.signature(model.base_model.forward).parameters
        types = next(name for name in names if name.endswith("token_type_ids"))
        return {**row, types: torch.zeros_like(ids)}
    batch = {name: x[None] for name, x in row.items()}
    found = add_images(model, batch, images=1, seed=int(ids[0]))
    return {name: x if _is_of_images(name) else x[0] for name, x in found.items()}


def collate_images(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Make a batch of rows, of which some have an image; their patches follow each other."""
    batch = {}
    for name in {name for row in rows for name in row}:
        join = torch.cat if _is_of_images(name) else torch.stack
        batch[name] = join([row[name] for row in rows if name in row])
    return batch


def _is_of_images(name: str) -> bool:
    return "image" in name or "pixel" in name


def make_arguments(folder: str | Path, **changes: Any) -> TrainingArguments:
    """Build arguments for a short, quiet run on the CPU, also of a launch that asks for FSDP."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 4,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 7,
    }
    args = TrainingArguments(**{**settings, **changes})
    if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP") == "true":
        let_fsdp_run_on_cpus()
    return args


def let_fsdp_run_on_cpus() -> None:
    """Have Accelerate take FSDP up, which it does only where it sees GPUs; FSDP2 runs over gloo."""
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def checkpointing(on: bool = True) -> dict[str, bool]:
    """Name the checkpointing argument as the installed Transformers does, without a deprecation."""
    names = {field.name for field in fields(TrainingArguments)}
    newer, older = "activation_checkpointing", "gradient_checkpointing"
    return {newer if newer in names else older: on}


def switch_checkpointing_on(model: torch.nn.Module) -> None:
    """Call the method of the installed Transformers that is not deprecated."""
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)()


def is_checkpointing(model: torch.nn.Module) -> bool:
    """Return whether any part of the model would checkpoint."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
