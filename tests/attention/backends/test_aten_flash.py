"""AtenFlash on a made-up kernel with the real one's signature and mask; the real one on a GPU."""

import pytest
import torch

from sppo_hf.attention.backends.aten_flash import AtenFlash
from sppo_hf.attention.backends.base import AttentionSpec
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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"window": True}, None),
        ({"device_type": "cpu"}, "CUDA"),
        ({"dtype": torch.float32}, "float32"),
        ({"qk_head_size": 512}, "512"),
        ({"softcap": True}, "soft-cap"),
    ],
)
def test_says_what_it_cannot(changes, reason):
    settings = {
        "device_type": "cuda",
        "dtype": torch.bfloat16,
        "qk_head_size": 128,
        "v_head_size": 128,
    }
    found = AtenFlash(aten=FakeAten()).reason_unsupported(AttentionSpec(**settings | changes))
    assert found is None if reason is None else reason in found
