"""Choosing a backend by name, by order and by speed, and the reason that is given."""

import functools
import logging

import pytest
import torch

from sppo_hf.attention.backends import select
from sppo_hf.attention.backends.autotune import Workload, autotune
from sppo_hf.attention.backends.base import AttentionSpec
from sppo_hf.attention.backends.flash_attn import (
    FlashAttention2,
    FlashAttention3,
    FlashAttention4,
)
from sppo_hf.attention.backends.select import select_backend
from sppo_hf.errors import ConfigError
from tests.attention.backends.cases import deterministic
from tests.attention.backends.racers import FakeClock, Racer, raising


def requirement(**changes):
    settings = {"device_type": "cpu", "dtype": torch.float32, "qk_head_size": 64, "v_head_size": 64}
    return AttentionSpec(**settings | changes)


@pytest.fixture
def verdicts(monkeypatch):
    """Mismatch by backend name, None where it agrees; and the names that were compared."""
    table: dict[str, str | None] = {}
    tried: list[str] = []

    def find_mismatch(backend, requirement, device):
        tried.append(backend.name)
        return table.get(backend.name)

    monkeypatch.setattr(select, "find_mismatch", find_mismatch)
    monkeypatch.setattr(FlashAttention2, "module_name", "sys")  # stands for one that is installed
    for absent in (FlashAttention3, FlashAttention4):
        monkeypatch.setattr(absent, "module_name", "no_such_package.kernels")
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


class Track:
    """Fake backends a, b, c on a clock of their own, with the CPU as device; notes the timings."""

    def __init__(self, monkeypatch):
        self.clock = FakeClock()
        self.racers = {
            name: Racer(name, self.clock, seconds)
            for name, seconds in (("a", 0.02), ("b", 0.01), ("c", 0.03))
        }
        self.races = []
        self.mismatches = {}
        for name, racer in self.racers.items():
            monkeypatch.setitem(select.BACKENDS, name, (lambda racer=racer: racer,))
        monkeypatch.setitem(select.AUTO_ORDER, "cpu", tuple(self.racers))
        monkeypatch.setattr(select, "AUTOTUNED_DEVICE_TYPES", {"cpu"})
        monkeypatch.setattr(select, "VERIFIED_DEVICE_TYPES", {"cpu"})
        monkeypatch.setattr(
            select, "find_mismatch", lambda backend, *_: self.mismatches.get(backend.name)
        )
        monkeypatch.setattr(select, "autotune", self.run)

    def run(self, backends, asked, device):
        self.races.append([backend.name for backend in backends])
        load = Workload(requirement=asked, query_heads=4, chunk_tokens=8, prefix_tokens=16)
        return autotune(backends, asked, device, load=load, clock=self.clock)

    def forget(self):
        """Clear what this process remembers, as in a new process."""
        select._find_on_device.cache_clear()
        select._autotuned.cache_clear()


