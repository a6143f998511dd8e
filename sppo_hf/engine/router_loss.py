"""The load-balancing loss of routers (Switch Transformer, arXiv 2101.03961, equations 4 to 6).

For E experts it is `E * sum_e f_e * P_e`: f_e the share of tokens that chose expert e, P_e the mean
probability that routers give it, both over all layers and all tokens that are no padding. Neither
is a sum over tokens of anything, but both are made of sums, so the sums are carried over the chunks
(those of probabilities with their graph) and put together after the last one.

Beside the layers' frames it keeps the probabilities until backward: 4 bytes per token, layer with a
router, and expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from sppo_hf.engine.sequence_group import SequenceGroup
from sppo_hf.engine.structure import ModelParts
from sppo_hf.errors import UnsupportedModelError

# B batch rows, C tokens of a chunk, E experts.


class RouterLoss:
    """The sums of one forward call."""

    def __init__(self, num_experts: int, top_k: int, coefficient: float) -> None:
        """Begin at zero.

        Args:
            num_experts: E.
            top_k: Experts that a token chooses.
            coefficient: Factor of this loss in the model's loss.
        """
        self._num_experts = num_experts
        self._top_k = top_k
        self._coefficient = coefficient
        self._chosen_E: Tensor | None = None
        self._probability_E: Tensor | None = None
        self._tokens: Tensor | int = 0

    @classmethod
    def of(cls, parts: ModelParts) -> RouterLoss | None:
        """The loss that `parts` adds to the loss of its labels; None where it is switched off.

        Raises:
            UnsupportedModelError: It is switched on, and what it is made of is not known.
        """
        config: Any = parts.text_config
        if not getattr(config, "output_router_logits", False):
            return None
        owners = (parts.causal_lm, config)
        values = [
            next((getattr(o, n) for o in owners for n in names if hasattr(o, n)), None)
            for names in (
                ("num_experts", "num_local_experts"),
                ("num_experts_per_tok",),
                ("router_aux_loss_coef", "aux_loss_coef"),
            )
        ]
        if any(value is None for value in values):
            raise UnsupportedModelError(
                f"{parts.name}: config.output_router_logits=True adds an auxiliary loss whose "
                "experts, choices and coefficient are not where Transformers' models have them. "
                "Set model.config.output_router_logits = False to train without it."
            )
        return cls(*values)  # type: ignore[arg-type]

    def add(self, router_logits: tuple[Tensor, ...] | None, mask_BC: Tensor | None) -> None:
        """Add a chunk.

        Args:
            router_logits: `[B * C, E]` for every layer with a router, as the base model gives them.
            mask_BC: Nonzero for tokens that are no padding; None where all count.
        """
        weight = None if mask_BC is None else mask_BC.reshape(-1).to(dtype=torch.float32)
        for logits in router_logits or ():
            weights = torch.softmax(logits, dim=-1)
            _, chosen = torch.topk(weights, self._top_k, dim=-1)
            if self._chosen_E is None or self._probability_E is None:
                zeros_E = weights.new_zeros(self._num_experts, dtype=torch.float32)
                self._chosen_E, self._probability_E = zeros_E, zeros_E.clone()
            counts = torch.ones_like(chosen, dtype=torch.float32)
            if weight is None:
                probability = weights.float().sum(dim=0)
                self._tokens = self._tokens + weights.shape[0]
            else:
                probability = (weights.float() * weight[:, None]).sum(dim=0)
                counts = counts * weight[:, None]
                self._tokens = self._tokens + weight.sum()
            # Into a new tensor: the sum before is none that anybody's graph has saved.
            ones_E = torch.zeros_like(self._chosen_E)
            ones_E.scatter_add_(0, chosen.reshape(-1), counts.reshape(-1))
            self._chosen_E = self._chosen_E + ones_E
            self._probability_E = self._probability_E + probability

    def sum_over_ranks(self, group: SequenceGroup) -> None:
        """Add up the sums of the ranks that share the sequence; after the last chunk."""
        if self._chosen_E is None or self._probability_E is None:
            return
        tokens = torch.as_tensor(self._tokens, device=self._chosen_E.device)
        self._chosen_E = group.sum_over_ranks(self._chosen_E)
        self._probability_E = group.sum_over_ranks(self._probability_E)
        self._tokens = group.sum_over_ranks(tokens)

    def value(self) -> Tensor | None:
        """The loss without its coefficient, shape `[]`; None where no layer has a router."""
        if self._chosen_E is None or self._probability_E is None:
            return None
        share_E, mean_E = self._chosen_E / self._tokens, self._probability_E / self._tokens
        return torch.sum(share_E * mean_E) * self._num_experts

    def added_to(self, output: Any) -> MoeCausalLMOutputWithPast:
        """`output` (loss and logits) with this loss on top of its own, as such models return it."""
        value: Any = self.value()
        loss = output.loss
        if value is not None:
            loss = loss + self._coefficient * value.to(loss.device)
        return MoeCausalLMOutputWithPast(loss=loss, aux_loss=value, logits=output.logits)
