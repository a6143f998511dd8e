"""Measures one forward and backward under given settings, in a fresh process.

Shared by the CPU benchmarks: real text, one process per measurement, and the operating system's
peaks.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes' own modules

import torch
from documents import installed_packages
from packing import pack_documents
from report import forget_peak, loaded_bytes, peak_host_bytes
from smollm2 import DEFAULT_MODEL, load_model, load_tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from sppo_hf import SPPOPlugin
from sppo_hf.engine.model_parts import suppress_peft_warnings
from sppo_hf.engine.step_observer import StepObserver, StepRecord
from sppo_hf.planning.memory import Cause
from sppo_hf.planning.plan import Plan


class _PlanAndRecord(StepObserver):
    """Keeps the plan and the record of the last step."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.record: StepRecord | None = None

    def on_plan(self, plan: Plan, model_name: str) -> None:
        self.plan = plan

    def on_record(self, record: StepRecord) -> None:
        self.record = record


HYBRID = str(Path(__file__).with_name("qwen3_5_100m"))
"""A Qwen3.5-shaped model of 95 million parameters: nine layers of Gated DeltaNet, three of
attention; 64 of 128 dimensions a head. A configuration without weights."""

MHA = str(Path(__file__).with_name("llama_148m_mha"))
"""SmolLM2-135M's shape with as many K/V heads as query heads (nine). Without weights."""

INDEXED = str(Path(__file__).with_name("deepseek_v32_61m"))
"""A DeepSeek-V3.2-shaped model of 61 million parameters, with experts in seven of eight layers. Its
indexers choose 512 keys for each query. Without weights."""

SHAPES = {"hybrid": HYBRID, "mha": MHA, "indexed": INDEXED}
"""Folders of these configurations, by their names for the benchmarks' `--model`."""


def load(name: str) -> nn.Module:
    """Load a model for training in float32; a folder without weights gets random ones."""
    if _is_shape(name):
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(name)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    return load_model(name, dtype=torch.float32).train()


def _is_shape(name: str) -> bool:
    folder = Path(name)
    return (folder / "config.json").is_file() and not any(folder.glob("*.safetensors"))


def real_tokens(model_name: str, rows: int, tokens: int) -> torch.Tensor:
    """Return token ids of real source code, `[rows, tokens]`."""
    tokenizer = load_tokenizer(DEFAULT_MODEL if _is_shape(model_name) else model_name)
    code = installed_packages(["transformers"], max_document_chars=8 * tokens * rows)
    packed = pack_documents(code, tokenizer, max_length=tokens)
    if len(packed) < rows or len(packed[rows - 1]["input_ids"]) < tokens:
        raise SystemExit(f"fewer than {rows} rows of {tokens} tokens of text were found")
    return torch.tensor([packed[row]["input_ids"] for row in range(rows)])


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in this process: load, then one forward and backward.

    Args:
        job: `model`, `rows`, `tokens`, `threads`, `settings` of the plugin, and optionally `lora`
            (a rank) and `warm_up` (false measures the first step, which has no gradients yet).
    """
    torch.set_num_threads(job["threads"])
    input_ids = real_tokens(job["model"], job["rows"], job["tokens"])
    model: Any = load(job["model"])
    if job.get("lora"):
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=job["lora"], target_modules="all-linear", task_type="CAUSAL_LM")
        with suppress_peft_warnings():
            model = get_peft_model(model, lora)
    kept = _PlanAndRecord()
    plugin = SPPOPlugin(show_progress=False, show_plan=False, **job["settings"])
    plugin.observer.subscribe(kept)
    plugin.convert(model)
    before_bytes = loaded_bytes(model)
    if job.get("warm_up", True):
        # As in every later step of a run that accumulates, gradients are there from the start.
        model(input_ids=input_ids, labels=input_ids).loss.backward()
    forget_peak()
    start_seconds = time.perf_counter()
    model(input_ids=input_ids, labels=input_ids).loss.backward()
    seconds = time.perf_counter() - start_seconds
    assert kept.plan is not None, "a step has a plan"
    assert kept.record is not None, "a step has a record"
    estimate = kept.plan.estimate
    predicted = estimate.peak_bytes("device", "host")
    device = estimate.device
    loaded = sum(device[cause] for cause in (Cause.WEIGHTS, Cause.LORA, Cause.OPTIMIZER))
    return {
        "seconds": seconds,
        "stall_seconds": kept.record.offload.stall_seconds,
        "peak_bytes_above_loaded": peak_host_bytes() - before_bytes,
        # Weights are loaded before, and no optimizer runs here.
        "predicted_bytes_above_loaded": predicted - loaded,
        "predicted_causes": dict(device.items()),
        "moment": estimate.moment,
        "disk_bytes": estimate.of("disk").total,
        "num_chunks": kept.plan.num_chunks,
    }


def in_own_process(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a fresh process and return what it measured."""
    command = [sys.executable, __file__, json.dumps(job)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
