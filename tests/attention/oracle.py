"""Attention as a textbook has it: a dense mask, one softmax, gradients by autograd."""

from typing import NamedTuple

import torch
from torch import Tensor

from sppo_hf.attention.backends.base import CausalBand


class Problem(NamedTuple):
    """Inputs of one attention and the gradient of its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


class Answer(NamedTuple):
    """What a backend has to find."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def make_problem(
    *,
    rows: int,
    keys: int,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 8,
    v_head_size: int | None = None,
    batch: int = 2,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    seed: int = 0,
) -> Problem:
    """Random inputs, laid out as models do: transposed views of [B, tokens, heads, H]."""
    generator = torch.Generator().manual_seed(seed)

    def random(count: int, tokens: int, size: int) -> Tensor:
        x = torch.randn(batch, tokens, count, size, generator=generator, dtype=torch.float64)
        return x.to(device=device, dtype=dtype).transpose(1, 2)

    v_head_size = head_size if v_head_size is None else v_head_size
    return Problem(
        random(heads, rows, head_size),
        random(kv_heads, keys, head_size),
        random(kv_heads, keys, v_head_size),
        random(heads, rows, v_head_size),
    )


def visible(band: CausalBand, rows: int, keys: int) -> Tensor:
    """Mask [rows, keys] straight from the definition of a band."""
    position = band.q_start + torch.arange(rows).unsqueeze(1)
    key = torch.arange(keys)
    seen = key <= position
    return seen if band.window is None else seen & (key > position - band.window)


def solve(problem: Problem, seen: Tensor, *, scale: float, softcap: float | None = None) -> Answer:
    """The answer in float64, whatever the problem's dtype is."""
    q, k, v, dout = (x.detach().double() for x in problem)
    for x in (q, k, v):
        x.requires_grad_()
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, dim=1).transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    any_seen = seen.any(-1)
    scores = scores.masked_fill(~seen, -1e300)
    probabilities = scores.softmax(-1) * seen
    out = probabilities @ v.repeat_interleave(groups, dim=1)
    lse = torch.logsumexp(scores, -1).masked_fill(~any_seen, float("-inf"))
    grads = torch.autograd.grad(out, (q, k, v), dout, allow_unused=True)
    dq, dk, dv = (
        torch.zeros_like(x) if g is None else g for x, g in zip((q, k, v), grads, strict=True)
    )
    return Answer(out.detach(), lse.detach(), dq, dk, dv)


def assert_equal(actual: Answer, expected: Answer, tolerance: float) -> None:
    """Every result within `tolerance` of its largest entry, and the same rows without a key."""
    assert torch.equal(actual.lse > float("-inf"), expected.lse > float("-inf"))
    for name in Answer._fields:
        one, two = getattr(actual, name).double(), getattr(expected, name)
        assert one.shape == two.shape, name
        if name == "lse":
            one, two = (x.nan_to_num(neginf=0.0) for x in (one, two))
        assert not one.isnan().any(), name
        if two.numel():
            size = two.abs().max().clamp_min(1.0)
            error = ((one - two).abs().max() / size).item()
            assert error <= tolerance, f"{name}: {error:.2e} > {tolerance:.0e}"
