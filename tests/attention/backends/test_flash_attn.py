"""The flash-attn packages' backends on fakes of several releases of them."""

import pytest
import torch

from sppo_hf.attention.backends.base import AttentionSpec, CausalBand
from sppo_hf.attention.backends.flash_attn import (
    FlashAttention2,
    FlashAttention3,
    FlashAttention4,
)
from tests.attention.backends.cases import CASES, check
from tests.attention.backends.fake_kernels import (
    FakeFlash2,
    FakeFlash2Old,
    FakeFlash3,
    FakeFlash4,
    FakeFlash4Early,
)
from tests.sweeps import turn

PAIRS = [
    (FlashAttention2, FakeFlash2),
    (FlashAttention2, FakeFlash2Old),
    (FlashAttention3, FakeFlash3),
    (FlashAttention4, FakeFlash4),
]


@pytest.mark.parametrize(
    ("pair", "case", "softcap"),
    [
        (pair, case, softcap)
        for index, case in enumerate(CASES)
        for pair in turn(PAIRS, 2, index)
        for softcap in turn([None, 2.0], 2, index // 2)
    ],
)
def test_matches_oracle(pair, case, softcap):
    (backend, package), (rows, keys, band) = pair, case
    check(backend(interface=package), band, rows=rows, keys=keys, softcap=softcap)


@pytest.mark.parametrize(("backend", "package"), PAIRS)
def test_pads_values(backend, package):
    check(backend(interface=package), CausalBand(5, 4), rows=6, keys=11, v_head_size=5)


def test_a_release_that_lacks_what_is_unused_serves():
    check(FlashAttention4(interface=FakeFlash4Early), CausalBand(5), rows=6, keys=11)


def test_a_release_that_lacks_what_is_used_says_so():
    backend = FlashAttention4(interface=FakeFlash4Early)
    with pytest.raises(TypeError, match="_flash_attn_bwd does not know window_size_left=2"):
        check(backend, CausalBand(5, 3), rows=6, keys=11)


@pytest.mark.parametrize("backend", [FlashAttention2, FlashAttention3, FlashAttention4])
def test_says_what_it_cannot(backend, monkeypatch):
    settings = {"qk_head_size": 64, "v_head_size": 64, "softcap": True}
    good = AttentionSpec(device_type="cuda", dtype=torch.float16, **settings)
    monkeypatch.setattr(backend, "module_name", "no_such_package.kernels")
    assert "is not installed (package flash-attn" in backend().reason_unsupported(good)
    assert backend(interface=FakeFlash2).reason_unsupported(good) is None
    wide = AttentionSpec(device_type="cuda", dtype=torch.float32, **settings)
    assert "float32" in backend().reason_unsupported(wide)
    cpu = AttentionSpec(device_type="cpu", dtype=torch.float16, **settings)
    assert "CUDA" in backend().reason_unsupported(cpu)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("import sys; sys.no_such_name", "AttributeError: module 'sys' has no"),
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
    ],
)
def test_a_package_that_cannot_be_imported_says_why(line, what, monkeypatch, tmp_path):
    (tmp_path / "broken_kernels").mkdir()
    (tmp_path / "broken_kernels" / "__init__.py").write_text(line)
    (tmp_path / "broken_kernels" / "interface.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(FlashAttention4, "module_name", "broken_kernels.interface")
    asked = AttentionSpec(device_type="cuda", dtype=torch.float16, qk_head_size=64, v_head_size=64)
    reason = FlashAttention4().reason_unsupported(asked)
    assert reason.startswith(f"cannot be imported (package flash-attn-4; {what}")
