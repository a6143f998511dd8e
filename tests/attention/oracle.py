"""Expected results of attention: a dense mask, one softmax, gradients by autograd in float64."""

from typing import NamedTuple

import torch
from torch import Tensor

from sppo_hf.attention.backends.base import CausalBand
from sppo_hf.attention.segments import RowSpans


class Problem(NamedTuple):
    """Inputs of one attention and the gradient of its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


class Answer(NamedTuple):
    """Results of forward and backward."""

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
    """The answer in float64, from inputs of any dtype."""
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


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sinks: Tensor | None,
    rows: tuple[RowSpans, ...] | None,
    window: int | None,
    scale: float,
) -> Tensor:
    """Differentiable causal attention of whole rows, [B, T, N, H]; zeros where no key is seen."""
    num_rows, num_heads, tokens, _ = q.shape
    groups = num_heads // k.shape[1]
    at = torch.arange(tokens, device=q.device)
    seen = visible(CausalBand(0, window), tokens, tokens).to(q.device).repeat(num_rows, 1, 1)
    for row, spans in enumerate(rows or ()):
        document = torch.zeros(tokens, dtype=torch.long, device=q.device)
        for start, _ in spans.documents:
            document[start:] += 1
        seen[row] &= document[None] == document[:, None]
        seen[row] &= (at < spans.valid_tokens)[None]
    scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) * scale
    logits = [scores.masked_fill(~seen[:, None], -1e300)]
    if sinks is not None:
        logits.append(sinks.view(1, -1, 1, 1).expand(num_rows, num_heads, tokens, 1))
    p = torch.softmax(torch.cat(logits, -1), -1)[..., :tokens] * seen[:, None]
    return (p @ v.repeat_interleave(groups, 1)).transpose(1, 2)


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
