"""SPPOCallback: takes a Trainer over, and puts SPPO's numbers into its own log stream.

The first plugin puts it among the callbacks that every Trainer has (`install_callback`). In a
Trainer whose arguments hold no plugin it does nothing, unless that is given a converted model.

[Note: what the numbers mean]
Tokens are those that the model was given, padding included. Model FLOPs are what one forward and
backward of the unmodified model need, attention counted once per visible key (the causal half),
recomputation not counted. MFU is model FLOPs per second over the device's dense bf16 peak from its
data sheet. Planned seconds are the predicted time of forward and backward, to compare with
`sppo/step_seconds`, which includes the optimizer's step. Seconds are the wall time of optimizer
steps, from the Trainer's on_step_begin to its on_step_end: without waiting for data, evaluation and
saving. Stall seconds and copied bytes are means per optimizer step. Every number is of the rank
that logs it (rank 0 in the logs), except `sppo/tokens_per_second`, which counts the tokens of all
ranks.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import psutil
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import reduce
from torch import nn
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import holds_converted, is_converted
from sppo_hf.engine.model_parts import disable_gradient_checkpointing, find_causal_lm
from sppo_hf.engine.step_observer import StepObserver, StepRecord
from sppo_hf.errors import ConfigError
from sppo_hf.integrations.checkpoints import TrainerCheckpoints
from sppo_hf.integrations.evaluation import TrainerEvaluation
from sppo_hf.integrations.trainer import TrainerStep, find_calling_trainer
from sppo_hf.integrations.validation import check_shared_batches, check_training_arguments
from sppo_hf.offload.engine import OffloadStats
from sppo_hf.pipeline.watchdog import AFTER_TRAINING, collective_section, watchdog
from sppo_hf.planning.hardware import peak_flops
from sppo_hf.rules import format_bytes

if TYPE_CHECKING:
    from transformers import Trainer

    from sppo_hf.integrations.plugin import SPPOPlugin

TERA = 1e12

_MAX_SUMMARY_CHARS = 100
"""The Trainer's progress bar shows no longer text."""


def summary(numbers: Mapping[str, float], *, device_bytes: int | None = None) -> str:
    """Summarize a log entry in one line, without what is zero.

    Args:
        numbers: By the keys that the callback logs.
        device_bytes: Memory of the device; None where it is the host's.

    Returns:
        "1,912 tokens/s, peak 3.10 GiB of 8.00 GiB, offloaded 1.20 GiB, stalled 0.3 s"; its last
        parts are left out where it is too long for a progress bar.
    """
    rate = "tokens_per_second"
    if "sppo/tokens_per_second" not in numbers:
        rate = "tokens_per_second_per_device"
    total = "" if device_bytes is None else f" of {format_bytes(device_bytes)}"
    texts: dict[str, Callable[[float], str]] = {
        rate: lambda value: f"{value:,.0f} tokens/s",
        "mfu": lambda value: f"MFU {value:.0%}",
        "device_peak_bytes": lambda value: f"peak {format_bytes(int(value))}{total}",
        "host_rss_bytes": lambda value: f"host {format_bytes(int(value))}",
        "d2h_bytes": lambda value: f"offloaded {format_bytes(int(value))}",
        "disk_write_bytes": lambda value: f"to disk {format_bytes(int(value))}",
        "stall_seconds": lambda value: f"stalled {value:.1f} s",
    }
    if "sppo/device_peak_bytes" in numbers:
        del texts["host_rss_bytes"]
    shown = [(text(numbers.get(f"sppo/{name}", 0.0)), text(0.0)) for name, text in texts.items()]
    parts = [text for text, text_of_zero in shown if text != text_of_zero]
    while len(summary_text := ", ".join(parts)) > _MAX_SUMMARY_CHARS:
        parts.pop()
    return summary_text


