"""AtenFlash on a made-up kernel with the real one's signature and mask; the real one on a GPU."""

import pytest

from sppo_hf.attention.backends.aten import AtenFlash
from tests.attention.backends.cases import CASES, check
from tests.attention.backends.fake_kernels import FakeAten
from tests.sweeps import pairs

VARIANTS = [
    AtenFlash(aten=FakeAten()),
    AtenFlash(grouped_heads=False, aten=FakeAten(grouped_heads=False)),
]


@pytest.mark.parametrize(
    ("v_head_size", "case", "variant"), pairs([8, 5, 20], CASES, range(len(VARIANTS)))
)
def test_matches_oracle(v_head_size, case, variant):
    rows, keys, band = case
    check(VARIANTS[variant], band, rows=rows, keys=keys, v_head_size=v_head_size)
