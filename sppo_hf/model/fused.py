"""Liger's fused linear + cross-entropy kernel as a tile of the chunked loss, where it is exact.

Used only on CUDA, when liger-kernel is installed and the model's head was seen to be one plain
matrix product: a head that scales, caps or adapts its logits keeps its own code. That is found out
by trying both on a few random hidden states, not by a list of families, and remembered, since the
answer makes the host wait.
"""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sppo_hf.model.head import ModelHead
from sppo_hf.model.loss import TileKernel
from sppo_hf.model.structure import ModelParts

# M tokens of a tile, D model width, V vocabulary.


def fused_tile(parts: ModelParts, head: ModelHead, device: torch.device) -> TileKernel | None:
    """A kernel for head and loss of a tile at once; None where the model's head must run."""
    if device.type != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        return None
    linear = parts.causal_lm.get_output_embeddings()
    # The kernel knows no scale for float16, and no wider type than float32.
    if type(linear) is not nn.Linear or linear.weight.dtype not in (torch.bfloat16, torch.float32):
        return None
    # A parameter beside the product's own could be neutral now (a scale of one) and not later.
    own = {id(linear.weight), id(linear.bias)}
    if any(id(parameter) not in own for parameter in parts.head_parameters()):
        return None
    state = _state(parts, linear)
    if head.plain is None or head.plain[0] != state:
        head.plain = (state, is_plain_head(linear, head))
    return _LigerTile(linear) if head.plain[1] else None


def _state(parts: ModelParts, linear: nn.Linear) -> Hashable:
    """What the answer hangs on: the module and what is hooked to it, not the weights' values."""
    return (
        weakref.ref(linear),
        weakref.ref(linear.weight),
        parts.causal_lm.training,
        "forward" in linear.__dict__,
        (*linear._forward_hooks, *linear._forward_pre_hooks),
    )


@torch.no_grad()
def is_plain_head(linear: nn.Linear, head: ModelHead) -> bool:
    """Whether the model's logits are exactly `hidden @ weight.T + bias`; waits for the device."""
    weight = linear.weight
    # A generator of its own, or whoever draws next would draw other numbers than without us.
    generator = torch.Generator(weight.device).manual_seed(0)
    probe_1MD = torch.randn(
        1, 4, linear.in_features, device=weight.device, dtype=weight.dtype, generator=generator
    )
    # Large enough that a soft cap would show.
    probe_1MD = probe_1MD * 100
    return torch.equal(head.logits(probe_1MD), F.linear(probe_1MD, weight, linear.bias))


class _LigerTile:
    """One tile through Liger's kernel, which computes gradients in its forward as we do."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear

    def most_tokens(self, tile_tokens: int) -> int:
        """See `TileKernel.most_tokens`.

        The kernel cuts a call by itself, into parts whose logits have about as many elements as the
        hidden states of all; it rounds their tokens up to a power of two. It reads a number off the
        device once a call, so calls had better be few.
        """
        vocab, width = self._linear.weight.shape
        power_of_two = 1 << (tile_tokens.bit_length() - 1)
        return power_of_two * -(-vocab // width)

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
