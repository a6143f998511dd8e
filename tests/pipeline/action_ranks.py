"""A job for each rank: tiny pipelines whose ranks keep what they did in `trace_dir`.

The job holds `pp_size`, `out` (a folder) and `runs`: mappings of `name`, `settings`, `rows`,
`tokens`, `steps`, `evaluate`, `held` and `overrides` (of the model's config); each run's files lie
in the folder of its name, and with them what each rank told its observer. With `held` these
are joined by the bytes of keys, values and their sums before each compute, and by those planned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist

from sppo_hf.attention.kv_cache import LayerKV, StreamedKV, sum_dtype
from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import get_engine, revert
from sppo_hf.engine.device_facts import device_facts, whole_shape
from sppo_hf.engine.step_observer import StepObserver, StepRecord
from sppo_hf.pipeline.convert import convert_over_ranks
from sppo_hf.pipeline.pipeline_engine import PipelineEngine
from sppo_hf.pipeline.stage_plans import BatchPlans
from sppo_hf.pipeline.unit_tensors import UnitTensors
from sppo_hf.planning.choices import read_budgets
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.hardware import load_profile
from sppo_hf.planning.pipeline_cost import PipelineCost, extra_shared_unit_bytes
from sppo_hf.planning.plan import Plan
from sppo_hf.planning.prediction import MeasuredStep
from sppo_hf.schedule.actions import COMPUTE_KINDS, Action
from sppo_hf.schedule.generate import MSP, Size, generate
from sppo_hf.schedule.lower import lower
from sppo_hf.schedule.messages import messages
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch
from tests.pipeline.fork_server import leave_together
from tests.planning.modes import render_plan

TOKENS = 23


class EventRecorder(StepObserver):
    """Keeps the calls of this rank's engine to its observer."""

    def __init__(self) -> None:
        """Begin without records."""
        self.plans: list[dict[str, Any]] = []
        self.planned: list[float | None] = []
        self.written: list[int] = []
        self.corrections: list[dict[str, float]] = []

    def on_plan(self, plan: Plan, model_name: str) -> None:
        """Note the step that it is a part of."""
        assert plan.pipeline is not None, "all ranks agree on a step before it is shown"
        said = dataclasses.asdict(plan.pipeline)
        self.plans.append({**said, "name": model_name, "text": render_plan(plan, model_name)})

    def on_correction(self, before: Plan, after: Plan, measured: MeasuredStep) -> None:
        """Note seconds before and after."""
        assert before.prediction is not None
        assert after.prediction is not None
        self.corrections.append(
            {
                "before": before.prediction.step_seconds,
                "measured": measured.step_seconds,
                "after": after.prediction.step_seconds,
            }
        )

    def on_record(self, record: StepRecord) -> None:
        """Note what was predicted, and what went to the disk."""
        self.planned.append(record.planned_seconds)
        self.written.append(record.offload.disk_write_bytes)


