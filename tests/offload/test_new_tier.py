"""A tier is one class and one decorator: here memory compressed by zlib, behind the host.

`ZipTier` is all there is of it. With nothing else changed it is planned with, trained with, spilled
to, and its failures are clear.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from sppo_hf.cli import app
from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.errors import BudgetError, ConfigError, OffloadError
from sppo_hf.integrations.plugin import SPPOPlugin
from sppo_hf.offload.engine import OffloadEngine, make_engine
from sppo_hf.offload.store import Bytes, Slot, Store, TierSpace
from sppo_hf.planning.activation_modes import mode_of
from sppo_hf.planning.feasibility import PlanResult, assess_request, timeline_of
from sppo_hf.planning.hardware import HardwareProfile
from sppo_hf.planning.memory import Cause
from sppo_hf.planning.plan import Plan
from sppo_hf.planning.tiers import TIERS, TierModel, register_tier
from sppo_hf.testing.exactness import compare
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch
from tests.engine.forced_plans import change_plans, force_modes
from tests.offload.disk_store import DiskStore
from tests.offload.small_stack import TOKENS, WIDTH, assert_same, gradients_of, loss_of, make_blocks
from tests.planning.questions import GIB, question


class ZipSpace(TierSpace):
    """Compressed bytes in host memory."""

    def write(self, place: Slot, source: Bytes, on_moved: Callable[[int], None]) -> None:
        place.held = zlib.compress(source.data, 1)

    def read(self, place: Slot, target: Bytes, on_moved: Callable[[int], None]) -> None:
        target[:] = np.frombuffer(zlib.decompress(place.held), np.uint8)


class ZipTier(TierModel):
    called = "compressed memory"
    colour = "#009E73"
    remedy = "Raise zip in more_tiers, or shorten the sequences."
    spaces: list[ZipSpace]

    def store_rate(self, profile: HardwareProfile) -> float:
        return 2e9

    def load_rate(self, profile: HardwareProfile) -> float:
        return 4e9

    def open(self, config: SPPOConfig, budget_bytes: int | None) -> TierSpace:
        self.spaces.append(ZipSpace(self, budget_bytes))
        return self.spaces[-1]


@pytest.fixture
def zipped() -> Iterator[ZipTier]:
    register_tier("zip")(ZipTier)
    tier: ZipTier = TIERS["zip"]
    tier.spaces = []
    yield tier
    TIERS.remove("zip")


def test_the_registry_is_left_as_it_was(zipped: ZipTier) -> None:
    assert TIERS.names() == tuple(TIERS) == ("device", "host", "disk", "zip")
    TIERS.remove("zip")
    assert TIERS.names() == tuple(TIERS) == ("device", "host", "disk")
    with pytest.raises(ConfigError, match=r"more_tiers is 'zip'.*none.*import the module"):
        SPPOConfig(more_tiers="zip")
    register_tier("zip", distance=1.5)(ZipTier)
    assert TIERS.names() == tuple(TIERS) == ("device", "host", "zip", "disk")


@pytest.mark.usefixtures("zipped")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"more_tiers": "zap=8GiB"}, r"Allowed: names of registered tiers .*: 'zip'"),
        ({"more_tiers": "disk=8GiB"}, "without settings of their own: 'zip'"),
        ({"more_tiers": "zip=8GB, zip=8Gi"}, r"more_tiers \(zip\) is '8Gi'"),
        ({"more_tiers": "zip=8"}, r"more_tiers \(zip\) is 8 .*8GiB"),
        ({"offload_tier": "zip"}, "offload_tier='zip' needs more_tiers, but that is None"),
        ({"offload_tier": "disk"}, "offload_tier='disk' needs offload_dir, but that is None"),
    ],
)
def test_its_settings_are_checked(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SPPOConfig(**settings)


def test_its_budget_is_read(zipped: ZipTier) -> None:
    config = SPPOConfig(more_tiers="zip=8GiB", offload_tier="zip")
    assert zipped.named(config) == "8GiB"
    assert SPPOConfig.from_dict(config.to_dict()) == config
    assert zipped.with_budget(config, 2**20).more_tiers == "zip=1048576"
    assert zipped.with_budget(config, None).more_tiers == "zip"
    assert zipped.with_budget(SPPOConfig(), None).more_tiers == "zip"


# -- planning --------------------------------------------------------------------------------


def _planned(**settings: Any) -> PlanResult:
    tight = {"recompute": "none", "offload_kv": "none", "host_memory": "4GiB"}
    return assess_request(question(16_384, **tight, **settings))


@pytest.mark.usefixtures("zipped")
def test_it_is_planned_with_where_host_memory_is_short() -> None:
    without = _planned()
    assert without.plan is None
    assert 0 < without.enough["zip"] < 256 * GIB
    found = _planned(more_tiers="zip=256GiB")
    assert found.plan is not None
    assert found.budgets.of("zip") == 256 * GIB
    assert {mode.tier for row in found.plan.layer_modes for mode in row} > {"zip"}
    held = found.plan.estimate.of("zip").total
    timeline = timeline_of(found.plan)
    assert timeline.peak("zip").num_bytes == held > 0
    assert timeline.busy_seconds("zip write") == pytest.approx(held / 2e9)
    assert timeline.busy_seconds("zip read") == pytest.approx(held / 4e9)


@pytest.mark.usefixtures("zipped")
def test_each_tier_behind_the_host_has_a_staging_region() -> None:
    both = _planned(more_tiers="zip=256GiB", offload_dir="/fast", disk_memory="24GiB").plan
    assert both is not None
    tiers = {mode.tier for row in both.layer_modes for mode in row}
    assert tiers >= {"disk", "zip"}
    assert both.program().standing["host"][Cause.COPIES] == 2 * both.staging_bytes


@pytest.mark.usefixtures("zipped")
def test_the_command_line_shows_it() -> None:
    words = ["plan", "llama-3.1-8b", "--seq-len", "16K", "--lora", "16", "--recompute", "none"]
    words += ["--device-memory", "40GiB", "--host-memory", "4GiB", "--more-tiers", "zip=256GiB"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "zip memory" in shown.output
    assert "to zip" in shown.output


# -- training --------------------------------------------------------------------------------

STEP: dict[str, Any] = {"num_chunks": 3, "min_offload_size": 1, "show_plan": False}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("order", ["by_layer", "by_chunk"])
def test_training_is_exact(zipped: ZipTier, order: str, recompute: str) -> None:
    config = SPPOConfig(
        **STEP,
        order=order,
        recompute=recompute,
        offload="full",
        offload_kv="full",
        offload_tier="zip",
        more_tiers="zip=64MiB",
    )
    report = compare(build_tiny_model("llama"), make_batch(rows=2, tokens=50), config)
    assert report.exact, report
    assert zipped.spaces, "a store was opened"
    assert not any(space.reserved_bytes for space in zipped.spaces), "and is empty again"


@pytest.mark.usefixtures("zipped")
def test_the_trace_of_a_step_names_each_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_modes(monkeypatch, lambda chunk, layer: mode_of("inputs", ("zip", "disk")[layer % 2]))
    (tmp_path / "disk").mkdir()
    folders = {"offload_dir": str(tmp_path / "disk"), "trace_dir": str(tmp_path / "did")}
    model = convert(
        build_tiny_model("llama"), SPPOConfig(**STEP, **folders, more_tiers="zip=64MiB")
    )
    model(**make_batch(tokens=50)).loss.backward()
    events = json.loads((tmp_path / "did" / "rank0.trace.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [(rows[e["tid"]], e["name"]) for e in events if e["ph"] == "X"]
    assert {name for row, name in spans if row == "zip write"} >= {"0S0.0", "0S0.2"}
    assert {name for row, name in spans if row == "disk read"} == {"0L0.1", "0L1.1", "0L2.1"}


def test_training_with_host_disk_and_zip_at_once_is_exact(
    zipped: ZipTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = ("device", "zip", "host", "disk")

    def forced(plan: Plan) -> Plan:
        rows = tuple(
            tuple(mode_of("whole", tiers[(chunk + layer) % 4]) for layer in range(plan.num_layers))
            for chunk in range(plan.num_chunks)
        )
        return dataclasses.replace(plan, layer_modes=rows)

    change_plans(monkeypatch, forced)
    config = SPPOConfig(**STEP, more_tiers="zip", offload_dir=str(tmp_path), disk_memory="64MiB")
    model = build_tiny_model("llama", num_hidden_layers=4)
    report = compare(model, make_batch(tokens=50), config)
    assert report.exact, report


def test_the_plugin_takes_it_and_its_bytes_are_counted(zipped: ZipTier) -> None:
    plugin = SPPOPlugin(SPPOConfig(**STEP, offload="full", offload_tier="zip", more_tiers="zip"))
    model = build_tiny_model("llama").train()
    convert(model, plugin.config)
    model(**make_batch(tokens=50)).loss.backward()
    engine = get_engine(model)
    assert engine is not None
    stats = engine.offload.stats()
    assert stats.disk_write_bytes > 0
    assert stats.live_handles == 0


# -- the next tier, and failures -------------------------------------------------------------


def _engine(zipped: ZipTier, folder: Path, *, zip_bytes: int | None = None) -> OffloadEngine:
    """An engine with room for some tensors on the host, for some on the disk, and a zip tier."""
    disk = DiskStore(folder, slab_bytes=2**13, budget_bytes=2**13)
    zip_store = Store("zip", zipped.open(SPPOConfig(), zip_bytes))
    return make_engine(
        torch.device("cpu"),
        min_offload_elements=8,
        slab_bytes=2**12,
        budget_bytes=2 * 2**16 + 2**12,
        stores=[disk, zip_store],
        staging_bytes=2**16,
    )


def test_what_finds_no_space_goes_to_the_next_tier(zipped: ZipTier, tmp_path: Path) -> None:
    engine = _engine(zipped, tmp_path)
    values = [torch.rand(1024) for _ in range(8)]
    handles = [engine.start_offload(value.clone()) for value in values]
    held = [handle.stored().tier.name for handle in handles]
    assert held == ["host"] + ["disk"] * 2 + ["zip"] * 5
    assert engine.stats().spilled_bytes == 7 * 4096
    assert engine.reserved_bytes == {"host": 0, "disk": 2**13, "zip": 5 * 4096}
    for handle, value in zip(handles, values, strict=True):
        assert torch.equal(engine.wait_for(handle), value)
        engine.release(handle)
    engine.assert_drained()
    assert_same(gradients_of(make_blocks(), engine), gradients_of(make_blocks(), None))
    engine.close()


def test_when_the_last_tier_is_full_the_step_is_refused_and_the_next_runs(
    zipped: ZipTier, tmp_path: Path
) -> None:
    engine = _engine(zipped, tmp_path, zip_bytes=2**13)
    blocks, hidden_CD = make_blocks(6), torch.rand(TOKENS * 8, WIDTH)
    with pytest.raises(BudgetError, match=r"zip tier: \d+ bytes more.*8192.*Raise zip"):
        loss_of(blocks, hidden_CD, engine)
    engine.abandon()
    engine.assert_drained()
    assert_same(gradients_of(make_blocks(1), engine), gradients_of(make_blocks(1), None))
    engine.close()


@pytest.mark.parametrize("fails", ["write", "read"])
@pytest.mark.parametrize("error", [OSError(5, "as injected"), zlib.error("as injected")], ids=type)
def test_a_failed_transfer_names_the_tier_and_nothing_hangs(
    zipped: ZipTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, error: Exception
) -> None:
    threads_before = set(threading.enumerate())
    engine = _engine(zipped, tmp_path)
    blocks, hidden_CD = make_blocks(6), torch.rand(TOKENS, WIDTH)

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(ZipSpace, fails, fail)
        with pytest.raises(OffloadError, match=r"zip tier: .*as injected"):
            loss_of(blocks, hidden_CD, engine, tiers=("zip", "disk")).backward()
        engine.abandon()
    loss_of(blocks, hidden_CD, engine, tiers=("zip", "disk")).backward()
    engine.assert_drained()
    engine.close()
    assert not any(space.reserved_bytes for space in zipped.spaces)
    assert set(threading.enumerate()) <= threads_before
