"""A job of test_load_model.py for each rank: load own stages, train a step, compare.

`folder` holds a checkpoint per family. Every rank loads the whole model as well, plainly, and
compares loss and gradients of its stages with it.
"""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from sppo_hf import SPPOPlugin
from sppo_hf.engine.convert import revert
from sppo_hf.engine.device_facts import model_profile
from sppo_hf.engine.model_parts import find_causal_lm, find_parts
from sppo_hf.engine.stages import staged_model_of
from sppo_hf.errors import ConfigError
from sppo_hf.pipeline.convert import convert_over_ranks
from sppo_hf.testing.exactness import float64_everywhere, run_reference
from sppo_hf.testing.tiny_models import add_lora, make_batch
from tests.pipeline.fork_server import leave_together

INTERLEAVED = {"pp_schedule": "interleaved_seq1f1b", "pp_virtual_stages": 2}


def compare(
    folder: Path, family: str, *, lora: bool = False, again: bool = False, **settings: Any
) -> dict[str, Any]:
    """Train one step; returns errors against the whole model, and how many gradients there were."""
    plugin = SPPOPlugin(pp_size=2, num_chunks=3, show_plan=False, **settings)
    # Grouped matrix products exist in few dtypes; the plain loop over experts runs in all.
    loading = {"experts_implementation": "eager"} if "moe" in family else {}
    whole: nn.Module = AutoModelForCausalLM.from_pretrained(folder / family, **loading)
    model: nn.Module = plugin.load_model(folder / family, **loading)
    if lora:
        whole, model = add_lora(whole), add_lora(model)
        _copy_adapters(whole, model)
    model.train()
    staged = staged_model_of(find_causal_lm(model))
    convert_over_ranks(model, plugin.config)
    if again:
        convert_over_ranks(revert(model), plugin.config)
    assert staged_model_of(find_causal_lm(model)) is staged, "it was not cut a second time"
    batch = make_batch(rows=2, tokens=23)
    with float64_everywhere():
        loss = model(**batch).loss
        loss.backward()
        reference = run_reference(whole.train(), batch, hooks=False)
    errors = {"loss": abs(loss.item() - float(reference.loss))}
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    for name, grad in trained.items():
        assert grad is not None, name
        errors[name] = (grad - reference.by_name[name]).abs().max().item()
    return {
        "worst": max(errors.values()),
        "names": sorted(trained),
        "all": sorted(name for name, p in whole.named_parameters() if p.requires_grad),
    }


def _copy_adapters(whole: nn.Module, model: nn.Module) -> None:
    theirs = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(theirs[name])


def refused(folder: Path) -> str:
    """Load with one number of stages and convert with another."""
    model = SPPOPlugin(pp_size=2).load_model(folder / "llama-deep")
    try:
        convert_over_ranks(model, SPPOPlugin(pp_size=2, **INTERLEAVED).config)
    except ConfigError as error:
        return str(error)
    return "it was not refused"


def freed_share() -> float:
    """Cut a whole model to one stage; return the freed share of the other stages' memory."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=512,
        intermediate_size=4096,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = LlamaForCausalLM(config)
    whole = sum(p.nbytes for p in model.parameters())
    parameters = [weakref.ref(p) for p in model.parameters()]
    model_profile(find_parts(model))  # what is traced on the CPU, see `fork_server`, leaves holes
    before = psutil.Process().memory_info().rss
    convert_over_ranks(model, SPPOPlugin(pp_size=2, show_plan=False).config)
    gc.collect()
    alive = [p for p in (ref() for ref in parameters) if p is not None]
    assert len(alive) == len(list(model.parameters())), "nothing else holds a parameter"
    others = whole - sum(p.nbytes for p in model.parameters())
    assert others > 0.4 * whole
    return (before - psutil.Process().memory_info().rss) / others


def main(job: dict[str, Any]) -> None:
    """Run all comparisons; every rank writes what it saw."""
    folder = Path(job["folder"])
    torch.set_num_threads(1)
    seen = {
        "tied": compare(folder, "llama-bias-tied", again=True),
        "windows": compare(folder, "gemma2", pp_schedule="zb_seq1f1b"),
        "experts": compare(folder, "qwen3_moe"),
        "interleaved": compare(folder, "llama-deep", **INTERLEAVED),
        "lora": compare(folder, "llama", lora=True),
    }
    result = {"seen": seen, "refused": refused(folder), "freed": freed_share()}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    leave_together()
