"""The load-balancing loss of routers (Switch Transformer, arXiv 2101.03961, equations 4 to 6).

For E experts it is `E * sum_e f_e * P_e`: f_e the share of tokens that chose expert e, P_e the mean
probability that routers give it, both over all layers and all tokens that are no padding. Neither
is a sum over tokens of anything, but both are made of sums, so the sums are carried over the chunks
(those of probabilities with their graph) and put together after the last one.

Beside the layers' frames it keeps the probabilities until backward: 4 bytes per token, layer with a
router, and expert.

[Note: gradient of the router loss by chunks] The gradient by a chunk's sums of probabilities is
`coefficient * E * chosen_e / tokens^2`: chunks need nothing of each other but how often each expert
was chosen, and by how many tokens. So the stages of a pipeline add up their numbers once, after
their last forward and before their first backward, and each chunk's backward begins at its own sums
as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from sppo_hf.engine.structure import ModelParts
from sppo_hf.errors import UnsupportedModelError

# B batch rows, C tokens of a chunk, T tokens of the sequence, E experts.


@dataclass(eq=False)
class RouterLoss:
    """The sums of one forward call."""

    num_experts: int
    """E."""
    top_k: int
    """Experts that a token chooses."""
    coefficient: float
    """Factor of this loss in the model's loss."""
    _: KW_ONLY
    backward_by_chunk: bool = False
    """Whether backward begins at each chunk's sums, which `add` returns, and not at `value`; see
    [Note: gradient of the router loss by chunks]."""

    def __post_init__(self) -> None:
        self._chosen_E: Tensor | None = None
        self._probability_E: Tensor | None = None
        self._tokens: Tensor | int = 0

    @classmethod
    def of(cls, parts: ModelParts, *, backward_by_chunk: bool = False) -> RouterLoss | None:
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
        return cls(*values, backward_by_chunk=backward_by_chunk)  # type: ignore[arg-type]

    def add(
        self,
        router_logits: tuple[Tensor, ...] | None,
        mask_BT: Tensor | None,
        rows: tuple[int, int],
        tokens: tuple[int, int],
    ) -> Tensor | None:
        """Add a chunk.

        Args:
            router_logits: `[B * C, E]` for every layer with a router, as the base model gives them.
            mask_BT: Nonzero for tokens of the batch that are no padding; None where all count.
            rows: Half-open, of the batch: those of the chunk.
            tokens: Likewise; none where one ran that counts for nothing (see
                [Note: a rank without tokens] in `sequence_group`).

        Returns:
            The chunk's sums of probabilities, `[E]`, with their graph; None without a router.
        """
        weight = None
        if mask_BT is not None:
            mask_BC = mask_BT[slice(*rows), slice(*tokens)]
            weight = mask_BC.reshape(-1).to(dtype=torch.float32)
        whole_E: Tensor | None = None
        for logits in router_logits or ():
            weights = torch.softmax(logits, dim=-1)
            _, chosen = torch.topk(weights, self.top_k, dim=-1)
            if tokens[0] == tokens[1]:
                weight = weights.new_zeros(len(weights), dtype=torch.float32)
            counts = torch.ones_like(chosen, dtype=torch.float32)
            if weight is None:
                probability_E = weights.float().sum(dim=0)
                self._tokens = self._tokens + weights.shape[0]
            else:
                probability_E = (weights.float() * weight[:, None]).sum(dim=0)
                counts = counts * weight[:, None]
                self._tokens = self._tokens + weight.sum()
            whole_E = probability_E if whole_E is None else whole_E + probability_E
            ones_E = torch.zeros_like(probability_E, requires_grad=False)
            ones_E.scatter_add_(0, chosen.reshape(-1), counts.reshape(-1))
            # Into a new tensor: the sum before is none that anybody's graph has saved.
            self._chosen_E = ones_E if self._chosen_E is None else self._chosen_E + ones_E
        if whole_E is not None:
            kept_E = whole_E.detach() if self.backward_by_chunk else whole_E
            before_E = self._probability_E
            self._probability_E = kept_E if before_E is None else before_E + kept_E
        return whole_E

    def sum_over_ranks(
        self, total: Callable[[Tensor], Tensor], device: torch.device | None = None
    ) -> None:
        """Add up the sums of several ranks, by `total`; after the last chunk.

        A rank without a router has zeros on `device`; None where all have one or none.
        """
        if self._chosen_E is None or self._probability_E is None:
            if device is None:
                return
            zeros_E = torch.zeros(self.num_experts, dtype=torch.float32, device=device)
            self._chosen_E, self._probability_E = zeros_E, zeros_E
        tokens = torch.as_tensor(
            self._tokens, dtype=self._chosen_E.dtype, device=self._chosen_E.device
        )
        sums = total(torch.cat([self._chosen_E, self._probability_E, tokens.view(1)]))
        self._chosen_E, self._probability_E, (self._tokens,) = sums.split(
            [self.num_experts, self.num_experts, 1]
        )

    def gradient(self) -> Tensor:
        """Of this loss with its coefficient, by what `add` returned for any chunk, `[E]`."""
        assert self._chosen_E is not None, "a chunk was added, or sums of other ranks were"
        return self.coefficient * self.num_experts * self._chosen_E / self._tokens**2

    def value(self) -> Tensor | None:
        """The loss without its coefficient, shape `[]`; None where no layer has a router."""
        if self._chosen_E is None or self._probability_E is None:
            return None
        share_E, mean_E = self._chosen_E / self._tokens, self._probability_E / self._tokens
        return torch.sum(share_E * mean_E) * self.num_experts

    def add_to_output(self, output: Any) -> MoeCausalLMOutputWithPast:
        """`output` (loss and logits) with this loss on top of its own, as such models return it."""
        value: Any = self.value()
        loss = output.loss
        if value is not None:
            loss = loss + self.coefficient * value.to(loss.device)
        return MoeCausalLMOutputWithPast(loss=loss, aux_loss=value, logits=output.logits)
