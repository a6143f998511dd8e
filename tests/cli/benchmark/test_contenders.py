"""Names of contenders, and what they need to run."""

import pytest

from sppo_hf.cli.benchmark import contenders
from sppo_hf.cli.benchmark.contenders import BASES, DEFAULTS, parse, parse_list
from sppo_hf.errors import ConfigError


def test_names_are_parsed() -> None:
    for name in DEFAULTS:
        assert parse(name).name == name
    assert parse("sppo-auto").offload == "auto"
    assert parse("plain+liger").liger
    assert parse("plain").offload is None
    assert parse("checkpointing+tiled").tiled
    assert parse("checkpointing-default+tiled").tiled
    assert parse("ideal").tiled
    assert parse("ideal+liger").tiled
    assert not parse("checkpointing").tiled
    assert set(BASES) <= set(DEFAULTS)


@pytest.mark.parametrize(
    "name",
    [
        *("chekpointing", "ideal+tiled", "plain+", "plain+apex", "", "sppo"),
        *("plain+tiled", "sppo-auto+tiled", "checkpointing-default+liger"),
    ],
)
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"nearest name, '"):
        parse(name)


def test_lists() -> None:
    assert parse_list("plain, ideal,plain") == ("plain", "ideal")
    assert parse_list(" all ") == DEFAULTS
    with pytest.raises(ConfigError, match="empty"):
        parse_list(" , ")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"peft"}
    monkeypatch.setattr(contenders, "find_spec", lambda name: name in installed or None)
    assert parse("plain").unavailable(lora=False, device="cuda") is None
    assert parse("plain").unavailable(lora=True, device="cuda") is None
    liger = parse("sppo-auto+liger").unavailable(lora=True, device="cuda")
    assert liger == "liger-kernel is not installed"
    installed.add("liger_kernel")
    liger = parse("plain+liger").unavailable(lora=True, device="cuda")
    assert liger == "triton is not installed"
    for name in ("trl-offload", "trl-long"):
        assert parse(name).unavailable(lora=True, device="cuda") == "trl is not installed"
    assert parse("unsloth").unavailable(lora=True, device="cuda") == "unsloth is not installed"
    installed.add("unsloth")
    assert parse("unsloth").unavailable(lora=True, device="cuda") is None
    assert parse("alst").unavailable(lora=True, device="cuda") == "deepspeed is not installed"
    for device in ("cuda", "cpu"):
        assert "several GPUs" in (
            parse("accelerate-cp").unavailable(lora=True, device=device) or ""
        )
    assert "adapters" in (parse("unsloth").unavailable(lora=False, device="cuda") or "")
    installed.clear()
    assert parse("plain").unavailable(lora=True, device="cuda") == "peft is not installed"


def test_who_offloads_needs_something_to_offload_from() -> None:
    for name in ("checkpointing-offload", "trl-offload+liger", "trl-long", "unsloth", "alst"):
        assert "accelerator" in (parse(name).unavailable(lora=True, device="cpu") or "")
