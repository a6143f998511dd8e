"""Choosing a backend, and the words it is explained with."""

import logging

import pytest
import torch

from sppo_hf.attention.backends import select
from sppo_hf.attention.backends.base import AttentionSpec
from sppo_hf.attention.backends.select import select_backend
from sppo_hf.errors import ConfigError
from tests.attention.backends.cases import deterministic


def requirement(**changes):
    settings = {"device_type": "cpu", "dtype": torch.float32, "qk_head_size": 64, "v_head_size": 64}
    return AttentionSpec(**settings | changes)


@pytest.fixture
def verdicts(monkeypatch):
    """What checking says per backend name; on no device. None is approval."""
    table: dict[str, str | None] = {}
    tried: list[str] = []

    def find_mismatch(backend, requirement, device):
        tried.append(backend.name)
        return table.get(backend.name)

    monkeypatch.setattr(select, "find_mismatch", find_mismatch)
    monkeypatch.setattr(
        "sppo_hf.attention.backends.flash_attn._is_installed",
        lambda module_name: module_name == "flash_attn.flash_attn_interface",
    )
    select._find_on_device.cache_clear()
    yield table, tried
    select._find_on_device.cache_clear()


def test_auto_on_the_cpu():
    selection = select_backend("auto", requirement())
    assert selection.backend.name == "cpu_flash"
    assert selection.reason == "cpu_flash: CPU, float32, head size 64; reference not needed"


def test_auto_falls_back_to_the_reference_and_says_why():
    selection = select_backend("auto", requirement(softcap=True))
    assert selection.backend.name == "reference"
    assert selection.reason == (
        "reference: CPU, float32, head size 64, soft-capped scores; "
        "cpu_flash cannot soft-cap scores"
    )


def test_auto_on_an_unknown_device():
    selection = select_backend("auto", requirement(device_type="mps"))
    assert selection.reason == "reference: MPS, float32, head size 64; no fused kernel for mps"


def test_auto_without_any_backend():
    with pytest.raises(ConfigError, match="no attention backend"):
        select_backend("auto", requirement(dtype=torch.int64))


def test_named():
    selection = select_backend("reference", requirement())
    assert selection.backend.name == "reference"
    assert selection.reason == "reference: asked for by name; CPU, float32, head size 64"


def test_named_but_unable_says_which_can():
    with pytest.raises(ConfigError) as caught:
        select_backend("flash_attention_2", requirement())
    assert str(caught.value) == (
        "attention_backend='flash_attention_2' cannot serve CPU, float32, head size 64: "
        "it runs on CUDA, not on cpu. Backends that can: cpu_flash, reference; "
        "or set attention_backend='auto'"
    )


def test_unknown_name():
    with pytest.raises(ConfigError, match="did you mean 'flash_attention_2'"):
        select_backend("flash_attention2", requirement())


def test_auto_takes_the_first_that_is_right(verdicts, caplog):
    table, tried = verdicts
    table["flash_attention_2"] = "differs from the reference in dQ"
    with caplog.at_level(logging.INFO, logger="sppo_hf"):
        selection = select_backend("auto", requirement(device_type="cuda", dtype=torch.bfloat16))
    assert selection.backend.name == "aten_flash"
    assert "flash_attention_3 is not installed" in selection.reason
    assert "flash_attention_2 differs from the reference in dQ" in selection.reason
    assert "flash_attention_2 passed over: it differs from the reference in dQ" in caplog.text
    assert tried == ["flash_attention_2"] * 4 + ["aten_flash"]


def test_auto_takes_what_builds_a_kernel_for_every_shape_last_where_lengths_vary(verdicts):
    table, tried = verdicts
    half = {"device_type": "cuda", "dtype": torch.float16}
    for wrong in ("flash_attention_2", "aten_flash"):
        table[wrong] = "is wrong"
    assert select_backend("auto", requirement(**half)).backend.name == "cudnn"
    varied = select_backend("auto", requirement(**half, varied=True))
    assert varied.backend.name == "efficient"
    assert "varied lengths" in varied.reason
    assert tried.count("cudnn") == 1, "what is right for equal lengths is so for others"
    table["efficient"] = "is wrong"
    select._find_on_device.cache_clear()
    assert select_backend("auto", requirement(**half, varied=True)).backend.name == "cudnn"
    # By name it is the user's choice.
    assert select_backend("cudnn", requirement(**half, varied=True)).backend.name == "cudnn"


def test_checking_happens_once_per_requirement(verdicts):
    _, tried = verdicts
    asked = requirement(device_type="cuda", dtype=torch.bfloat16)
    first, second = select_backend("auto", asked), select_backend("auto", asked)
    assert first.backend is second.backend
    assert tried == ["flash_attention_2"]
    select_backend("auto", requirement(device_type="cuda", dtype=torch.float16))
    assert tried == ["flash_attention_2"] * 2


def test_what_was_found_before_determinism_was_asked_for_does_not_hold(verdicts):
    _, tried = verdicts
    asked = requirement(device_type="cuda", dtype=torch.bfloat16)
    assert select_backend("cudnn", asked).backend.name == "cudnn"
    with deterministic("error"):
        with pytest.raises(ConfigError, match="it has no deterministic backward"):
            select_backend("cudnn", asked)
    assert select_backend("cudnn", asked).backend.name == "cudnn"
    assert tried.count("cudnn") == 1


def test_a_named_backend_that_is_wrong_is_refused(verdicts):
    table, _ = verdicts
    table["cudnn"] = "raised RuntimeError"
    with pytest.raises(ConfigError, match="it raised RuntimeError") as caught:
        select_backend("cudnn", requirement(device_type="cuda", dtype=torch.bfloat16))
    assert "aten_flash, efficient, flash_attention_2, reference;" in str(caught.value)


def test_a_variant_steps_in(verdicts, monkeypatch):
    def only_repeated(backend, requirement, device):
        return "raised RuntimeError" if backend.needs.grouped_heads else None

    monkeypatch.setattr(select, "find_mismatch", only_repeated)
    asked = requirement(device_type="cuda", dtype=torch.bfloat16, gqa_ratio=4)
    backend = select_backend("aten_flash", asked).backend
    assert not backend.needs.grouped_heads


def test_the_cpu_is_not_checked(verdicts):
    _, tried = verdicts
    select_backend("cpu_flash", requirement())
    assert tried == []


def test_config_and_backends_know_the_same_names():
    from sppo_hf.config import SPPOConfig

    for name in ("auto", *select.BACKENDS):
        assert SPPOConfig(attention_backend=name).attention_backend == name
