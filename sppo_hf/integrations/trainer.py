"""Changes to the Trainer that makes an attached Accelerator.

Nothing hands the plugin that Trainer, so it is found on the stack. Its methods are replaced on the
*instance* (`TrainerMethods`); its class, and all other Trainers, stay as they are. Evaluation and
checkpoints have files of their own.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import get_engine
from sppo_hf.engine.engine import Engine
from sppo_hf.engine.model_parts import all_modules, own_parameters, patched_attribute
from sppo_hf.engine.recompute import RandomState
from sppo_hf.errors import BudgetError, ConfigError
from sppo_hf.offload.host_memory import HostPoolFull

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Trainer


logger = logging.getLogger(__name__)

_MISSING_LOGITS_ERRORS = ("'NoneType'", "'logits'", "tuple index out of range")
"""Parts of Python's errors for a missing `outputs.logits`, `outputs["logits"]` or `outputs[1]`."""


def find_calling_trainer(plugin: object) -> Trainer | None:
    """Return the Trainer whose constructor calls us, if its `parallelism_config` is `plugin`."""
    module = sys.modules.get("transformers.trainer")
    frame: Any = sys._getframe(1)
    while module is not None and frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, module.Trainer):
            requested = getattr(caller.args, "parallelism_config", None)
            return caller if requested == plugin else None
        frame = frame.f_back
    return None


def report_sharing_ranks(trainer: Any, config: SPPOConfig) -> None:
    """Have the Trainer's own counts know how many ranks share a batch.

    Transformers 5.17 has a method for it that looks at the model only, and that TRL calls.
    """
    if config.sharing_ranks > 1:
        trainer.__dict__["get_tp_size"] = lambda: config.sharing_ranks
        trainer.__dict__["_get_num_items_in_batch"] = functools.partial(_count_items, trainer)
    if config.sp_size > 1:
        # The Trainer sums FLOPs over ranks, and each would count those of whole sequences.
        count_flops = type(trainer).floating_point_ops
        trainer.__dict__["floating_point_ops"] = lambda inputs: (
            count_flops(trainer, inputs) // config.sp_size
        )


def _count_items(trainer: Any, batch_samples: list[Any], device: Any) -> Any:
    """Count a step's labels as the Trainer does, but divide only a sum by the ranks that share it.

    With `average_tokens_across_devices=False` each rank counts its own batches alone, and the
    Trainer would divide that, too.
    """
    averages = trainer.args.average_tokens_across_devices
    with patched_attribute("get_tp_size", {} if averages else {trainer: lambda: 1}):
        return type(trainer)._get_num_items_in_batch(trainer, batch_samples, device)


def set_model_placement(trainer: Any, config: SPPOConfig) -> None:
    """Keep the Trainer from moving a model to the device that may not fit there.

    The Accelerator places weights later, when it prepares the model.
    """
    if any(config.host_resident):
        trainer._move_model_to_device = lambda model, device: None
    elif "auto" in (config.weights, config.optimizer):
        move = trainer._move_model_to_device

        def move_if_weights_fit(model: torch.nn.Module, device: Any) -> None:
            device = torch.device(device)
            if device.type == "cuda":
                held_bytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
                if held_bytes > torch.cuda.mem_get_info(device)[1]:
                    return
            move(model, device)

        trainer._move_model_to_device = move_if_weights_fit


class TrainerMethods:
    """Methods of one Trainer that are replaced on the instance.

    Each is called like the Trainer's method of its name, and leaves to that what it can.
    """

    replaced: ClassVar[tuple[str, ...]]
    """Names of the methods."""

    def __init__(self, trainer: Trainer) -> None:
        self._kind: Any = type(trainer)
        # A strong reference (a cycle): in Trainer(...).train() nothing else holds the Trainer.
        self._trainer: Any = trainer

    def install(self) -> None:
        """Put the methods onto the Trainer; a second call changes nothing."""
        for name in self.replaced:
            self._trainer.__dict__[name] = getattr(self, name)

    def _engine(self) -> Engine | None:
        """The engine of the Trainer's model; None where it is not converted, or was reverted."""
        engine = get_engine(self._trainer.model)
        return engine if engine is not None and engine.enabled else None

    def _overrides(self, name: str) -> bool:
        """Whether the Trainer is of a subclass that overrides a method."""
        from transformers import Trainer

        return getattr(self._kind, name) is not getattr(Trainer, name)

    @contextlib.contextmanager
    def _explaining_missing_logits(self, engine: Engine | None) -> Iterator[None]:
        """Say what to do where a subclass's `compute_loss` seems to have read missing logits."""
        try:
            yield
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            # A pipeline has no logits to return, whatever is set.
            if engine is None or engine.config.return_logits or engine.config.pp_size > 1:
                raise
            if not any(text in str(error) for text in _MISSING_LOGITS_ERRORS):
                raise
            if not self._overrides("compute_loss") or not _was_raised_in(
                self._kind.compute_loss, error
            ):
                raise
            raise ConfigError(
                f"{self._kind.__name__}.compute_loss ended in {type(error).__name__}: {error}. "
                "With labels, a model converted by SPPO returns its loss alone, and logits are "
                "None. Allowed: outputs.loss, or the logits of a call without labels. Remedy, if "
                'it reads logits: labels = inputs.pop("labels") before it calls the model, or '
                "SPPOPlugin(return_logits=True); either holds the logits of whole sequences."
            ) from error


