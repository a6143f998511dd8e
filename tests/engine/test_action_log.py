"""The logged actions of a step on one device are those of its plan's program, in its order."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.errors import ConfigError
from sppo_hf.planning.activation_modes import KEEP, ActivationMode, mode_of
from sppo_hf.schedule.actions import Action
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch
from tests.engine.forced_plans import change_plans, force_kv, force_modes
from tests.sweeps import turn

TOKENS = 40
LENGTHS = [9, 12, 8, 11]


def _mixed(chunk: int, layer: int) -> ActivationMode:
    return [
        KEEP,
        mode_of("whole", "host"),
        mode_of("inputs", "host"),
        mode_of("inputs", "device"),
    ][(3 * chunk + layer) % 4]


def _run(
    folder: Path, batch: dict[str, Any] | None = None, *, num_layers: int = 3, **settings: Any
) -> tuple[list[str], Any]:
    """The actions of a step that rank 0 wrote, and the step's plan."""
    model = build_tiny_model("llama", num_hidden_layers=num_layers).train()
    ways = {"chunk_lengths": LENGTHS, "hardware": "cpu", "min_offload_size": 1, "show_plan": False}
    ways["order"] = "by_chunk"
    convert(model, SPPOConfig(**{**ways, "trace_dir": str(folder), **settings}))
    batch = batch or make_batch(rows=1, tokens=TOKENS)
    engine = get_engine(model)
    rows, tokens = batch["input_ids"].shape
    with torch.enable_grad():
        # Before the step: gradients that are there afterwards may change the plan.
        plan = engine.plan(rows, tokens, torch.device("cpu"))
    model(**batch).loss.backward()
    engine.offload.assert_drained()
    return (folder / "rank0.actions").read_text().split(), plan


def _planned(plan: Any) -> list[str]:
    return [str(action) for action in plan.program().actions]


