"""Lists of prefetches for the tests, from the sizes of groups of handles."""

from __future__ import annotations

from collections.abc import Sequence


def asked_within(sizes_bytes: Sequence[int], max_prefetch_bytes: int | None) -> list[int]:
    """By group, the lowest one asked for while it is in use: as many as the window holds.

    One that has bytes is always ahead, however large, and those without are passed over.
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
