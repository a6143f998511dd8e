"""Profiles that are shipped, kept, derived, or traced; a tracer that counts stands for torch."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sppo_hf.errors import ConfigError
from sppo_hf.planning.config_file import load_config, shipped_models
from sppo_hf.planning.model_profile import (
    LoraShape,
    ModelProfile,
    Training,
    config_digest,
    find_profile,
    profiles_from_json,
    profiles_to_json,
    shipped_profiles,
)
from tests.planning.shapes import by_hand, llama_config

HALF = Training(dtype_bytes=2, parameter_bytes=2)
LORA = replace(HALF, lora=LoraShape(rank=16))


class Tracer:
    """Counts the profiles that it makes."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, config: object, training: Training) -> ModelProfile:
        self.calls += 1
        return by_hand(config, training)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path


def kept(home: Path) -> list[Path]:
    return list((home / "sppo_hf" / "models").glob("*.json"))


def test_a_shipped_model_is_not_traced() -> None:
    trace = Tracer()
    for name in shipped_models():
        profile = find_profile(load_config(name), HALF, trace)
        assert profile.training == HALF
    assert trace.calls == 0


def test_what_was_traced_is_kept_for_the_next_process(home: Path) -> None:
    trace = Tracer()
    config = llama_config(num_hidden_layers=3)
    first = find_profile(config, LORA, trace)
    assert find_profile(config, LORA, trace) == first == by_hand(config, LORA)
    assert trace.calls == 1
    # Layers that are alike are one object once more.
    assert len({id(layer) for layer in find_profile(config, LORA, trace).layers}) == 2
    find_profile(config, HALF, trace)
    assert (trace.calls, len(kept(home))) == (2, 2)


@pytest.mark.parametrize("text", ["{", "{}", '{"format": 99}', "[]"])
def test_a_damaged_file_is_made_anew(text: str, home: Path) -> None:
    trace = Tracer()
    first = find_profile(llama_config(), HALF, trace)
    kept(home)[0].write_text(text)
    assert find_profile(llama_config(), HALF, trace) == first
    assert trace.calls == 2
    assert json.loads(kept(home)[0].read_text())["profiles"]


def test_where_nothing_can_be_kept_it_is_traced_each_time(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("HF_HOME", str(home / "file"))
    trace = Tracer()
    assert find_profile(llama_config(), HALF, trace) == find_profile(llama_config(), HALF, trace)
    assert trace.calls == 2


class SlowTracer(Tracer):
    """Waits inside until it is let on."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.let_on = threading.Event(), threading.Event()

    def __call__(self, config: object, training: Training) -> ModelProfile:
        self.inside.set()
        assert self.let_on.wait(30)
        return super().__call__(config, training)


def test_of_several_that_ask_at_once_one_traces(home: Path) -> None:
    slow, other, found = SlowTracer(), Tracer(), list[ModelProfile]()

    def ask(trace: Tracer) -> None:
        found.append(find_profile(llama_config(), HALF, trace))

    first = threading.Thread(target=ask, args=(slow,))
    first.start()
    assert slow.inside.wait(30)
    others = [threading.Thread(target=ask, args=(other,)) for _ in range(2)]
    for thread in others:
        thread.start()
    time.sleep(0.2)
    assert not found, "the others wait"
    slow.let_on.set()
    for thread in (first, *others):
        thread.join(30)
    assert (slow.calls, other.calls, len(found)) == (1, 0, 3)
    assert not list((home / "sppo_hf" / "models").glob("*.lock"))


def test_nobody_waits_for_ever_for_one_that_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sppo_hf.planning.model_profile._TRACED_WITHIN_SECONDS", 0.1)
    slow, other = SlowTracer(), Tracer()
    stuck = threading.Thread(target=find_profile, args=(llama_config(), HALF, slow))
    stuck.start()
    assert slow.inside.wait(30)
    find_profile(llama_config(), HALF, other)
    assert other.calls == 1
    slow.let_on.set()
    stuck.join(30)


def test_other_versions_have_other_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Tracer()
    find_profile(llama_config(), HALF, trace)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "99.0")
    find_profile(llama_config(), HALF, trace)
    assert trace.calls == 2


def test_the_digest_is_of_what_matters() -> None:
    digest = config_digest(llama_config())
    for field in ("transformers_version", "torch_dtype", "bos_token_id", "_name_or_path"):
        assert config_digest(llama_config(**{field: "x"})) == digest
    assert config_digest(llama_config(num_attention_heads=16)) != digest
    inner = {"text_config": llama_config(hidden_size=8)}
    assert config_digest(SimpleNamespace(**inner)) != config_digest(
        SimpleNamespace(text_config=llama_config())
    )


def test_ranks_between_two_are_on_their_line() -> None:
    config: Any = llama_config(num_hidden_layers=3)
    digest = config_digest(config)
    known = tuple(by_hand(config, replace(HALF, lora=LoraShape(rank=r))) for r in (8, 16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sppo_hf.planning.model_profile.shipped_profiles", lambda: {digest: known})
        trace = Tracer()
        for rank in (1, 12, 512):
            training = replace(HALF, lora=LoraShape(rank=rank))
            assert find_profile(config, training, trace) == by_hand(config, training)
        assert trace.calls == 0
        # At an eighth of the width products over the rank begin to be kept.
        find_profile(config, replace(HALF, lora=LoraShape(rank=513)), trace)
        find_profile(config, replace(HALF, lora=LoraShape(rank=8, dtype_bytes=2)), trace)
        assert trace.calls == 2


def test_profiles_survive_the_file() -> None:
    for digest, profiles in shipped_profiles().items():
        assert profiles_from_json(profiles_to_json(digest, profiles)) == (digest, profiles)


def test_targets_by_name_or_all() -> None:
    some = LoraShape(rank=8, targets=("q_proj", "v_proj"))
    assert some.adapts("q_proj")
    assert not some.adapts("o_proj")
    everything = LoraShape(rank=8)
    assert everything.adapts("o_proj")
    # A product that is no module has no name.
    assert not everything.adapts("")


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"rank": 0}, "rank is 0"), ({"rank": 8, "targets": "q_proj"}, "'q_proj'; give")],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoraShape(**settings)
