"""Bands that a backend must get right, and the comparison that every backend's test shares."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from hypothesis import strategies as st
from torch import Tensor

from sppo_hf.attention.backends.base import Backend, CausalBand, Scores
from tests.attention.oracle import Answer, Problem, assert_equal, make_problem, solve, visible

CASES = [
    (rows, keys, CausalBand(q_start, window))
    for rows, keys, q_start in (
        (7, 7, 0),  # first chunk
        (7, 19, 12),  # later chunk
        (1, 13, 12),  # one token
        (7, 16, 12),  # padded queries
        (5, 9, 9),  # only padded queries
        (5, 9, 14),  # the same, further out
        (9, 3, 3),  # more of them than keys
        (9, 20, 3),  # keys that nobody sees
        (9, 6, -4),  # queries before the first key
        (4, 5, -9),  # nobody sees anything
    )
    for window in (None, 1, 3, 6, 100)
]


@contextmanager
def deterministic(mode: str) -> Iterator[None]:
    """Set PyTorch's deterministic debug mode: "default", "warn" or "error"."""
    torch.set_deterministic_debug_mode(mode)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")


@st.composite
def bands(draw):
    """Draw numbers of rows and keys and a band, also ones in which rows see nothing."""
    rows, keys = draw(st.integers(1, 24)), draw(st.integers(1, 40))
    window = draw(st.none() | st.integers(1, 45))
    return rows, keys, CausalBand(draw(st.integers(-5, 45)), window)


def run(
    backend: Backend,
    problem: Problem,
    band: CausalBand,
    *,
    scale: float,
    softcap: float | None,
    chosen: Tensor | None = None,
) -> Answer:
    """Forward and backward of a backend."""
    q, k, v, dout = problem
    scores = Scores(band=band, scale=scale, softcap=softcap, chosen_BCS=chosen)
    out, lse = backend.forward(q, k, v, **scores)
    grads = backend.backward(dout, q, k, v, out, lse, **scores)
    return Answer(out, lse, *grads)


def choice(rows: int, keys: int, *, batch: int = 2, num_chosen: int = 3) -> Tensor:
    """Numbers that an indexer may give for each query: of its keys and of others, some twice."""
    generator = torch.Generator().manual_seed(rows * keys)
    shape = (batch, rows, num_chosen)
    return torch.randint(-2, keys + 2, shape, generator=generator, dtype=torch.int32)


def check(
    backend: Backend,
    band: CausalBand,
    *,
    tolerance: float = 1e-10,
    softcap: float | None = None,
    chosen: Tensor | None = None,
    rows: int,
    keys: int,
    **sizes,
) -> None:
    """Compare a backend with the oracle; see `choice`."""
    problem, seen = make_problem(rows=rows, keys=keys, **sizes), visible(band, rows, keys)
    if chosen is not None:
        seen = seen & (chosen[..., None] == torch.arange(keys)).any(dim=2)[:, None]
    expected = solve(problem, seen, scale=0.4, softcap=softcap)
    found = run(backend, problem, band, scale=0.4, softcap=softcap, chosen=chosen)
    assert_equal(found, expected, tolerance)
