"""Prefetch lists for the tests, made from the sizes of groups of handles."""

from __future__ import annotations

from collections.abc import Sequence


def asked_within(sizes_bytes: Sequence[int], max_prefetch_bytes: int | None) -> list[int]:
    """Return `PrefetchOrder.lowest_prefetched` that keeps the bytes prefetched ahead in a window.

    At least one group with bytes is ahead, even if it is larger; groups without bytes cost nothing.
    """
    asked: list[int] = []
    for number in range(len(sizes_bytes)):
        lowest, ahead = number, 0
        while lowest > 0:
            size = sizes_bytes[lowest - 1]
            if size and ahead and ahead + size > (max_prefetch_bytes or 0):
                break
            lowest, ahead = lowest - 1, ahead + size
        asked.append(min([lowest, *asked[number:]]))
    return asked