def _was_raised_in(function: Callable[..., Any], error: Exception) -> bool:
    """Whether a call of `function` is in an error's traceback; True if it is no plain function."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is None or any(
        frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__)
    )


class TrainerStep(TrainerMethods):
    """The training step of one Trainer: run again with less memory if its first backward runs out.

    [Note: why objects are frozen]
    From forward to backward tens of thousands of Python objects live: graphs, saved tensors, what
    is known of each chunk. To CPython that is a heap that grows, so every few steps it runs a full
    collection, which visits all objects of the process: a million or two with PyTorch and
    Transformers, for some 0.3 s in which the device runs out of work. `gc.freeze` takes those that
    exist after the first step out of it. Reference counting frees them as ever; only cycles of them
    that are dropped during training wait for its end.

    A forward that runs out of memory is run again by the engine. A backward cannot be, because its
    graph may be larger than the model's and its caller still holds the loss. The Trainer's step is
    the one place that has the batch and keeps nothing of the failed step.

    Not run again, so that the error reaches the user, are: steps of several processes, which would
    have to agree; a backward that adds to gradients of an earlier micro-batch; any backward but the
    first of a plan; and a step that fails twice. What a subclass counts of a batch in
    `compute_loss` (TRL's `num_tokens`) is counted twice for a batch that is run again.
    """

    replaced = ("_inner_training_loop", "training_step")
    _steps: int | None = None
    """Steps of the loop that runs; None outside of one."""
    _froze = False

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run the loop of `train`, which may be one of several tries (`auto_find_batch_size`)."""
        self._steps = 0
        try:
            return self._kind._inner_training_loop(self._trainer, *args, **kwargs)
        finally:
            if self._froze:
                gc.unfreeze()
            self._steps, self._froze = None, False

    def training_step(
        self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the Trainer's training step, and again if memory ran out in a plan's first backward.

        Raises:
            ConfigError: The `compute_loss` of a subclass read logits that are None.
            BudgetError: No plan fits the memory budgets.
            OutOfMemoryError: The same, where the Trainer will try fewer rows.
        """
        engine = self._engine()
        if engine is not None and self._steps is not None:
            self._steps += 1
            # Before the second step: the first has imported, planned and compiled, and between
            # steps no graph is alive. A process that itself freezes objects or has switched
            # collection off is left alone.
            if self._steps == 2 and gc.isenabled() and gc.get_freeze_count() == 0:
                gc.collect()  # so that no garbage is frozen
                gc.freeze()
                self._froze = True
        with self._explaining_missing_logits(engine), self._having_fewer_rows_tried():
            return self._step(engine, model, inputs, *args, **kwargs)

    @contextlib.contextmanager
    def _having_fewer_rows_tried(self) -> Iterator[None]:
        """With `auto_find_batch_size`, let a batch that no plan fits end as one that ran out does.

        Accelerate searches on only after an error that it knows by its words.
        """
        try:
            yield
        except BudgetError as error:
            rows = self._trainer._train_batch_size
            if not self._trainer.args.auto_find_batch_size or rows == 1:
                raise
            logger.warning("auto_find_batch_size: %d rows do not fit. %s", rows, error)
            raise torch.OutOfMemoryError(f"{rows} rows would run out of memory. {error}") from error

    def _step(
        self, engine: Engine | None, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        if engine is None or not self._can_be_repeated(engine, model):
            return self._kind.training_step(self._trainer, model, inputs, *args, **kwargs)
        random_state = RandomState(self._trainer.args.device)
        try:
            first_inputs = copy.copy(inputs)  # some subclasses remove entries
            return self._kind.training_step(self._trainer, model, first_inputs, *args, **kwargs)
        except (RuntimeError, HostPoolFull) as error:
            if not engine.replan_after_failed_backward(error):
                raise
        # Outside of the `except` block, where the error and the graph that it holds are released.
        del first_inputs
        gc.collect()
        model.zero_grad(set_to_none=True)
        random_state.restore()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return self._kind.training_step(self._trainer, model, inputs, *args, **kwargs)

    def _can_be_repeated(self, engine: Engine, model: torch.nn.Module) -> bool:
        """Whether one process runs the step, and only its language model may have gradients.

        Those the engine looks for itself: see `Engine.replan_after_failed_backward`.
        """
        if self._trainer.accelerator.num_processes > 1:
            return False
        outside = own_parameters(all_modules(model, engine.parts.causal_lm))
        return all(parameter.grad is None for parameter in outside)
