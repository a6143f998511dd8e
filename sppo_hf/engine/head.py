"""The model's own head, fed with hidden states that were computed chunk by chunk.

The causal language model's original `forward` runs, but for its duration the base model returns the
hidden states it is given. So soft-capping, scaling, biases, adapters on the head and whatever else
a family does after its last norm are the model's own code, not a copy of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from sppo_hf.engine.structure import ModelParts


class ModelHead:
    """Logits, or the model's own loss, from hidden states."""

    def __init__(self, parts: ModelParts, original_forward: Callable[..., Any]) -> None:
        """Remember the model and its untouched forward."""
        self._parts = parts
        self._forward = original_forward
        self.output_class: type = BaseModelOutputWithPast
        """Class of what the base model returns; set it to what it really returned."""
        self.plain: tuple[Hashable, bool] | None = None
        """For `fused`: in which state of the model this was asked last, and whether logits were one
        plain product."""

    def logits(self, hidden_BMD: Tensor) -> Tensor:
        """Logits `[B, M, V]` of hidden states `[B, M, D]`."""
        return self.run(hidden_BMD).logits

    def run(self, hidden_BMD: Tensor, **kwargs: Any) -> Any:
        """Run the original forward on hidden states; `kwargs` are labels and loss arguments."""
        with self._base_returns(hidden_BMD):
            return self._forward(
                inputs_embeds=hidden_BMD, use_cache=False, return_dict=True, **kwargs
            )

    @contextlib.contextmanager
    def _base_returns(self, hidden_BMD: Tensor) -> Iterator[None]:
        base = self._parts.base
        own = base.__dict__.get("forward")
        output = self.output_class(last_hidden_state=hidden_BMD)
        base.__dict__["forward"] = lambda *_, **__: output
        try:
            yield
        finally:
            if own is None:
                del base.__dict__["forward"]
            else:
                base.__dict__["forward"] = own