class StepMeter(StepObserver):
    """Adds up the engine's records of training steps from one `drain` to the next.

    It counts only while `listening` is True, because the same plugin may serve another Trainer.
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
        """Return the numbers since the last drain, and start from zero.

        Args:
            world_tokens: Tokens of all ranks since the last drain; None leaves out
                `sppo/tokens_per_second`.
            peak_flops_per_second: Of the device; None leaves out `sppo/mfu`.

        Returns:
            Numbers by log key, see [Note: what the numbers mean]; {} if no step has ended.
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
        """Reset all sums."""
        self.tokens = 0
        self.model_flops = 0.0
        self.offload = OffloadStats()
        self.planned_seconds = 0.0
        self.all_planned = True
        self.steps = 0
        self.step_seconds = 0.0


class SPPOCallback(TrainerCallback):
    """Has a Trainer train through SPPO, checks that it does, and logs what that costs.

    Trackers get the keys `sppo/...` in every training log entry, see [Note: what the numbers mean];
    callbacks that print get a one-line summary, `sppo`. In a pipeline the callback also tells the
    watchdog where this rank is, for the message of the others if it is lost.
    """

    _plugin: SPPOPlugin
    """The plugin in the Trainer's arguments, which is attached to its Accelerator; like the other
    two, there once a Trainer that has one was made."""
    _trainer: Trainer
    _evaluation: TrainerEvaluation

    def __init__(self) -> None:
        self._meter = StepMeter()
        self._active = False
        """Whether the Trainer's arguments hold a plugin."""
        self._step_start_seconds: float | None = None
        self._world_tokens: int | None = None

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Check the arguments of a Trainer that has the plugin, and replace its methods.

        A Trainer without it whose model is converted gets the methods that evaluate alone: such a
        model returns no logits unless it is asked for them.

        Accelerate keeps the first parallelism config of a process, also if that was None, and then
        calls nothing of ours, so the Trainer would train without SPPO.

        Raises:
            ConfigError: The Trainer's Accelerator ignores the plugin, or it would bypass that.
        """
        requested: Any = getattr(args, "parallelism_config", None)
        if not isinstance(getattr(requested, "config", None), SPPOConfig):
            if holds_converted(model) and (trainer := find_calling_trainer(requested)) is not None:
                TrainerEvaluation(trainer).install()
            return
        used: Any = AcceleratorState._shared_state.get("parallelism_config")
        if requested != used:
            raise ConfigError(
                f"{requested!r} is in the TrainingArguments, but this process made an Accelerator "
                "without it after them, and Accelerate keeps the first settings, so SPPO would "
                "not be in use. Allowed: TrainingArguments that are newer than Accelerators "
                "without the plugin. Remedy: make the TrainingArguments right before their "
                "Trainer; a Trainer that makes its own Accelerator must pass it "
                "args.parallelism_config."
            )
        check_training_arguments(args)
        if used.config.sharing_ranks > 1:
            check_shared_batches(args, used.config)
        trainer = find_calling_trainer(used)
        assert trainer is not None, "a Trainer's constructor calls its callbacks"
        TrainerCheckpoints(trainer).install()
        TrainerStep(trainer).install()
        self._evaluation = TrainerEvaluation(trainer)
        self._evaluation.install()
        self._active, self._plugin, self._trainer = True, used, trainer
        used.progress.bars_wanted = not args.disable_tqdm
        self._shorten_console()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Start counting; the model is prepared by now.

        Raises:
            ConfigError: The Trainer prepared its model without the Accelerator, or metrics need
                logits that a pipeline does not gather.
            UnsupportedModelError: There is no language model of Transformers to convert.
            BudgetError: Metrics need logits of whole batches, which do not fit.
        """
        if not self._active or model is None:
            return
        self._report(step=f"before step {state.global_step + 1}")
        # The Trainer switches checkpointing on at every train(), but prepares only at the first.
        disable_gradient_checkpointing(model)
        if not is_converted(model):
            find_causal_lm(model)  # raises where there is no language model to convert
            raise ConfigError(
                f"{type(model).__name__} was not prepared by the Accelerator, so SPPO is not in "
                "it. Allowed: Trainers that call Accelerator.prepare. Remedy: "
                "model = plugin.convert(model) before the Trainer is made."
            )
        self._evaluation.before_training()
        self._shorten_console()
        self._meter.clear()
        self._meter.listening = True
        self._plugin.observer.subscribe(self._meter)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Stop counting."""
        self._report(step=AFTER_TRAINING)
        self._meter.listening = False
        if self._active:
            self._plugin.observer.unsubscribe(self._meter)

    def on_step_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Start the clock of an optimizer step."""
        self._report(step=f"in step {state.global_step + 1}")
        self._step_start_seconds = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Stop the clock, and prepare a log entry that is due."""
        self._report(step=f"after step {state.global_step}")
        if self._step_start_seconds is not None:
            self._meter.add_step(time.perf_counter() - self._step_start_seconds)
            self._step_start_seconds = None
        self._count_world_tokens(args, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Prepare a log entry that is due."""
        self._count_world_tokens(args, control)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Tell the watchdog."""
        self._report(activity="in the optimizer")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Tell the watchdog."""
        self._report(activity="after the optimizer")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add SPPO's numbers to a training log entry in place, for the loggers after this one."""
        self._report(activity="logging")
        is_on = self._active and self._plugin.config.log_metrics and self._meter.listening
        if not is_on or logs is None or "loss" not in logs:  # without: evaluations and summaries
            return
        numbers = self._meter.drain(
            world_tokens=self._world_tokens, peak_flops_per_second=_peak_flops(args.device)
        )
        self._world_tokens = None
        if not numbers:
            return
        numbers |= _memory_numbers(args.device)
        logs.update(numbers)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(numbers)

    def _report(self, *, step: str | None = None, activity: str | None = None) -> None:
        """Tell the watchdog, if there is one, where this rank is."""
        current = watchdog() if self._active else None
        if current is not None and step is not None:
            current.set_step(step)
        elif current is not None and activity is not None:
            current.set_activity(activity)

    def _shorten_console(self) -> None:
        """Have callbacks that print logs print a summary; loggers get all of SPPO's numbers."""
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, ProgressCallback | PrinterCallback):
                # A partial, so that the callback can still be pickled and copied.
                on_log = functools.partial(_log_summary_only, callback)
                callback.__dict__.setdefault("on_log", on_log)

    def _count_world_tokens(self, args: TrainingArguments, control: TrainerControl) -> None:
        """Sum tokens over ranks if a log entry is due.

        Here all ranks are about to gather the loss. A collective in on_log would hang where a
        script logs on one rank only.
        """
        if not self._active or not control.should_log or not self._plugin.config.log_metrics:
            return
        tokens = self._meter.tokens
        if args.world_size > 1:
            with collective_section("counting tokens"):
                summed: Any = reduce(torch.tensor(tokens, device=args.device), reduction="sum")
            tokens = int(summed.item())
        self._world_tokens = tokens