class SharedUnitKV:
    """Bytes of keys, values and their sums on this rank, by tier and cause, between computes."""

    def __init__(self, engine: PipelineEngine) -> None:
        """Measure while `patch` is entered, in a pipeline whose ranks share units."""
        self.engine = engine
        self.measured: list[tuple[str, dict[str, int]]] = []
        """Before each compute."""
        start = UnitTensors.start_prefetch

        def measure(shared: UnitTensors, action: Action) -> None:
            self.measured.append((str(action), self.bytes_of(shared)))
            start(shared, action)

        self.patch = mock.patch.object(UnitTensors, "start_prefetch", measure)

    def bytes_of(self, shared: UnitTensors) -> dict[str, int]:
        """Return the bytes of K/V in the stores of all runs, and elsewhere on the device."""
        units = self.engine._stage_runner
        assert units is not None
        runners = [run.runner for run in units._active.values()]
        stores = {s for runner in runners for s in runner.kv_stores(runner._layers)}
        stores |= {store for ended, _ in shared._sums.values() for store in ended}
        keys = sums = 0
        for store in stores:
            if isinstance(store, LayerKV):
                keys, sums = keys + store.kv_bytes, sums + store.gradient_bytes
                continue
            assert isinstance(store, StreamedKV)
            sizes = {c: sum(x.numel() for x in pair) for c, pair in store._shapes.items()}
            keys += sum(sizes[c] * store._empty.itemsize for c in store._keys)
            sums += sum(sizes[c] * sum_dtype(store._empty).itemsize for c in store._sums)
        coming = shared.transport._receives.items()
        came = sum(buffer.nbytes for key, (_, buffer) in coming if "RECV_KV" in str(key))
        found = {"device kv": came, "device dkv": 0}
        for cause, size in (("kv", keys), ("dkv", sums)):
            tier = self.plans().by_stage[0].kv_tier
            found[f"{tier} {cause}"] = found.get(f"{tier} {cause}", 0) + size
        return found

    def plans(self) -> BatchPlans:
        """Return the plans of the one shape that has run."""
        (known,) = self.engine._stage_plans._shapes.values()
        (plans,) = known.plans.values()
        return plans

    def costs(self) -> tuple[Schedule, PipelineCost]:
        """Return the compute schedule of the step that has run, and its costs."""
        engine, plans = self.engine, self.plans()
        compute = generate(
            MSP, Size(engine.mesh.pp_size, plans.shape.micro_batches, len(plans.bounds))
        )
        profile, shape = load_profile("h100"), whole_shape(engine.parts)
        cost = ModelCost(shape=shape, profile=profile, dtype_name="float32")
        tier = plans.by_stage[0].kv_tier
        split = engine.staged.cut.layers
        costs = PipelineCost(compute, cost, plans.bounds, split=split, kv_tier=tier)
        return compute, costs

    def left(self) -> dict[str, tuple[int, int, int]]:
        """Return planned slices, own K/V in the plan, and what is left of the budget, by tier."""
        rank, config = self.engine.mesh.pp_rank, self.engine.config
        plan = self.plans().by_stage[rank]
        budgets = read_budgets(config, device_facts(torch.device("cpu"), config))
        compute, costs = self.costs()
        slices, own = extra_shared_unit_bytes(costs, compute, rank), costs.own_kv_bytes(rank)
        return {
            tier: (
                slices.get(tier, 0),
                own.get(tier, 0),
                (budgets.of(tier) or 0) - (plan.budgets.of(tier) or 0),
            )
            for tier in {"device", plan.kv_tier}
        }

    def planned(self) -> list[tuple[str, dict[str, int]]]:
        """The same as it is planned: what all that is listed before a compute takes and leaves."""
        rank, tier = self.engine.mesh.pp_rank, self.plans().by_stage[0].kv_tier
        compute, costs = self.costs()
        sends = {message.receive: send for send, message in messages(compute).items()}
        held = {f"{where} {cause}": 0 for where in ("device", tier) for cause in ("kv", "dkv")}
        found: list[tuple[str, dict[str, int]]] = []
        for action in lower(compute, kv_copies=costs.kv_copies).ranks[rank]:
            if action.kind in COMPUTE_KINDS:
                found.append((str(action), dict(held)))
            # What is sent changes bytes at both ends.
            for change in costs.changes(sends.get(action, action)):
                where, name = change.tier.split(".")[1], change.cause
                if change.tier.startswith(f"{rank}.") and f"{where} {name}" in held:
                    held[f"{where} {name}"] += change.num_bytes
        assert not any(held.values()), held
        return found


def run(one: dict[str, Any], pp_size: int, folder: Path) -> None:
    """Train a step of a tiny model, and perhaps evaluate after it."""
    # A layer a stage, and one more where bytes are summed over layers.
    layers = pp_size * one["settings"].get("pp_virtual_stages", 1) + one.get("held", False)
    overrides = {"num_hidden_layers": layers, **one.get("overrides", {})}
    model = build_tiny_model("llama", **overrides)
    settings = {"min_offload_size": 1, "show_plan": False, **one["settings"]}
    config = SPPOConfig(pp_size=pp_size, trace_dir=str(folder / one["name"]), **settings)
    events = EventRecorder()
    convert_over_ranks(model, config, observer=events)
    batch = make_batch(rows=one.get("rows", 2), tokens=one.get("tokens", TOKENS))
    engine = get_engine(model)
    assert isinstance(engine, PipelineEngine)
    held = SharedUnitKV(engine)
    with held.patch if one.get("held") else contextlib.nullcontext():
        for _ in range(one.get("steps", 1)):
            model.zero_grad()
            model(**batch).loss.backward()
    engine.offload.assert_drained()
    if one.get("evaluate"):
        with torch.no_grad():
            model(**batch)
    said = vars(events)
    if one.get("held"):
        said |= {"measured": held.measured, "expected": held.planned(), "left": held.left()}
    revert(model)
    path = folder / one["name"] / f"events{dist.get_rank()}.json"
    path.write_text(json.dumps(said))


def main(job: dict[str, Any]) -> None:
    """Run a job."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for one in job["runs"]:
        run(one, job["pp_size"], Path(job["out"]))
    leave_together()
