"""Stand-ins for Liger's functions, which need a GPU.

They compute what these compute, refuse fake tensors as Triton's kernels do, and write where these
write, unseen by torch: into new memory, backward of a gated product over what was saved, and that
of a norm over its gradient if told so.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils import _python_dispatch

from sppo_hf.engine import layer_kernels

calls: Counter[str] = Counter()
"""Forwards by kernel, since `install`."""


def wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def write(memory: Tensor, values: Callable[[], Tensor]) -> Tensor:
    """What a kernel does: autograd and dispatch modes see no operation."""
    if isinstance(memory, FakeTensor):
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")
    with _python_dispatch._disable_current_modes(), torch.no_grad():
        memory.data.copy_(values())
    return memory


def for_all_inputs(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    return *grads, *(None,) * (len(ctx.needs_input_grad) - len(grads))


class RMSNorm(torch.autograd.Function):
    """As `LigerRMSNormFunction`: saves its input and the reciprocal of the root."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, casting: str, *how: Any
    ) -> Tensor:
        calls["norm"] += 1
        ctx.offset, ctx.in_place = offset, how[0]
        scale = x.new_empty(*x.shape[:-1], 1, dtype=wide(x).dtype)
        write(scale, lambda: torch.rsqrt(wide(x).pow(2).mean(-1, keepdim=True) + eps))
        ctx.save_for_backward(x, weight, scale)
        return write(torch.empty_like(x), lambda: wide(x) * scale * (wide(weight) + offset))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed, grad = wide(x) * scale, wide(grads[0])
        dweight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        scaled = grad * (wide(weight) + ctx.offset)
        dx = scale * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        out = grads[0].contiguous() if ctx.in_place else torch.empty_like(x)
        return for_all_inputs(ctx, write(out, lambda: dx), dweight)


class SiLUMul(torch.autograd.Function):
    """As `LigerSiLUMulFunction`."""

    name = "silu"
    activation = staticmethod(F.silu)
    derivative = staticmethod(torch.ops.aten.silu_backward)

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, *_: float) -> Tensor:
        kind = ctx._forward_cls
        calls[kind.name] += 1
        ctx.save_for_backward(a, b)
        return write(torch.empty_like(a), lambda: kind.activation(wide(a)) * wide(b))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        kind, grad, gate = ctx._forward_cls, wide(grads[0]), wide(a.clone())
        write(a, lambda: kind.derivative(grad * wide(b), gate))
        return for_all_inputs(ctx, a, write(b, lambda: grad * kind.activation(gate)))


class GELUMul(SiLUMul):
    """As `LigerGELUMulFunction`."""

    name = "gelu"
    activation = staticmethod(partial(F.gelu, approximate="tanh"))
    derivative = staticmethod(partial(torch.ops.aten.gelu_backward, approximate="tanh"))


def install(monkeypatch: pytest.MonkeyPatch, *, watched: bool = False) -> SimpleNamespace:
    """Have the engine find these functions, which are returned, for a model on the CPU.

    Those that are `watched` keep what `watch_liger` does to them until that is undone, and so do
    functions that derive from them, of which Liger has none.
    """
    ops = SimpleNamespace(
        LigerRMSNormFunction=RMSNorm, LigerSiLUMulFunction=SiLUMul, LigerGELUMulFunction=GELUMul
    )
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", ops)
    monkeypatch.setattr(layer_kernels, "liger_runs_on", lambda device: True)
    if not watched:
        monkeypatch.setattr(layer_kernels, "watch_liger", lambda: None)
    calls.clear()
    return ops
