# pyright: basic, reportMissingTypeStubs=false
"""Linear programmes for HiGHS, through SciPy, which is imported when the first one is solved.

Knows nothing of what a programme is about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Rows:
    """Constraints on `row . x`, collected sparsely."""

    def __init__(self) -> None:
        self.data: list[float] = []
        self.columns: list[int] = []
        self.starts = [0]
        self.bounds: list[float] = []

    def add(self, terms: Sequence[tuple[int, float]], bound: float) -> None:
        """Adds one row: (column, factor) terms, no column twice, and its bound."""
        for column, factor in terms:
            if factor:
                self.columns.append(column)
                self.data.append(factor)
        self.starts.append(len(self.data))
        self.bounds.append(bound)


def minimise(objective: NDArray[np.float64], less: Rows, equal: Rows) -> NDArray[np.float64] | None:
    """Returns the x >= 0 that minimises `objective . x`, or None where there is none.

    Args:
        objective: [width].
        less: rows that are at most their bound.
        equal: rows that are their bound.
    """
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    def matrix(rows: Rows) -> csr_array:
        shape = (len(rows.bounds), len(objective))
        return csr_array((rows.data, rows.columns, rows.starts), shape)

    result = linprog(
        objective,
        A_ub=matrix(less),
        b_ub=np.array(less.bounds),
        A_eq=matrix(equal),
        b_eq=np.array(equal.bounds),
        bounds=(0, None),
        method="highs",
    )
    return None if result.status != 0 else np.asarray(result.x)
