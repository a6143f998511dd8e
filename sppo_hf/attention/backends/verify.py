"""Checking a backend against the reference on small inputs before it is trusted.

Kernels for CUDA differ between releases and cards in what they accept and in how they align masks.
Instead of a table of versions, a backend is asked to do a few small cases that cover what a chunk
meets: the first chunk, a later one, a single token, padded queries, a window, merged values, and
scores far below zero (see [Note: low scores]).

Runs once per process, backend, device and requirement. Most kernels need milliseconds for it. One
that builds a plan for each new shape (cuDNN) takes a second for every rectangle, forward and
backward; it gets the cases that show it what its kernel can do: a square, a rectangle, a single
query, low scores. How bands are cut into these is arithmetic, which tests on a CPU cover.

[Note: low scores]
A row's log-sum-exp may lie anywhere, but a kernel that computes exp(-lse) somewhere, or reads keys
that do not exist as if their score were 0, overflows float32 once it is below about -88. cuDNN's
backward has done so, for numbers of keys that leave half a tile (64 of 128) empty: NaN in dQ.
Random inputs have scores about 0 and never show it, so two cases shift all scores to about -120.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from sppo_hf.attention.backends.base import (
    AttentionOutput,
    AttentionSpec,
    Backend,
    CausalBand,
    Documents,
    Mask,
    merge_partials,
)
from sppo_hf.attention.backends.reference import Reference

logger = logging.getLogger(__name__)

TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 2e-3,  # kernels may multiply in tf32
    torch.float16: 1e-2,
    torch.bfloat16: 4e-2,
}
"""Largest accepted error of a tensor, relative to its norm. A misplaced mask is above 0.1."""

_SOFTCAP = 5.0
_WINDOW_TOKENS = 50
_KV_HEADS = 2

_LOW_SCORE = -120.0
"""About what all scores of a low case are; its probabilities are as spread as those of others."""


@dataclass(frozen=True, slots=True)
class _Case:
    """One small problem: C queries, T keys, and what they see of each other."""

    num_rows: int
    num_keys: int
    band: Mask
    low_scores: bool = False

    def __str__(self) -> str:
        if isinstance(self.band, Documents):
            text = f"documents of {', '.join(map(str, self.band.num_queries))} queries"
        else:
            text = f"{self.num_rows} queries at {self.band.q_start} of {self.num_keys} keys"
        text += f", window {self.band.window}" if self.band.window else ""
        return text + (f", scores about {_LOW_SCORE:.0f}" if self.low_scores else "")


def find_mismatch(backend: Backend, requirement: AttentionSpec, device: torch.device) -> str | None:
    """Compare a backend, which says that it can, with the reference, forward and backward.

    Returns:
        None if they agree, else in a few words what differs or which exception came.
    """
    cases = _cases(requirement, few=backend.plans_each_shape)
    if backend.documents_at_once:
        cases += _document_cases(requirement)
    for number, case in enumerate(cases):
        try:
            found = _compare(backend, requirement, device, case, seed=number)
        # Kernels report what they cannot do with whatever exception they like; all mean "no".
        except Exception as error:
            logger.debug("backend %s failed on %s", backend.name, case, exc_info=True)
            first_line = (str(error).strip().splitlines() or [""])[0]
            return f"raised {type(error).__name__} for {case}: {first_line}"
        if found is not None:
            return f"differs from the reference in {found} for {case}"
    return None


def _cases(requirement: AttentionSpec, *, few: bool) -> list[_Case]:
    """Small problems that cover what chunks meet under this requirement; `few`: what must be."""
    shapes = [(77, 207, 130), (1, 131, 130)]
    shapes += [] if few else [(77, 77, 0), (77, 180, 130), (40, 90, 90)]
    windows = (None, _WINDOW_TOKENS) if requirement.window else (None,)
    cases = [
        _Case(rows, keys, CausalBand(start, window))
        for rows, keys, start in shapes
        for window in windows
    ]
    if requirement.softcap:
        return cases  # a cap keeps scores near 0
    return cases + [_Case(64, 192, CausalBand(start), low_scores=True) for start in (192, 128)]


def _document_cases(requirement: AttentionSpec) -> list[_Case]:
    """Packed rows: a document that began earlier, short ones, one of a single token."""
    queries, keys = (40, 1, 77, 9), (170, 1, 77, 9)
    windows = (None, _WINDOW_TOKENS) if requirement.window else (None,)
    return [_Case(sum(queries), sum(keys), Documents(queries, keys, w)) for w in windows]


def _compare(
    backend: Backend, requirement: AttentionSpec, device: torch.device, case: _Case, *, seed: int
) -> str | None:
    """Name of the first result that differs, with its error; None if all agree."""
    # A generator of our own: the user's random numbers stay as they are.
    generator = torch.Generator().manual_seed(seed)

    def random(heads: int, tokens: int, size: int) -> Tensor:
        """Queries, keys, ... as models lay them out: a transposed [B, tokens, heads, H]."""
        x = torch.randn(batch, tokens, heads, size, generator=generator, dtype=torch.float32)
        return x.to(device=device, dtype=requirement.dtype).transpose(1, 2)

    batch = 1 if isinstance(case.band, Documents) else 2
    heads = _KV_HEADS * requirement.gqa_ratio
    q = random(heads, case.num_rows, requirement.qk_head_size)
    k = random(_KV_HEADS, case.num_keys, requirement.qk_head_size)
    v = random(_KV_HEADS, case.num_keys, requirement.v_head_size)
    if case.low_scores:
        q, k = _lower_scores(q, k, generator)
    dout = random(heads, case.num_rows, requirement.v_head_size)
    other_out = random(heads, case.num_rows, requirement.v_head_size).double()
    scale = requirement.qk_head_size**-0.5
    softcap = _SOFTCAP if requirement.softcap else None

    # In float64, since float32 products may be rounded to tf32 on the user's wish.
    exact = Reference()
    actual = backend.forward(q, k, v, band=case.band, scale=scale, softcap=softcap)
    wide = [x.double() for x in (q, k, v)]
    expected = exact.forward(*wide, band=case.band, scale=scale, softcap=softcap)
    seen = expected.lse_BNC > float("-inf")
    if not torch.equal(actual.lse_BNC > float("-inf"), seen):
        return "the rows that see no key"
    # Values merged with keys elsewhere: backward must use what it is given.
    merged = merge_partials(expected, AttentionOutput(other_out, expected.lse_BNC + 0.5))
    out, lse = merged.out_BNCH.to(requirement.dtype), merged.lse_BNC.to(actual.lse_BNC.dtype)
    given = [dout, q, k, v, out, lse]
    grads = backend.backward(*given, band=case.band, scale=scale, softcap=softcap)
    wide = [x.double() for x in given]
    expected_grads = exact.backward(*wide, band=case.band, scale=scale, softcap=softcap)
    names = ("output", "log-sum-exp", "dQ", "dK", "dV")
    ours = (actual.out_BNCH, actual.lse_BNC[seen], *grads)
    theirs = (expected.out_BNCH, expected.lse_BNC[seen], *expected_grads)
    for name, one, two in zip(names, ours, theirs, strict=True):
        error = relative_error(one, two)
        if not error <= TOLERANCE[requirement.dtype]:
            return f"{name} (relative error {error:.1e})"
    return None


def _lower_scores(q: Tensor, k: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The same queries and keys, moved apart so that all scaled scores are about `_LOW_SCORE`.

    Both are normally distributed; scores are scaled by the root of their head size.
    """
    head_size = q.shape[3]
    # The scaled product of two opposite vectors of signs times `shift` is -shift^2 * sqrt(H).
    shift = (-_LOW_SCORE / head_size**0.5) ** 0.5
    signs_H = (torch.randint(2, (head_size,), generator=generator) * 2 - 1).to(q.device)
    # Differences shrink as the shift grows, which keeps a row's scores as spread as without it.
    moved = (sign * shift * signs_H + x.float() / shift for sign, x in ((1, q), (-1, k)))
    # Few bits, so that kernels may round inputs (tf32) without changing scores of this size.
    new_q, new_k = (x.bfloat16().to(q.dtype) for x in moved)
    return new_q, new_k


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference by the norm of what is expected; NaN stays NaN."""
    if actual.shape != expected.shape:
        return float("inf")
    difference = (actual.to(expected.dtype) - expected).norm()
    return float(difference / expected.norm().clamp_min(torch.finfo(expected.dtype).tiny))
