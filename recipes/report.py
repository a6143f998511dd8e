"""Reports a finished training run: a table, a picture of the losses and a file of numbers."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import TrainOutput

from sppo_hf.rules import format_bytes

matplotlib.use("Agg")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The measured numbers of one run."""

    model: str
    dataset: str
    device: str
    sppo_enabled: bool
    row_tokens: int
    train_rows: int
    held_out_rows: int
    steps: int
    train_losses: tuple[float, ...]
    """Loss of every logged step."""
    loss_before: float
    """Held-out loss of the model as it was loaded."""
    loss_after: float
    """Held-out loss after the last step."""
    loss_reloaded: float | None
    """Held-out loss of the saved model in plain Transformers; None if that ran out of memory."""
    reload_tolerance: float
    train_seconds: float
    tokens_per_second: float
    loaded_host_bytes: int
    """Resident memory of the process when model and data were loaded."""
    peak_host_bytes: int
    """Peak resident memory of the process so far."""
    peak_device_bytes: int
    """The largest memory allocated on the GPU; 0 without one."""
    saved_to: str

    def failures(self) -> list[str]:
        """Describe in sentences what is wrong with the run; [] if nothing is."""
        found = []
        if not self.loss_after < self.loss_before:
            found.append(
                f"The held-out loss did not fall: {self.loss_before:.4f} before, "
                f"{self.loss_after:.4f} after. More steps or another learning rate may help."
            )
        if self.loss_reloaded is not None:
            off = abs(self.loss_reloaded - self.loss_after)
            if not off <= self.reload_tolerance * max(1.0, abs(self.loss_after)):
                found.append(
                    f"The reloaded model has another held-out loss: {self.loss_reloaded:.6f} "
                    f"instead of {self.loss_after:.6f}."
                )
        return found


def summarise(trainer: Trainer, trained: TrainOutput, reloaded: nn.Module, **facts: Any) -> Report:
    """Collect the numbers of a finished run.

    Args:
        trainer: the Trainer, trained.
        trained: what its `train()` returned.
        reloaded: a plain model made from what was saved.
        **facts: the fields of `Report` that only the script knows.
    """
    # Read before the plain model runs, whose peak does not count.
    peaks = {"peak_host_bytes": peak_host_bytes(), "peak_device_bytes": peak_device_bytes()}
    trainer.model.to("cpu")
    args, steps = trainer.args, trainer.state.global_step
    row_tokens = len(trainer.train_dataset[0]["input_ids"])
    # Ranks of a pipeline share their rows.
    rows_per_step = trainer.get_total_train_batch_size(args)
    seconds = trained.metrics["train_runtime"]
    return Report(
        device=torch.cuda.get_device_name() if args.device.type == "cuda" else "CPU",
        row_tokens=row_tokens,
        train_rows=len(trainer.train_dataset),
        held_out_rows=len(trainer.eval_dataset),
        steps=steps,
        train_losses=tuple(e["loss"] for e in trainer.state.log_history if "loss" in e),
        loss_reloaded=plain_loss(reloaded, trainer),
        reload_tolerance=1e-2 if args.bf16 or args.fp16 else 1e-4,
        train_seconds=seconds,
        tokens_per_second=steps * rows_per_step * row_tokens / seconds,
        **peaks,
        **facts,
    )


@torch.no_grad()
def plain_loss(model: nn.Module, trainer: Trainer) -> float | None:
    """The Trainer's held-out loss of an unmodified model, computed without the Trainer.

    Returns:
        The mean over rows, or None if the GPU's memory does not hold a plain forward.
    """
    args, rows = trainer.args, trainer.eval_dataset
    size = args.per_device_eval_batch_size
    half = torch.bfloat16 if args.bf16 else torch.float16
    model.to(args.device).eval()
    total = 0.0
    try:
        for start in range(0, len(rows), size):
            chosen = [rows[i] for i in range(start, min(start + size, len(rows)))]
            batch = {k: v.to(args.device) for k, v in trainer.data_collator(chosen).items()}
            with torch.autocast(args.device.type, half, enabled=args.bf16 or args.fp16):
                total += model(**batch).loss.item() * len(chosen)
    except torch.OutOfMemoryError:
        return None
    return total / len(rows)


def loaded_bytes(model: nn.Module) -> int:
    """Resident bytes of this process now, with the whole model in memory.

    On a CPU, weights of a file are mapped, and in memory when something has read them.
    """
    for weight in model.parameters():
        if weight.device.type == "cpu":
            weight.detach().sum()
    return psutil.Process().memory_info().rss


def forget_peak() -> None:
    """Reset the peaks: the GPU's always, the host's where Linux allows it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_host_bytes() -> int:
    """The peak resident memory of this process since it began or since `forget_peak`."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_device_bytes() -> int:
    """The largest memory allocated on the current GPU; 0 without one."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def show(report: Report, folder: Path) -> None:
    """Writes `report.json` and `loss.png` into the folder and prints the table."""
    picture = folder / "loss.png"
    numbers = folder / "report.json"
    content = asdict(report) | {"failures": report.failures()}
    numbers.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _draw(report, picture)
    console = Console()
    console.print(_table(report, picture, numbers))
    for failure in report.failures():
        console.print(f"[bold red]{failure}[/]")


def _table(report: Report, picture: Path, numbers: Path) -> Table:
    change = report.loss_after - report.loss_before
    reloaded = "not measured: the plain model ran out of memory at this length"
    if report.loss_reloaded is not None:
        reloaded = f"{report.loss_reloaded:.4f}"
    peak = format_bytes(report.peak_host_bytes)
    above = format_bytes(max(0, report.peak_host_bytes - report.loaded_host_bytes))
    rows: list[tuple[str, Any]] = [
        ("model", report.model),
        (
            "data",
            f"{report.dataset}: {report.train_rows} rows of {report.row_tokens:,} tokens, "
            f"{report.held_out_rows} held out",
        ),
        ("chunk by chunk (SPPO)", "on" if report.sppo_enabled else "off"),
        ("held-out loss before", f"{report.loss_before:.4f}"),
        ("held-out loss after", f"{report.loss_after:.4f} ({change:+.4f}) in {report.steps} steps"),
        ("reloaded, plain Transformers", reloaded),
        (
            "speed",
            f"{report.tokens_per_second:,.0f} tokens/s on {report.device}, "
            f"{report.train_seconds:,.0f} s of training",
        ),
        ("peak host memory", f"{peak} ({above} above the loaded model and data)"),
    ]
    if report.peak_device_bytes:
        rows.append(("peak device memory", format_bytes(report.peak_device_bytes)))
    rows += [("saved to", report.saved_to), ("loss curve", picture), ("numbers", numbers)]
    table = Table(title="Fine-tuning report", show_header=False, title_justify="left")
    for name, value in rows:
        table.add_row(name, str(value))
    return table


def _draw(report: Report, picture: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    steps = range(1, len(report.train_losses) + 1)
    axes.plot(steps, report.train_losses, marker="o", label="training rows")
    axes.plot(
        [0, report.steps],
        [report.loss_before, report.loss_after],
        marker="s",
        linestyle="--",
        label="held-out documents",
    )
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)", title=report.model)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
