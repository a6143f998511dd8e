"""Full fine-tuning with weights and optimizer on the host, beside the plain Trainer, on this CPU.

    python recipes/benchmarks/host_weights.py --check

SmolLM2-135M-Instruct in float32 on source code. Compares losses and gradient norms of both runs by
step, and of a third run that resumes from the second one's checkpoint; and says how many bytes
of weights were on the "device" at a time. On a CPU that is ordinary memory too, so these are the
bytes of the copies, not of the process.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes' own modules

import torch
from accelerate.state import AcceleratorState
from documents import load_documents
from packing import RightPaddingCollator, pack_documents
from smollm2 import DEFAULT_MODEL, load_model, load_tokenizer
from transformers import Trainer, TrainingArguments

from sppo_hf import SPPOPlugin
from sppo_hf.engine.convert import get_engine
from sppo_hf.rules import format_bytes

MAX_RELATIVE_ERROR = 1e-4
NUMBERS = ("loss", "grad_norm")


def train(
    options: argparse.Namespace,
    folder: Path,
    rows: Any,
    tokenizer: Any,
    *,
    resume: bool,
    **settings: str,
) -> dict[str, Any]:
    """Run the Trainer; return its numbers by step, and the bytes that were on the device."""
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    model = load_model(options.model, dtype=torch.float32, max_length=options.tokens)
    plugin = (
        SPPOPlugin(chunk_tokens=options.chunk_tokens, show_plan=False, **settings)
        if settings
        else None
    )
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=options.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=1e-5,
        logging_steps=1,
        save_strategy="steps",
        save_steps=options.steps // 2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        parallelism_config=plugin,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows,
        data_collator=RightPaddingCollator(pad_token_id=tokenizer.pad_token_id),
    )
    began = time.perf_counter()
    half = folder / f"checkpoint-{options.steps // 2}"
    trainer.train(resume_from_checkpoint=str(half) if resume else None)
    taken: dict[str, Any] = {"seconds": time.perf_counter() - began}
    for name in NUMBERS:
        taken[name] = [entry[name] for entry in trainer.state.log_history if name in entry]
    if settings:
        engine = get_engine(model)
        weights = engine.weights
        with torch.enable_grad():
            plan = engine.plan(1, options.tokens, torch.device("cpu"))
        taken["predicted_bytes"] = plan.shape.weight_bytes
        taken["peak_bytes"] = weights.peak_bytes
        taken["weight_bytes"] = weights.host_bytes
        taken["left_bytes"] = weights.device_bytes
    return taken


def missed(results: dict[str, dict[str, Any]]) -> list[str]:
    """Describe numbers that differ between runs, and wrong bytes on the device."""
    plain, hosted, resumed = (results[name] for name in ("plain", "hosted", "resumed"))
    found = []
    for name in NUMBERS:
        for other, steps in ((plain, hosted[name]), (resumed, hosted[name][-len(resumed[name]) :])):
            theirs = other[name][-len(steps) :]
            worst = max(abs(a - b) / abs(b) for a, b in zip(steps, theirs, strict=True))
            if worst > MAX_RELATIVE_ERROR:
                found.append(f"{name}: {worst:.1e} apart")
    if hosted["peak_bytes"] != hosted["predicted_bytes"] or hosted["left_bytes"]:
        found.append(f"device bytes: {hosted['peak_bytes']:,}, left {hosted['left_bytes']:,}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--chunk-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit with 1 where runs differ")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.model)
    rows = pack_documents(
        load_documents("installed-packages"), tokenizer, max_length=options.tokens
    ).select(range(2 * options.steps))
    results: dict[str, dict[str, Any]] = {}
    host = {"weights": "host", "optimizer": "host"}
    with tempfile.TemporaryDirectory() as folder:
        common = (options, Path(folder), rows, tokenizer)
        results["plain"] = train(options, Path(folder) / "plain", rows, tokenizer, resume=False)
        results["hosted"] = train(*common, resume=False, **host)
        results["resumed"] = train(*common, resume=True, **host)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    plain, hosted, resumed = results["plain"], results["hosted"], results["resumed"]
    for name in NUMBERS:
        apart = max(abs(a - b) / abs(b) for a, b in zip(hosted[name], plain[name], strict=True))
        print(f"{name}: {plain[name][0]:.4f} -> {plain[name][-1]:.4f}, hosted {apart:.1e} apart")
    print(
        f"resumed at step {options.steps // 2}: last loss {resumed['loss'][-1]:.6f}, "
        f"hosted {hosted['loss'][-1]:.6f}"
    )
    print(
        f"weights {format_bytes(hosted['weight_bytes'])}; on the device at most "
        f"{format_bytes(hosted['peak_bytes'])}, predicted {format_bytes(hosted['predicted_bytes'])}"
    )
    print(f"seconds: plain {plain['seconds']:.0f}, hosted {hosted['seconds']:.0f}")
    wrong = missed(results)
    print("\n".join(wrong) or "as they should be")
    return 1 if options.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
