"""A backend that is wrong fails its GPU test; only one that cannot is skipped."""

import pytest
import torch

from sppo_hf.attention.backends import select
from sppo_hf.attention.backends.base import AttentionSpec
from sppo_hf.attention.backends.flash_attn import (
    FlashAttention2,
    FlashAttention3,
    FlashAttention4,
)
from tests.attention.backends.usable import known_gap, usable_backend

HOPPER, AMPERE = (9, 0), (8, 0)


def requirement(device="cuda", head_size=128, **changes):
    sizes = {"qk_head_size": head_size, "v_head_size": head_size}
    return AttentionSpec(device_type=device, dtype=torch.bfloat16, **sizes, **changes)


@pytest.fixture
def verdict(monkeypatch):
    """A list of one: the mismatch that every backend is said to have, or None."""
    said = [None]
    monkeypatch.setattr(select, "find_mismatch", lambda *_: said[0])
    for absent in (FlashAttention2, FlashAttention3, FlashAttention4):
        monkeypatch.setattr(absent, "module_name", "no_such_package.kernels")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: HOPPER)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    select._find_on_device.cache_clear()
    yield said
    select._find_on_device.cache_clear()


def test_one_that_works_is_returned(verdict):
    assert usable_backend("cudnn", requirement()).name == "cudnn"


def test_one_that_says_it_cannot_is_skipped(verdict):
    with pytest.raises(pytest.skip.Exception, match="cudnn cannot soft-cap scores"):
        usable_backend("cudnn", requirement(softcap=True))
    with pytest.raises(pytest.skip.Exception, match="is not installed"):
        usable_backend("flash_attention_3", requirement())


@pytest.mark.parametrize("found", ["differs from the reference in dQ", "raised RuntimeError: no"])
def test_one_that_is_refused_fails(verdict, found):
    verdict[0] = found
    with pytest.raises(pytest.fail.Exception, match=found):
        usable_backend("cudnn", requirement())


def test_a_known_gap_excuses_raising_and_nothing_else(verdict):
    verdict[0] = "raised RuntimeError: no plan"
    with pytest.raises(pytest.skip.Exception, match="newer cuDNN"):
        usable_backend("cudnn", requirement(head_size=256))
    select._find_on_device.cache_clear()
    verdict[0] = "differs from the reference in dQ"
    with pytest.raises(pytest.fail.Exception, match="differs"):
        usable_backend("cudnn", requirement(head_size=256))


@pytest.mark.parametrize(
    ("name", "head_size", "capability", "cudnn_version", "gap"),
    [
        ("cudnn", 256, HOPPER, 91900, "newer cuDNN"),
        ("cudnn", 256, HOPPER, 92000, None),
        ("cudnn", 192, HOPPER, 91900, None),
        ("cudnn", 192, AMPERE, 92000, "on Hopper only"),
        ("cudnn", 128, AMPERE, 91900, None),
        ("flash_attention_3", 128, AMPERE, 91900, "Hopper"),
        ("flash_attention_3", 128, HOPPER, 91900, None),
        ("flash_attention_4", 128, HOPPER, 91900, "beta"),
        ("flash_attention_2", 256, AMPERE, 91900, None),
        ("aten_flash", 256, AMPERE, 91900, None),
        ("efficient", 256, AMPERE, 91900, None),
    ],
)
def test_known_gaps(name, head_size, capability, cudnn_version, gap):
    found = known_gap(name, requirement(head_size=head_size), capability, cudnn_version)
    assert found is None if gap is None else gap in found