@pytest.fixture
def track(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    track = Track(monkeypatch)
    track.forget()
    yield track
    track.forget()


def taken(asked=None):
    return select_backend("auto", asked or requirement()).backend.name


def test_the_fastest_wins_and_the_reason_has_the_numbers(track):
    selection = select_backend("auto", requirement())
    assert selection.backend is track.racers["b"]
    load = Workload(requirement=requirement(), query_heads=4, chunk_tokens=8, prefix_tokens=16)
    speed = 3.5 * load.forward_flops / 1e12
    assert selection.reason == (
        f"b: {speed / 0.01:.3g} TFLOPS at 8 x 16, a {speed / 0.02:.3g}, c {speed / 0.03:.3g}; "
        "CPU, float32, head size 64"
    )


def test_where_lengths_vary_the_fastest_that_builds_nothing_for_a_shape_wins(track):
    track.racers["b"].plans_each_shape = True
    assert taken() == "b"
    assert taken(requirement(varied=True)) == "a"
    assert len(track.races) == 1, "the race is the same"


def test_equal_ones_keep_the_listed_order(track):
    track.racers["a"].seconds = 0.0101
    assert taken() == "a"


def test_one_that_fails_is_passed_over_with_its_reason(track, caplog):
    track.racers["b"].fails = raising(RuntimeError("no such kernel"))
    with caplog.at_level(logging.WARNING, logger="sppo_hf"):
        selection = select_backend("auto", requirement())
    assert selection.backend.name == "a"
    assert selection.reason.endswith("b raised RuntimeError when timed: no such kernel")
    assert "attention backend b raised RuntimeError" in caplog.text


def test_one_that_is_wrong_does_not_race(track):
    track.mismatches["b"] = "differs from the reference in dQ"
    selection = select_backend("auto", requirement())
    assert selection.backend.name == "a"
    assert track.races == [["a", "c"]]
    assert selection.reason.endswith("b differs from the reference in dQ")


def test_all_may_fail_and_the_order_decides(track):
    for racer in track.racers.values():
        racer.fails = raising(torch.OutOfMemoryError())
    assert taken() == "a"
    assert taken() == "a"
    assert len(track.races) == 1


def test_timed_once_in_a_process(track):
    for _ in range(3):
        assert taken() == "b"
    assert track.races == [["a", "b", "c"]]
    assert taken(requirement(dtype=torch.float64)) == "b"
    assert len(track.races) == 2


def test_timed_again_where_determinism_is_asked_for(track):
    assert taken() == "b"
    with deterministic("error"):
        track.racers["a"].seconds = 0.001
        assert taken() == "a"
    assert taken() == "b"
    assert len(track.races) == 2


def test_timed_once_on_a_machine(track):
    first = select_backend("auto", requirement())
    track.forget()
    track.racers["b"].seconds = 9.0
    again = select_backend("auto", requirement())
    assert len(track.races) == 1
    assert again == first


def test_a_race_that_ran_out_of_memory_is_run_again_by_the_next_process(track):
    track.racers["b"].fails = raising(torch.OutOfMemoryError())
    assert taken() == "a"
    track.forget()
    track.racers["b"].fails = lambda: None
    assert taken() == "b"
    assert len(track.races) == 2


def test_another_process_was_first(track, monkeypatch):
    """Two ranks race at once; both take what the first of them published."""
    publish = select.publish_autotune

    def second(path, result):
        with monkeypatch.context() as other:
            other.setattr(select, "publish_autotune", publish)
            track.racers["a"].seconds, track.racers["b"].seconds = 0.001, 0.01
            select._autotuned.__wrapped__(requirement(), "cpu", 0)
        return publish(path, result)

    monkeypatch.setattr(select, "publish_autotune", second)
    assert taken() == "a"
    assert len(track.races) == 2


def test_a_winner_that_is_wrong_here_is_passed_over(track, caplog):
    assert taken() == "b"
    track.forget()
    track.mismatches["b"] = "raised RuntimeError"
    with caplog.at_level(logging.WARNING, logger="sppo_hf"):
        assert taken() == "a"
    assert "b was the fastest when timed, but it raised RuntimeError" in caplog.text


def test_one_alone_does_not_race(track):
    track.mismatches.update(b="differs", c="differs")
    selection = select_backend("auto", requirement())
    assert selection.backend.name == "a"
    assert track.races == []
    assert selection.reason == "a: CPU, float32, head size 64; reference not needed"


def test_a_name_is_never_timed(track):
    for name in "abc":
        assert select_backend(name, requirement()).backend.name == name
    track.mismatches["a"] = "differs"
    track.forget()
    with pytest.raises(ConfigError, match="it differs"):
        select_backend("a", requirement())
    assert track.races == []
    assert all(racer.forwards == 0 for racer in track.racers.values())


def test_on_a_cpu_nothing_races():
    assert "cpu" not in select.AUTOTUNED_DEVICE_TYPES
    assert "cuda" in select.AUTOTUNED_DEVICE_TYPES


def test_the_caller_is_left_as_it_was(track):
    """Choosing in the middle of a layer changes neither autograd, autocast nor random numbers."""
    seen = []

    def look(racer):
        torch.rand(3)
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    for racer in track.racers.values():
        racer.fails = functools.partial(look, racer)
    torch.manual_seed(4)
    state = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert taken() == "b"
    assert torch.equal(torch.get_rng_state(), state)
    assert set(seen) == {(False, False)}
