"""Sequence parallelism in one stage: the engine of a rank that shares its sequences.

What is shared and why gradients come out right: `sppo_hf.engine.sequence_group`. The model is whole
on every rank (or sharded by FSDP2), and DDP or FSDP2 averages gradients over all ranks. In a
pipeline `PipelineEngine` does both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import ModelOutput

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.engine.engine import Engine
from sppo_hf.engine.forward_calls import ForwardCall
from sppo_hf.engine.sequence_group import own_random_numbers
from sppo_hf.engine.step_observer import StepObserver
from sppo_hf.engine.structure import ModelParts, find_parts
from sppo_hf.errors import BudgetError, ConfigError, PipelineError, UnsupportedModelError
from sppo_hf.pipeline.agreement import agree, settings_number
from sppo_hf.pipeline.convert import launch_watchdog, shared_mesh
from sppo_hf.pipeline.exchange import SequenceRanks, refuse_unshareable
from sppo_hf.pipeline.mesh import PipelineMesh, check_nodes
from sppo_hf.pipeline.watchdog import Watchdog

ModelT = TypeVar("ModelT", bound=nn.Module)


class SequenceParallelEngine(Engine):
    """The engine of a model whose sequences this rank shares with others."""

    group: SequenceRanks

    def __init__(
        self,
        parts: ModelParts,
        config: SPPOConfig,
        observer: StepObserver,
        original_forward: Callable[..., Any],
        *,
        mesh: PipelineMesh,
        watchdog: Watchdog,
    ) -> None:
        """Prepare to run; see `Engine` for the first arguments.

        Args:
            parts: The model.
            config: The settings.
            observer: Is told about plans, units and records.
            original_forward: The model's own.
            mesh: This rank's place among the ranks.
            watchdog: Is told what this rank does.
        """
        group = SequenceRanks.of_mesh(mesh)
        super().__init__(parts, config, observer, original_forward, group=group)
        self.mesh = mesh
        self.watchdog = watchdog
        self._calls = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallelEngine:
        """A fresh engine for the copied model, of the same ranks."""
        fresh = super().__deepcopy__(memo)
        assert isinstance(fresh, SequenceParallelEngine), "copies are of the same class"
        fresh.mesh, fresh.watchdog, fresh._calls = self.mesh, self.watchdog, 0
        return fresh

    def _run(self, call: ForwardCall) -> ModelOutput:
        self._calls += 1
        kind = "forward" if torch.is_grad_enabled() else "evaluation"
        with self._guarded(f"in {kind} pass {self._calls}"):
            agree(self.mesh, self._facts(call))
            with own_random_numbers(self.group, call.device):
                output = super()._run(call)
        activity = f"in backward pass {self._calls}"
        for value in output.values():
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda _grad: self.watchdog.doing(activity))
        return output

    def _facts(self, call: ForwardCall) -> dict[str, int]:
        """Numbers of a call that all ranks must have alike."""
        ids, mask = call.tokens.get("input_ids"), call.attention_mask
        return {
            "rows": call.batch_rows,
            "tokens": call.total_tokens,
            "sum of input_ids": 0 if ids is None else int(ids.sum()),
            "sum of labels": 0 if call.shift_labels is None else int(call.shift_labels.sum()),
            "sum of attention_mask": -1 if mask is None else int(mask.sum()),
            "training": int(torch.is_grad_enabled()),
            "settings": settings_number(self.config),
        }

    @contextmanager
    def _guarded(self, activity: str) -> Iterator[None]:
        """A part of a step: others hear where this rank is, and errors name what failed.

        Raises:
            PipelineError: This rank failed, or ranks do not agree.
            RankLostError: Another one did.
        """
        alike = (ConfigError, BudgetError, UnsupportedModelError, PipelineError)
        with self.watchdog.explaining(activity), self.watchdog.ending_all(but=alike):
            yield
        self.watchdog.doing(activity.replace("in ", "after ", 1))


def convert_to_shared_sequences(
    model: ModelT,
    config: SPPOConfig,
    *,
    device: torch.device | None = None,
    observer: StepObserver | None = None,
) -> ModelT:
    """Let `model` train on sequences that `config.sp_size` ranks share, in place.

    Every process of the launch calls this with the same model and settings. `model(**batch)` then
    returns the loss of the whole batch on every rank; gradients are to be averaged over all ranks,
    as DDP and FSDP2 do.

    Args:
        model: A Transformers causal language model, bare or in PEFT.
        config: The settings, with `sp_size` above 1.
        device: Where it will run; where it is, by default.
        observer: Is told about plans, units and records.

    Raises:
        ConfigError: The launch or the settings do not fit, the heads cannot be divided, or ranks of
            one sequence are on several machines.
        UnsupportedModelError: The model cannot be trained exactly.
    """
    engine = get_engine(model)
    if engine is not None and engine.enabled:
        return convert(model, config, observer=observer)  # says so if settings differ
    parts = find_parts(model)
    refuse_unshareable(parts, config.sp_size)
    check_nodes(config)
    device = next(parts.causal_lm.parameters()).device if device is None else device
    mesh = shared_mesh(config.pp_size, device, config.pp_timeout_seconds, config.sp_size)
    make_engine = functools.partial(
        SequenceParallelEngine,
        mesh=mesh,
        watchdog=launch_watchdog(config.pp_size, config.pp_timeout_seconds, config.sp_size),
    )
    return convert(model, config, observer=observer, make_engine=make_engine)
