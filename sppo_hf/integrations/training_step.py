"""A Trainer's training step, run once more with less memory where its first backward had none left.

A forward that runs out of memory is run again by the engine itself. A backward cannot be: the graph
may be larger than the model's, and whoever called it still holds the loss. The Trainer's step is
the one place that has the batch and nothing of the failed step, so it is replaced on the
*instance*.
"""

from __future__ import annotations

import copy
import gc
from typing import TYPE_CHECKING, Any

import torch

from sppo_hf.engine.convert import get_engine
from sppo_hf.engine.engine import Engine, RandomState
from sppo_hf.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Trainer


class TrainerStep:
    """The training step of one Trainer.

    Not run again, so that the error is the user's: steps of several processes, which would have to
    agree; a backward that adds to gradients which are there already, as those of an earlier
    micro-batch; whatever is not the first backward of a plan; and a second time. What a subclass
    counts of a batch in `compute_loss` (TRL's `num_tokens`) it counts twice for that batch.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Change nothing yet."""
        self._kind: Any = type(trainer)
        self._trainer: Any = trainer

    def install(self) -> None:
        """Put the method onto the Trainer; again is fine."""
        self._trainer.__dict__["training_step"] = self.training_step

    def training_step(
        self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the Trainer's own, and again if memory ran out in the first backward of a plan."""
        engine = self._engine()
        if engine is None or not self._can_begin_again(model):
            return self._kind.training_step(self._trainer, model, inputs, *args, **kwargs)
        random = RandomState(self._trainer.args.device)
        try:
            # Some subclasses take entries out.
            first = copy.copy(inputs)
            return self._kind.training_step(self._trainer, model, first, *args, **kwargs)
        except RuntimeError as error:
            if not engine.plan_after_failed_backward(error):
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

    def _engine(self) -> Engine | None:
        try:
            engine = get_engine(self._trainer.model)
        except UnsupportedModelError:
            return None
        return engine if isinstance(engine, Engine) and engine.enabled else None
