"""Deprecations in another process's output are found, and nothing else is."""

import pytest

from tests.deprecations import assert_no_deprecation

TORCH = "/lib/site-packages/torch/x.py:3:"


def test_deprecations_of_the_libraries_below_are_found() -> None:
    with pytest.raises(AssertionError, match=r"torch/x\.py:3"):
        assert_no_deprecation(f"fine\n{TORCH} FutureWarning: old\nfine")


def test_other_warnings_are_left_alone() -> None:
    assert_no_deprecation("/lib/site-packages/peft/x.py:3: FutureWarning: old")
    assert_no_deprecation(f"{TORCH} UserWarning: odd\nFutureWarning: said by nobody")
