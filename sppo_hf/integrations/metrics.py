"""StepMeter: sums what the engine reports between two log entries and makes numbers of it.

Pure arithmetic on StepRecords and seconds that are given to it; it knows nothing of the Trainer,
clocks or devices.

[Note: what the numbers mean]
Tokens are those that the model was given, padding included. Model FLOPs are what one forward and
backward of the unmodified model need, attention counted once per visible key (the causal half),
recomputation not counted. MFU is model FLOPs per second over the device's dense bf16 peak from its
data sheet. Planned seconds are the predicted time of forward and backward, to lay beside
`sppo/step_seconds`, which is longer by the optimizer's step. Seconds are the wall time of optimizer
steps, from the Trainer's on_step_begin to its on_step_end, so waiting for data, evaluation and
saving are not in them. Stall seconds and copied bytes are means per optimizer step. Every number is
of the rank that logs it (rank 0 in the logs), except `sppo/tokens_per_second`, which counts the
tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sppo_hf.model.observer import StepObserver, StepRecord
from sppo_hf.offload.stats import OffloadStats
from sppo_hf.rules import format_bytes

TERA = 1e12

_LONGEST_SUMMARY = 100
"""Characters; the Trainer's progress bar shows no longer text."""


def summary(numbers: Mapping[str, float], *, device_bytes: int | None = None) -> str:
    """Say in one line what a log entry's numbers say; what is zero is left out.

    Args:
        numbers: As `StepMeter.drain` and the callback name them.
        device_bytes: Memory of the device; None where it is the host's.

    Returns:
        "1,912 tokens/s, peak 3.1 GiB of 8.0 GiB, offloaded 1.2 GiB, stalled 0.3 s", the rear cut
        off where it is too long for a progress bar.
    """
    parts: list[str] = []

    def add(name: str, text: Callable[[float], str]) -> None:
        value = numbers.get(f"sppo/{name}", 0.0)
        if text(value) != text(0.0):
            parts.append(text(value))

    own = "" if "sppo/tokens_per_second" in numbers else "_per_device"
    add(f"tokens_per_second{own}", lambda rate: f"{rate:,.0f} tokens/s")
    add("mfu", lambda share: f"MFU {share:.0%}")
    of = "" if device_bytes is None else f" of {format_bytes(device_bytes)}"
    add("device_peak_bytes", lambda size: f"peak {format_bytes(int(size))}{of}")
    if "sppo/device_peak_bytes" not in numbers:
        add("host_rss_bytes", lambda size: f"host {format_bytes(int(size))}")
    add("d2h_bytes", lambda size: f"offloaded {format_bytes(int(size))}")
    add("disk_write_bytes", lambda size: f"to disk {format_bytes(int(size))}")
    add("stall_seconds", lambda seconds: f"stalled {seconds:.1f} s")
    while len(text := ", ".join(parts)) > _LONGEST_SUMMARY:
        parts.pop()
    return text


class StepMeter(StepObserver):
    """Adds up the records of training steps until `drain` empties it.

    It counts only while `listening` is True: the engine also reports evaluation, and the same
    plugin may serve another Trainer.
    """

    def __init__(self) -> None:
        self.listening = False
        self.clear()

    def on_record(self, record: StepRecord) -> None:
        """Add one forward and backward."""
        if not self.listening or not record.training:
            return
        self.tokens += record.tokens
        self.model_flops += record.model_flops
        self.offload = record.offload + self.offload
        if record.planned_seconds is None:
            self.all_planned = False
        else:
            self.planned_seconds += record.planned_seconds

    def add_step(self, seconds: float) -> None:
        """Add the wall time of one optimizer step."""
        self.steps += 1
        self.step_seconds += seconds

    def drain(
        self, *, world_tokens: int | None, peak_flops_per_second: float | None
    ) -> dict[str, float]:
        """Return the numbers since the last drain, and start anew.

        Args:
            world_tokens: Tokens of all ranks since the last drain; None where they are not known,
                and then there is no `sppo/tokens_per_second`.
            peak_flops_per_second: The device's peak; None where it is not known, and then there
                is no MFU.

        Returns:
            Numbers by name, or nothing if no step has ended. [Note: what the numbers mean]
        """
        steps, seconds = self.steps, self.step_seconds
        if steps == 0 or seconds <= 0 or self.tokens == 0:
            self.clear()
            return {}
        flops_per_second = self.model_flops / seconds
        numbers: dict[str, float] = {}
        if world_tokens is not None:
            numbers["sppo/tokens_per_second"] = world_tokens / seconds
        numbers["sppo/tokens_per_second_per_device"] = self.tokens / seconds
        numbers["sppo/tflops_per_device"] = flops_per_second / TERA
        if peak_flops_per_second is not None:
            numbers["sppo/mfu"] = flops_per_second / peak_flops_per_second
        offload = self.offload
        numbers |= {
            "sppo/stall_seconds": offload.stall_seconds / steps,
            "sppo/d2h_bytes": round(offload.d2h_bytes / steps),
            "sppo/h2d_bytes": round(offload.h2d_bytes / steps),
            "sppo/pinned_bytes": offload.pinned_bytes,
            "sppo/host_fragmentation": offload.fragmentation,
            "sppo/step_seconds": seconds / steps,
        }
        if self.all_planned:
            numbers["sppo/planned_seconds"] = self.planned_seconds / steps
        if offload.disk_write_bytes or offload.disk_read_bytes:
            numbers["sppo/disk_write_bytes"] = round(offload.disk_write_bytes / steps)
            numbers["sppo/disk_read_bytes"] = round(offload.disk_read_bytes / steps)
            numbers["sppo/spilled_bytes"] = round(offload.spilled_bytes / steps)
        self.clear()
        return numbers

    def clear(self) -> None:
        """Forget everything since the last drain."""
        self.tokens = 0
        self.model_flops = 0.0
        self.offload = OffloadStats()
        self.planned_seconds = 0.0
        self.all_planned = True
        self.steps = 0
        self.step_seconds = 0.0