@pytest.mark.parametrize(
    ("saved", "order"),
    [
        (saved, order)
        for index, saved in enumerate(["whole", "matmuls", "inputs", "hidden"])
        for order in turn(["by_chunk", "by_layer"], 2, index)
    ],
)
def test_all_offloaded(
    saved: str, order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_modes(monkeypatch, lambda chunk, layer: mode_of(saved, "host"))
    ran, plan = _run(tmp_path, order=order)
    assert ran == _planned(plan)
    assert sum("H" in action for action in ran) == 12


@pytest.mark.parametrize("order", ["by_chunk", "by_layer"])
def test_modes_of_all_kinds(order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force_modes(monkeypatch, _mixed)
    ran, plan = _run(tmp_path, order=order)
    assert ran == _planned(plan)
    assert {"0D0.1", "0H0.1", "0B3.0"} <= set(ran)
    assert "0D0.0" not in ran


def test_keys_and_values_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force_modes(monkeypatch, lambda chunk, layer: mode_of("inputs", "host"))
    force_kv(monkeypatch, block_tokens=12)
    ran, plan = _run(tmp_path)
    assert ran == _planned(plan)
    assert {"0K3.2#0", "0O3.2#0", "0K3.2#1", "0O3.2#1"} <= set(ran)


@pytest.mark.parametrize("kv_modes", [("host", "device", "host"), ("recompute",) * 3])
def test_keys_of_whole_layers(
    kv_modes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_modes(monkeypatch, lambda chunk, layer: mode_of("inputs", "host"))
    change_plans(monkeypatch, lambda plan: dataclasses.replace(plan, kv_modes=kv_modes))
    ran, plan = _run(tmp_path, order="by_layer")
    assert ran == _planned(plan)
    assert {"0K3.0#0", "0K3.2#0"} <= set(ran)
    assert ("0O3.0#0" in ran) == (kv_modes[0] == "host")


@pytest.mark.parametrize("order", ["by_chunk", "by_layer"])
def test_a_prefetch_window_of_several_layers(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_modes(monkeypatch, lambda chunk, layer: mode_of("inputs", "host"))
    change_plans(monkeypatch, lambda plan: dataclasses.replace(plan, max_prefetch_bytes=2**14))
    ran, plan = _run(tmp_path, order=order)
    assert ran == _planned(plan)
    first_backward = next(at for at, action in enumerate(ran) if "B" in action)
    assert sum("H" in action for action in ran[:first_backward]) > 2


def test_the_last_rows_of_several_groups_begin_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every group of rows runs the program; its units count on, and backward runs the last first.

    Only for the last group are the first prefetches started before its backward.
    """
    force_modes(monkeypatch, _mixed)
    batch = make_batch(rows=3, tokens=TOKENS)
    ran, plan = _run(tmp_path, batch, micro_batch_size=1)
    listed = plan.program().actions
    forwards = [a for a in listed if a.kind in "FD"]
    backwards = [a for a in listed if a.kind in "HB"]
    expected = [a._replace(unit=a.unit + 4 * row) for row in range(3) for a in forwards]
    expected += [a._replace(unit=a.unit + 4 * row) for row in (2, 1, 0) for a in backwards]
    assert ran == [str(action) for action in expected]


def test_padding_leaves_chunks_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that do not run start no prefetches; those that run start theirs instead."""
    force_modes(monkeypatch, lambda chunk, layer: mode_of("inputs", "host"))
    batch = make_batch(rows=1, tokens=TOKENS, padding=[TOKENS - 15])
    ran, plan = _run(tmp_path, batch)
    assert ran == [text for text in _planned(plan) if Action.parse(text).unit < 2]


def test_evaluation_writes_nothing(tmp_path: Path) -> None:
    model = build_tiny_model("llama", num_hidden_layers=2).eval()
    settings = {"chunk_lengths": LENGTHS, "show_plan": False}
    convert(model, SPPOConfig(trace_dir=str(tmp_path / "new"), **settings))
    with torch.no_grad():
        model(**make_batch(rows=1, tokens=TOKENS))
    assert list((tmp_path / "new").iterdir()) == []


def test_the_trace_has_every_action_and_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_modes(monkeypatch, _mixed)
    ran, _ = _run(tmp_path)
    events = json.loads((tmp_path / "rank0.trace.json").read_text())["traceEvents"]
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    assert set(spans) == set(ran)
    resources = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert resources == {"compute", "d2h", "h2d"}
    assert all(spans[name]["dur"] > 0 for name in ran if Action.parse(name).kind in "FB")
    assert spans["0F0.0"]["ts"] < spans["0F3.2"]["ts"] < spans["0B3.2"]["ts"] < spans["0B0.0"]["ts"]


def test_a_folder_that_cannot_be_made_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = build_tiny_model("llama", num_hidden_layers=2)
    with pytest.raises(ConfigError, match=r"trace_dir='.*file' cannot be written: .*Remedy"):
        convert(model, SPPOConfig(trace_dir=str(tmp_path / "file")))


def test_layers_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of the disk do their work when they can; it is noted beside what it belongs to."""
    force_modes(monkeypatch, lambda chunk, layer: mode_of("inputs", "disk"))
    (tmp_path / "disk").mkdir()
    ran, plan = _run(tmp_path / "did", offload_dir=str(tmp_path / "disk"))
    assert ran == _planned(plan)
    assert {"0S0.0", "0L0.0", "0H0.0"} <= set(ran)


ON_HOST = (
    {"weights": "host", "order": "by_layer"},
    {"optimizer": "host", "order": "by_layer"},
    {"optimizer": "host", "order": "by_chunk"},
)


@pytest.mark.parametrize(
    ("num_layers", "num_chunks", "places"),
    [
        pytest.param(*sizes, places, id=" ".join((*map(str, sizes), *places)))
        for index, sizes in enumerate([(1, 4), (2, 1), (5, 4), (4, 1)])
        for places in turn(ON_HOST, 2, index)
    ],
)
def test_weights_on_the_host(
    num_layers: int,
    num_chunks: int,
    places: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    force_modes(monkeypatch, _mixed)
    lengths = LENGTHS if num_chunks == 4 else [TOKENS]
    ran, plan = _run(tmp_path, num_layers=num_layers, chunk_lengths=lengths, **places)
    assert [*ran, "0U0"] == _planned(plan)  # a plan does not list the optimizer's update
    kinds = [Action.parse(text).kind for text in ran]
    assert kinds.count("G") == num_layers + 1
    again = max(0, num_layers - 2) if "weights" in places else 0
    assert kinds.count("P") == num_layers + 1 + again
    program = plan.program()
    timeline = program.simulate(with_bytes=True)
    for tier in ("device", "host"):
        assert timeline.peak(tier).num_bytes == program.estimate.peak_bytes(tier) > 0
