"""AtenFlash on a made-up kernel with the real one's signature and mask; the real one on a GPU."""

import pytest

from sppo_hf.attention.backends.aten_flash import AtenFlash
from tests.attention.backends.cases import CASES, check
from tests.attention.backends.fake_kernels import FakeAten

VARIANTS = [
    AtenFlash(aten=FakeAten()),
    AtenFlash(grouped_heads=False, aten=FakeAten(grouped_heads=False)),
]


@pytest.mark.parametrize("backend", VARIANTS, ids=range(len(VARIANTS)))
@pytest.mark.parametrize("v_head_size", [8, 5, 20])
@pytest.mark.parametrize(("rows", "keys", "band"), CASES)
def test_matches_oracle(backend, rows, keys, band, v_head_size):
    check(backend, band, rows=rows, keys=keys, v_head_size=v_head_size)
