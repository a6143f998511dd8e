"""A Trainer's training step, run once more with less memory where its first backward had none left.

It also says what a `compute_loss` that reads logits must do, where the model returns none.

A forward that runs out of memory is run again by the engine itself. A backward cannot be: the graph
may be larger than the model's, and whoever called it still holds the loss. The Trainer's step is
the one place that has the batch and nothing of the failed step, so it is replaced on the
*instance*.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import get_engine
from sppo_hf.engine.engine import Engine
from sppo_hf.engine.recompute import RandomState
from sppo_hf.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Trainer

    from sppo_hf.integrations.plugin import SPPOPlugin

_SIGNS = ("'NoneType'", "'logits'", "tuple index out of range")
"""What Python says where `outputs.logits`, `outputs["logits"]` or `outputs[1]` is missing."""


def calling_trainer(plugin: SPPOPlugin) -> Trainer | None:
    """The Trainer that is making an Accelerator with `plugin` now; None where none is.

    It is found on the stack, because nothing hands it to us.
    """
    module = sys.modules.get("transformers.trainer")
    frame: Any = sys._getframe(1)
    while module is not None and frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, module.Trainer):
            asked_for = getattr(caller.args, "parallelism_config", None)
            return caller if asked_for == plugin else None
        frame = frame.f_back
    return None


def tell_sharing_ranks(trainer: Any, config: SPPOConfig) -> None:
    """Tell the Trainer how many ranks share a batch, as `parallelism_config.tp_size` says.

    Transformers 5.17 has a method for it that looks at the model alone, which TRL asks.
    """
    if config.sharing_ranks > 1:
        trainer.__dict__["get_tp_size"] = lambda: config.sharing_ranks
    if config.sp_size > 1:
        # Each counts those of all tokens; the Trainer sums over the ranks.
        count = type(trainer).floating_point_ops
        trainer.__dict__["floating_point_ops"] = lambda inputs: (
            count(trainer, inputs) // config.sp_size
        )


class TrainerMethods:
    """Methods of one Trainer that are replaced on the *instance*; its class stays.

    Each does what its namesake does, and leaves to the Trainer's own what it can.
    """

    replaced: ClassVar[tuple[str, ...]]
    """Their names."""

    def __init__(self, trainer: Trainer) -> None:
        self._kind: Any = type(trainer)
        # A cycle, and no weak reference: in Trainer(...).train() nothing else holds the Trainer.
        self._trainer: Any = trainer

    def install(self) -> None:
        """Put the methods onto the Trainer; again is fine."""
        for name in self.replaced:
            self._trainer.__dict__[name] = getattr(self, name)

    def _engine(self) -> Engine | None:
        """The engine of the Trainer's model; None where it is not converted, or was reverted."""
        engine = get_engine(self._trainer.model)
        return engine if engine is not None and engine.enabled else None

    def _overrides(self, name: str) -> bool:
        from transformers import Trainer

        return getattr(self._kind, name) is not getattr(Trainer, name)

    @contextlib.contextmanager
    def _explaining_missing_logits(self, engine: Engine | None) -> Iterator[None]:
        """Say what to do about logits that a `compute_loss` of a subclass seems to have missed."""
        try:
            yield
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            missed = engine is not None and not engine.config.return_logits
            seen = missed and any(sign in str(error) for sign in _SIGNS)
            # A pipeline has no logits to return, whatever is set.
            if engine is None or not seen or engine.config.pp_size > 1:
                raise
            if not self._overrides("compute_loss") or not _ended(self._kind.compute_loss, error):
                raise
            raise ConfigError(
                f"{self._kind.__name__}.compute_loss ended in {type(error).__name__}: {error}. "
                "With labels, a model converted by SPPO returns its loss alone, and logits are "
                "None. Allowed: outputs.loss, or the logits of a call without labels. Remedy, if "
                'it reads logits: labels = inputs.pop("labels") before it calls the model, or '
                "SPPOPlugin(return_logits=True); either holds the logits of whole sequences."
            ) from error


def _ended(function: Callable[..., Any], error: Exception) -> bool:
    """Whether an error came out of a call of `function`; True of one that is no plain function."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is None or any(
        frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__)
    )


class TrainerStep(TrainerMethods):
    """The training step of one Trainer.

    Not run again, so that the error is the user's: steps of several processes, which would have to
    agree; a backward that adds to gradients which are there already, as those of an earlier
    micro-batch; whatever is not the first backward of a plan; and a second time. What a subclass
    counts of a batch in `compute_loss` (TRL's `num_tokens`) it counts twice for that batch.
    """

    replaced = ("training_step",)

    def training_step(
        self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the Trainer's own, and again if memory ran out in the first backward of a plan.

        Raises:
            ConfigError: A `compute_loss` of a subclass missed logits.
        """
        engine = self._engine()
        with self._explaining_missing_logits(engine):
            return self._step(engine, model, inputs, *args, **kwargs)

    def _step(
        self, engine: Engine | None, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        if engine is None or not self._can_begin_again(model):
            return self._kind.training_step(self._trainer, model, inputs, *args, **kwargs)
        random = RandomState(self._trainer.args.device)
        try:
            # Some subclasses take entries out.
            first = copy.copy(inputs)
            return self._kind.training_step(self._trainer, model, first, *args, **kwargs)
        except RuntimeError as error:
            if not engine.replan_after_failed_backward(error):
                raise
        # Here, where the error and all that it holds of the failed step are gone.
        del first
        gc.collect()
        model.zero_grad(set_to_none=True)
        random.restore()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return self._kind.training_step(self._trainer, model, inputs, *args, **kwargs)

    def _can_begin_again(self, model: torch.nn.Module) -> bool:
        alone = self._trainer.accelerator.num_processes == 1
        return alone and all(parameter.grad is None for parameter in model.parameters())
