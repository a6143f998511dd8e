"""Linear programmes with known answers."""

import numpy as np
import pytest

from sppo_hf.planning.highs import Rows, minimise


def test_least_of_a_small_programme() -> None:
    less, equal = Rows(), Rows()
    less.add([(0, -1.0), (1, -2.0)], -4.0)  # x + 2y >= 4
    equal.add([(0, 1.0), (1, 1.0)], 3.0)
    x = minimise(np.array([3.0, 5.0]), less, equal)
    assert x is not None
    assert x == pytest.approx([2.0, 1.0])


def test_nothing_is_negative() -> None:
    x = minimise(np.array([1.0]), Rows(), Rows())
    assert x is not None
    assert x == pytest.approx([0.0])


def test_what_cannot_be_has_no_answer() -> None:
    less = Rows()
    less.add([(0, 1.0)], -1.0)
    assert minimise(np.array([1.0]), less, Rows()) is None


def test_terms_of_zero_are_left_out() -> None:
    rows = Rows()
    rows.add([(0, 0.0), (3, 2.0)], 1.0)
    assert rows.columns == [3]
    assert rows.starts == [0, 1]
