"""Closed formulas of the literature for each schedule, where all units cost the same.

They serve tests and comparisons, and do not use a Schedule's actions. P, M, N, V are ranks,
micro-batches, chunks per micro-batch and virtual stages per rank; U = M * N units.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.generate import Size

SCHEDULES_WITH_FORMULAS = ("gpipe", "1f1b", "seq1f1b", "zb_seq1f1b", "interleaved_seq1f1b")
"""The schedules whose formulas are here. Another schedule needs none: what it holds and how long it
takes is simulated."""


class UnitCosts(NamedTuple):
    """Durations of one unit on one stage, in any unit of time; links take none."""

    forward: int = 1
    """F."""

    input: int = 1
    """I: gradient of the input. A whole backward takes I + W."""

    weight: int = 1
    """W: gradient of the weights."""


EQUAL = UnitCosts()
"""F = I = W, so that a whole backward takes twice a forward."""


def step_length(name: str, size: Size, costs: UnitCosts = EQUAL) -> int:
    """Returns the length of a step, in the costs' unit of time.

    `work + idle` of each rank, with work `U * V * (F + I + W)`. Idle is (P - 1)(F + I + W) for
    gpipe, 1f1b and seq1f1b (Seq1F1B's `(P - 1)(F + B) / N` where F and B are a micro-batch's), and
    for interleaved_seq1f1b as long as U >= P; below that each of the V - 1 returns to the first
    rank waits for P - U units more. Of zb_seq1f1b it is (P - 1)(F + I - W'), W' = min(F, I, W),
    where `N (M - 1) >= P - 1`; every unit that is missing for that costs W' more.

    Raises:
        ScheduleError: there is no formula for a schedule of that name.
    """
    _check(name)
    whole = sum(costs)
    work, fill = size.num_units * size.num_virtual * whole, size.num_ranks - 1
    if name == "zb_seq1f1b":
        hidden = min(costs)
        short = max(0, fill + size.num_chunks - size.num_units)
        return work + fill * (whole - costs.weight - hidden) + min(short, fill) * hidden
    returns = (size.num_virtual - 1) * max(0, size.num_ranks - size.num_units)
    return work + (fill + returns) * whole


def msp_forward_units(num_ranks: int, num_chunks: int, *, chunk_by_chunk: bool = False) -> Fraction:
    """Returns the length of one micro-batch's forward in `msp`, in units of equal cost.

    `N + 2 - 2 H_P + H_a + H_b`, a = (P - 1) // 2, b = P - 1 - a: stage j of those that fill ends
    them after `j + 1 - (H_P - H_(P-1-j))` units, and the drains of the stages from j on follow each
    other for `P - j - (H_P - H_j)` more; the middle j is the latest.

    Args:
        num_ranks: P.
        num_chunks: N, at least P.
        chunk_by_chunk: of the order in which all ranks fill until the last stage's steady units
            begin, and drain once they have ended: `N + 2 (P - H_P) - (P - 1)`.
    """
    fill = num_ranks - _harmonic(num_ranks)
    if chunk_by_chunk:
        return num_chunks + 2 * fill - (num_ranks - 1)
    half = (num_ranks - 1) // 2
    middle = _harmonic(half) + _harmonic(num_ranks - 1 - half)
    return num_chunks + 2 - 2 * _harmonic(num_ranks) + middle


def _harmonic(number: int) -> Fraction:
    return sum((Fraction(1, n) for n in range(1, number + 1)), Fraction())


def bubble_fraction(name: str, size: Size, costs: UnitCosts = EQUAL) -> Fraction:
    """Returns the share of the step in which a rank idles: `(P - 1) / (U + P - 1)` for Seq1F1B.

    Raises:
        ScheduleError: there is no formula for a schedule of that name.
    """
    work = size.num_units * size.num_virtual * sum(costs)
    return 1 - Fraction(work, step_length(name, size, costs))


def peak_units(name: str, size: Size) -> list[int]:
    """Returns how many units' activations each rank holds at most (of V * U in all).

    gpipe: U. 1f1b: (P - r) micro-batches of N. seq1f1b: P - r + N - 1. zb_seq1f1b: P + N - 1, for
    rank r is r weight gradients late. interleaved_seq1f1b: (V - 1) G + 2 (P - r - 1) + N with
    groups of G units; G = P where N divides P and P divides U, and otherwise up to 2 (P + N) - 1,
    since groups are whole micro-batches of at least P chunks.

    Raises:
        ScheduleError: there is no formula for a schedule of that name.
    """
    _check(name)
    ranks, chunks, units = size.num_ranks, size.num_chunks, size.num_units
    late = range(ranks)
    if name == "gpipe":
        return [units for _ in late]
    if name == "1f1b":
        return [min(ranks - r, size.num_micro_batches) * chunks for r in late]
    if name == "zb_seq1f1b":
        return [min(ranks + chunks - 1, units) for _ in late]
    if name == "seq1f1b":
        return [min(ranks - r + chunks - 1, units) for r in late]
    ahead = (size.num_virtual - 1) * group_units(size)
    most = units * size.num_virtual
    return [min(ahead + 2 * (ranks - r - 1) + chunks, most) for r in late]


def group_units(size: Size) -> int:
    """Returns G: units of the longest group of interleaved_seq1f1b.

    Groups are whole micro-batches, ceil(P / N) of them or, to be even, up to one in
    `M // ceil(P / N)` more.
    """
    least = -(-size.num_ranks // size.num_chunks)
    count = max(1, size.num_micro_batches // least)
    return -(-size.num_micro_batches // count) * size.num_chunks


def _check(name: str) -> None:
    if name not in SCHEDULES_WITH_FORMULAS:
        raise ScheduleError(
            f"There is no formula for schedule {name!r}. Allowed: "
            f"{', '.join(SCHEDULES_WITH_FORMULAS)}. Remedy: simulate it."
        )
