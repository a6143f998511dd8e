"""Efficient on a made-up kernel with the real one's signature and mask; the real one on a GPU."""

import pytest

from sppo_hf.attention.backends.aten import Efficient
from sppo_hf.attention.backends.base import CausalBand
from tests.attention.backends.cases import CASES, check
from tests.attention.backends.fake_kernels import FakeAten

VARIANTS = [
    Efficient(aten=FakeAten()),
]


@pytest.mark.parametrize("backend", VARIANTS, ids=range(len(VARIANTS)))
@pytest.mark.parametrize("v_head_size", [8, 5, 20])
@pytest.mark.parametrize(("rows", "keys", "band"), CASES)
def test_matches_oracle(backend, rows, keys, band, v_head_size):
    check(backend, band, rows=rows, keys=keys, v_head_size=v_head_size)


def test_keys_are_repeated_for_the_diagonal_only():
    aten = FakeAten()
    check(Efficient(aten=aten), CausalBand(20), rows=5, keys=25, heads=6, kv_heads=2)
    assert aten.calls == [((2, 6, 5, 8), (2, 6, 5, 8)), ((2, 2, 15, 8), (2, 2, 20, 8))]
