"""The longest length that trains, by doubling and then bisecting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to."""

    longest_tokens: int
    """The longest length that trained; 0 if none did."""

    failed_tokens: int | None
    """The shortest length that did not train; None if the search ended at its limit."""


def search(trains: Callable[[int], bool], *, step_tokens: int, most_tokens: int) -> Found:
    """Searches the longest multiple of `step_tokens` that trains.

    What fits is taken to fit at every shorter length too. Takes about twice the logarithm of the
    answer in tries.

    Args:
        trains: tries a length, in tokens.
        step_tokens: resolution, and the first length tried.
        most_tokens: lengths above are not tried.
    """
    good, bad = 0, None
    tried = step_tokens
    while tried <= most_tokens:
        if not trains(tried):
            bad = tried
            break
        good, tried = tried, 2 * tried
    if bad is None:
        return Found(good, None)
    while bad - good > step_tokens:
        middle = (good + bad) // 2 // step_tokens * step_tokens
        if trains(middle):
            good = middle
        else:
            bad = middle
    return Found(good, bad)
