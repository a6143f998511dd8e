"""Liger's fused linear + cross-entropy kernel as a tile of the chunked loss, where it is exact.

Used only on CUDA, when liger-kernel is installed and the model's head was seen to be one plain
matrix product: a head that scales, caps or adapts its logits keeps its own code. That is found out
by trying both on a few random hidden states, not by a list of families.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sppo_hf.model.head import ModelHead
from sppo_hf.model.loss import TileKernel
from sppo_hf.model.structure import ModelParts

# M tokens of a tile, D model width, V vocabulary.


def fused_tile(parts: ModelParts, head: ModelHead, device: torch.device) -> TileKernel | None:
    """A kernel for head and loss of a tile at once; None where the model's head must run."""
    if device.type != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        return None
    linear = parts.causal_lm.get_output_embeddings()
    if type(linear) is not nn.Linear or linear.weight.dtype == torch.float16:
        return None
    known: bool | None = parts.causal_lm.__dict__.get("_sppo_plain_head")
    if known is None:
        known = is_plain_head(linear, head)
    return _LigerTile(linear) if known else None


@torch.no_grad()
def is_plain_head(linear: nn.Linear, head: ModelHead) -> bool:
    """Whether the model's logits are exactly `linear(hidden)`."""
    probe_1MD = torch.randn(
        1, 4, linear.in_features, device=linear.weight.device, dtype=linear.weight.dtype
    )
    # Large enough that a soft cap would show.
    probe_1MD = probe_1MD * 100
    return torch.equal(head.logits(probe_1MD), linear(probe_1MD))


class _LigerTile:
    """One tile through Liger's kernel, which computes gradients in its forward as we do."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear

    def __call__(
        self,
        hidden_MD: Tensor,
        labels_M: Tensor,
        trainable: Sequence[nn.Parameter],
        ignore_index: int,
    ) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        from liger_kernel.ops.fused_linear_cross_entropy import (  # type: ignore[import-not-found]
            LigerFusedLinearCrossEntropyFunction,
        )

        weight, bias = self._linear.weight, self._linear.bias
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in (weight,)]
        bias_leaf = None if bias is None else bias.detach().requires_grad_(bias.requires_grad)
        hidden_leaf = hidden_MD.detach().requires_grad_()
        with torch.enable_grad():
            result: Any = LigerFusedLinearCrossEntropyFunction.apply(
                hidden_leaf, leaves[0], labels_M, bias_leaf, None, ignore_index, 0.0, 0.0, "sum"
            )
            loss = result[0] if isinstance(result, tuple) else result
            wanted = [x for x in (hidden_leaf, leaves[0], bias_leaf) if x is not None]
            wanted = [x for x in wanted if x.requires_grad]
            grads = dict(zip(map(id, wanted), torch.autograd.grad(loss, wanted), strict=True))
        by_parameter = {id(weight): grads.get(id(leaves[0]))}
        if bias is not None:
            by_parameter[id(bias)] = grads.get(id(bias_leaf))
        dweights = [by_parameter.get(id(parameter)) for parameter in trainable]
        return loss.detach().float(), grads[id(hidden_leaf)], dweights
