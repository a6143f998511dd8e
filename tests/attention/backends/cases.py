"""Bands that a backend must get right, and the comparison that every backend's test shares."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from hypothesis import strategies as st

from sppo_hf.attention.backends.base import Backend, CausalBand
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
    backend: Backend, problem: Problem, band: CausalBand, *, scale: float, softcap: float | None
) -> Answer:
    """Forward and backward of a backend."""
    q, k, v, dout = problem
    out, lse = backend.forward(q, k, v, band=band, scale=scale, softcap=softcap)
    grads = backend.backward(dout, q, k, v, out, lse, band=band, scale=scale, softcap=softcap)
    return Answer(out, lse, *grads)


def check(
    backend: Backend,
    band: CausalBand,
    *,
    tolerance: float = 1e-10,
    softcap: float | None = None,
    rows: int,
    keys: int,
    **sizes,
) -> None:
    """Compare a backend with the oracle."""
    problem = make_problem(rows=rows, keys=keys, **sizes)
    expected = solve(problem, visible(band, rows, keys), scale=0.4, softcap=softcap)
    assert_equal(run(backend, problem, band, scale=0.4, softcap=softcap), expected, tolerance)
