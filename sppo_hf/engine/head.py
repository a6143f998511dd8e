"""The model's own head, fed with hidden states that were computed chunk by chunk.

The causal language model's original `forward` runs, but for its duration the base model returns the
hidden states it is given. So soft-capping, scaling, biases, adapters on the head and whatever else
a family does after its last norm are the model's own code, not a copy of it.

Liger's fused linear + cross-entropy kernel stands in its place (`liger_tile`) on CUDA alone, where
liger-kernel is installed and the head was seen to be one plain matrix product: one that scales,
caps or adapts its logits keeps its own code. That is found out by trying both on a few random
hidden states, not by a list of families, and remembered, since the answer makes the host wait.

Not used: `torch.nn.functional.linear_cross_entropy` (PyTorch 2.13). Asked for little memory, it
rounds the summed loss to the hidden states' dtype, so the loss of a bfloat16 model would have three
digits.
"""

from __future__ import annotations

import importlib.util
import inspect
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.modeling_outputs import BaseModelOutputWithPast

from sppo_hf.engine.structure import ModelParts, patched_attribute


class ModelHead:
    """Logits, or the model's own loss, from hidden states."""

    def __init__(self, parts: ModelParts, original_forward: Callable[..., Any]) -> None:
        self._parts = parts
        self._forward = original_forward
        self.output_class: type = BaseModelOutputWithPast
        """Class of what the base model returns; set it to what it really returned."""
        self.plain: tuple[Hashable, bool] | None = None
        """For `liger_tile`: in which state of the model it asked last, and whether logits were one
        plain product."""

    def logits(self, hidden_BMD: Tensor) -> Tensor:
        """Logits `[B, M, V]` of hidden states `[B, M, D]`."""
        return self.run(hidden_BMD).logits

    def run(self, hidden_BMD: Tensor, **kwargs: Any) -> Any:
        """Run the original forward on hidden states; `kwargs` are labels and loss arguments."""
        output = self.output_class(last_hidden_state=hidden_BMD)
        with patched_attribute("forward", {self._parts.base: lambda *_, **__: output}):
            return self._forward(
                inputs_embeds=hidden_BMD, use_cache=False, return_dict=True, **kwargs
            )


# M tokens of a tile, D model width, V vocabulary.


def liger_tile(parts: ModelParts, head: ModelHead, device: torch.device) -> LigerTile | None:
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
    tile = LigerTile(linear)
    if linear.weight.requires_grad and not tile.sums_wide:
        return None
    if head.plain is None or head.plain[0] != state:
        head.plain = (state, is_plain_head(linear, head) and tile.counts_nothing())
    return tile if head.plain[1] else None


def _state(parts: ModelParts, linear: nn.Linear) -> Hashable:
    """What the answer hangs on: the module and what is hooked to it, not the weights' values."""
    return (
        weakref.ref(linear),
        weakref.ref(linear.weight),
        linear.weight.requires_grad,
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


class _NotCounted(TorchFunctionMode):
    """Gives Liger a 1 for the number of labels that count, for which it would wait for the device.

    It divides a mean by it, and we ask for sums.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer `Tensor.item`; all else is as it is."""
        return 1 if func is Tensor.item else func(*args, **(kwargs or {}))


class LigerTile:
    """One tile through Liger's kernel, which computes gradients in its forward as we do."""

    def __init__(self, linear: nn.Linear) -> None:
        from liger_kernel.ops.fused_linear_cross_entropy import (  # type: ignore[import-not-found]
            LigerFusedLinearCrossEntropyFunction,
        )

        self._linear = linear
        self._function: Any = LigerFusedLinearCrossEntropyFunction
        named = inspect.signature(self._function.forward).parameters
        self._defaults = {name: p.default for name, p in named.items() if name != "ctx"}

    @property
    def sums_wide(self) -> bool:
        """Whether the kernel can sum the weight's gradient over its parts in float32."""
        return "accum_dtype" in self._defaults

    def counts_nothing(self) -> bool:
        """Whether a sum is the same when the kernel is not told how many labels count."""
        weight = self._linear.weight
        generator = torch.Generator(weight.device).manual_seed(0)
        hidden_MD = torch.randn(
            5, weight.shape[1], device=weight.device, dtype=weight.dtype, generator=generator
        )
        labels_M = torch.tensor([1, -100, 0, -100, 2], device=weight.device) % weight.shape[0]
        labels_M[1::2] = -100
        told = self._run(hidden_MD, labels_M, weight.detach(), None, -100)
        with _NotCounted():
            untold = self._run(hidden_MD, labels_M, weight.detach(), None, -100)
        return all(torch.equal(one, other) for one, other in zip(told, untold, strict=True))

    def most_tokens(self, tile_tokens: int) -> int:
        """The tokens of a call that takes no more memory than a tile of `tile_tokens` does.

        The kernel cuts a call by itself, into parts whose logits have about as many elements as the
        hidden states of all; it rounds their tokens up to a power of two.
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
        """Loss sum, gradient of the hidden states, gradients of `trainable`."""
        weight, bias = self._linear.weight, self._linear.bias
        leaf = weight.detach().requires_grad_(weight.requires_grad)
        bias_leaf = None if bias is None else bias.detach().requires_grad_(bias.requires_grad)
        with _NotCounted():
            loss, dhidden_MD, *dweights = self._run(
                hidden_MD, labels_M, leaf, bias_leaf, ignore_index
            )
        trained = [x for x in (weight, bias) if x is not None and x.requires_grad]
        by_parameter = dict(zip(map(id, trained), dweights, strict=True))
        return loss, dhidden_MD, [by_parameter.get(id(parameter)) for parameter in trainable]

    def _run(
        self,
        hidden_MD: Tensor,
        labels_M: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ignore_index: int,
    ) -> list[Tensor]:
        """The summed loss, its gradients of the hidden states and of the leaves that need one."""
        hidden_leaf = hidden_MD.detach().requires_grad_()
        asked = {
            "ignore_index": ignore_index,
            "reduction": "sum",
            # Or the sum over parts would be in the weight's dtype.
            "accum_dtype": torch.float32,
        }
        others = list(self._defaults.items())[4:]
        arguments = [asked.get(name, default) for name, default in others]
        with torch.enable_grad():
            result: Any = self._function.apply(hidden_leaf, weight, labels_M, bias, *arguments)
            loss = result[0] if isinstance(result, tuple) else result
            wanted = [x for x in (hidden_leaf, weight, bias) if x is not None and x.requires_grad]
            return [loss.detach().float(), *torch.autograd.grad(loss, wanted)]