def _log_summary_only(
    callback: TrainerCallback,
    args: TrainingArguments,
    state: TrainerState,
    control: TrainerControl,
    logs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Call `on_log` of a callback that prints, with a summary in place of SPPO's numbers."""
    numbers = {k: v for k, v in (logs or {}).items() if k.startswith("sppo/")}
    if logs is not None and numbers:
        logs = {k: v for k, v in logs.items() if k not in numbers}
        if text := summary(numbers, device_bytes=_device_bytes(args.device)):
            logs["sppo"] = text
    return type(callback).on_log(callback, args, state, control, logs=logs, **kwargs)


def install_callback() -> None:
    """Put an `SPPOCallback` into every Trainer that is made from now on.

    The Trainer is imported for this, because a script that imports it after the plugin was made may
    have one whose Accelerator ignores the plugin, and then nothing else of ours would be called.
    """
    from transformers import trainer

    defaults: list[Any] = trainer.DEFAULT_CALLBACKS
    if SPPOCallback not in defaults:
        defaults.append(SPPOCallback)


def _peak_flops(device: torch.device) -> float | None:
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def _device_bytes(device: torch.device) -> int | None:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def _memory_numbers(device: torch.device) -> dict[str, float]:
    numbers: dict[str, float] = {"sppo/host_rss_bytes": psutil.Process().memory_info().rss}
    if device.type == "cuda":
        numbers["sppo/device_peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return numbers
