"""A job for each rank: tiny models whose sequences ranks share, against one unmodified process.

The job holds `cases` (as in `pipeline_cases`), `refused` (cases that are refused), `sp_size` and
`out`. With `bytes`, what a forward leaves behind is measured; with `orders` (of `recompute`) when
exchanges run; with `compiled` (likewise) what code computes that `backend` has compiled; with
`actions` (a folder) what was planned and done; with `machines` what ranks of different machines are
told. Rank 0 writes what was found. Gradients are averaged over all ranks, as DDP and FSDP2 do.
"""

from __future__ import annotations

import functools
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from sppo_hf.attention.kv_cache import LayerKV
from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import convert, get_engine, revert
from sppo_hf.engine.step_observer import StepObserver
from sppo_hf.errors import SPPOError
from sppo_hf.pipeline.convert import convert_over_ranks
from sppo_hf.pipeline.sequence_parallel import SequenceParallelEngine
from sppo_hf.planning.plan import Plan
from sppo_hf.planning.prediction import MeasuredStep
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch
from tests.engine.unplanned import unplanned_shapes
from tests.pipeline import pipeline_ranks
from tests.pipeline.fork_server import leave_together
from tests.pipeline.pipeline_cases import Case
from tests.pipeline.pipeline_ranks import (
    NamedGradients,
    all_gather,
    build_model,
    compare,
    gradient_norm,
    make_batches,
    run_steps,
    settings_of,
)

__all__ = ["main", "prepare"]


def average_over_ranks(grads: NamedGradients) -> tuple[NamedGradients, list[str]]:
    """Gradients averaged over all ranks, and the names of those that some ranks have not."""
    world, counts = (
        dist.get_world_size(),
        torch.tensor([g is not None for g in grads.values()]).int(),
    )
    dist.all_reduce(counts)
    ranks = dict(zip(grads, counts.tolist(), strict=True))
    whole = {name: g for name, g in grads.items() if g is not None and ranks[name] == world}
    mean = dict(grads)
    if whole:
        flat = torch.cat([grad.flatten() for grad in whole.values()])
        dist.all_reduce(flat)
        flat /= world
        parts = flat.split([grad.numel() for grad in whole.values()])
        for (name, grad), part in zip(whole.items(), parts, strict=True):
            mean[name] = part.view_as(grad).clone()  # a view is sent with all that it is a part of
    return mean, [name for name, count in ranks.items() if count not in (0, world)]


class CorrectionRecorder(StepObserver):
    """Keeps what this rank's engine tells its observer of corrected plans."""

    def __init__(self) -> None:
        """Begin without records."""
        self.corrections: list[list[str]] = []

    def on_correction(self, before: Plan, after: Plan, measured: MeasuredStep) -> None:
        """Note all that must be alike on all ranks."""
        assert after.cost is not None
        self.corrections.append(
            [repr(measured), repr(after.cost.correction), repr(after.layer_modes)]
        )


def run_case(case: Case, sp_size: int) -> dict[str, Any]:
    """Run one case on this rank; what rank 0 returns has the comparison in it."""
    model = build_model(case)
    recorder = CorrectionRecorder()
    config = SPPOConfig(sp_size=sp_size, **settings_of(case))
    convert_over_ranks(model, config, observer=recorder)
    engine = get_engine(model)
    assert isinstance(engine, SequenceParallelEngine)
    mesh = engine.mesh
    with unplanned_shapes() as unplanned:
        ran = run_steps(model, case, mesh.dp_rank, mesh.dp_size)
    grads, uneven = average_over_ranks(ran.grads)
    revert(model)
    mine = {
        "losses": ran.losses,
        "grads": grads,
        "calls": ran.calls,
        "unplanned": unplanned,
        "norm": gradient_norm(grads),
        "dp_rank": mesh.dp_rank,
        "sp_rank": mesh.sp_rank,
        "attention_forwards": engine.counters.get("attention_forwards", 0),
        "corrections": recorder.corrections,
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, everyone if dist.get_rank() == 0 else None, dst=0)
    if dist.get_rank() > 0:
        return {}
    found = compare(case, everyone, sp_size)
    return {
        **found,
        "wrong_names": sorted({*found["wrong_names"], *uneven}),
        "attention_forwards": [one["attention_forwards"] for one in everyone],
        "attending_layers": len(engine.parts.attending_layers()),
        "corrections": [one["corrections"] for one in everyone],
    }


def refusal_message(case: Case, sp_size: int, **settings: Any) -> str:
    """Return the error with which conversion, or the first forward, refuses a case."""
    try:
        model = build_model(case)
        config = SPPOConfig(sp_size=sp_size, show_plan=False, **settings)
        convert_over_ranks(model, config)
        model(**make_batches(case, model, 0)[0])
    except SPPOError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def compile_and_compare(sp_size: int, backend: str, recompute: str) -> dict[str, float]:
    """Return errors of float32 gradients against float64, and counts of what was compiled here."""
    compile_with = functools.partial(torch.compile, backend=backend)
    settings: dict[str, Any] = {"chunk_lengths": (23, 1), "recompute": recompute}
    exact = build_tiny_model("llama", num_hidden_layers=1)
    model = build_tiny_model("llama", num_hidden_layers=1, dtype=torch.float32)
    model.load_state_dict(exact.state_dict())
    batch = make_batch(rows=2, tokens=24)

    def step(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        shared = get_engine(model) is not None
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        grads, _ = average_over_ranks(found) if shared else (found, [])
        values = [loss, *(grad for grad in grads.values() if grad is not None)]
        return [value.detach().double() for value in values]

    truth, runs = step(exact), {"plain": step(model)}
    torch._dynamo.reset()  # what was compiled for another model of its class would serve this one
    counters.clear()
    for name in ("eager", "compiled"):
        assert not counters["stats"]["unique_graphs"], "nothing is compiled unless it is asked for"
        config = SPPOConfig(
            sp_size=sp_size, compile=name == "compiled", show_plan=False, offload="none", **settings
        )
        convert_over_ranks(model, config)
        with mock.patch.object(torch, "compile", compile_with):
            runs[name] = step(model)
        revert(model)
    errors = {
        name: max(((x - y).norm() / y.norm()).item() for x, y in zip(found, truth, strict=True))
        for name, found in runs.items()
    }
    return {**errors, "gradients": len(truth) - 1, "graphs": counters["stats"]["unique_graphs"]}


class PlanRecorder(StepObserver):
    """Keeps the actions of the last plan, in order."""

    def __init__(self) -> None:
        """Begin without records."""
        self.actions: list[str] = []

    def on_plan(self, plan: Plan, model_name: str) -> None:
        """Note a plan's actions."""
        self.actions = [str(action) for action in plan.program().actions]


def planned_and_executed(sp_size: int, folder: str) -> tuple[list[str], list[str]]:
    """Return the actions of this rank's plan, and those that it carried out."""
    settings: dict[str, Any] = {"recompute": "full", "offload": "full", "min_offload_size": 1}
    settings |= {"chunk_lengths": (5, 8, 1, 10), "trace_dir": folder, "show_plan": False}
    settings["hardware"] = "cpu"
    model, planned = build_model({"name": "actions", "family": "llama"}), PlanRecorder()
    convert_over_ranks(model, SPPOConfig(sp_size=sp_size, **settings), observer=planned)
    model(**make_batch(rows=1, tokens=24)).loss.backward()
    revert(model)
    done = Path(folder, f"rank{dist.get_rank()}.actions").read_text().split()
    return planned.actions, done


def refusals_across_machines(sp_size: int) -> list[str]:
    """Return the errors of ranks on a machine each, without and with `sp_across_nodes`."""
    mine = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    case: Case = {"name": "between machines", "family": "llama"}
    with mock.patch.dict(os.environ, mine):
        return [
            refusal_message(case, sp_size, **{"sp_across_nodes": allowed})
            for allowed in (False, True)
        ]


def kept_bytes(sp_size: int) -> dict[str, int]:
    """Bytes that a forward leaves behind on this rank: saved by autograd, and keys and values."""
    model = build_model({"name": "bytes", "family": "llama"})
    plan: dict[str, Any] = {"num_chunks": 4, "recompute": "none", "offload": "none"}
    config = SPPOConfig(sp_size=sp_size, show_plan=False, **plan)
    if sp_size == 1:
        convert(model, config)
    else:
        convert_over_ranks(model, config)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}
    kept = {"keys_and_values": 0}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return tensor

    put = LayerKV.put

    def count(self: LayerKV, chunk: int, *args: Any, **kwargs: Any) -> None:
        put(self, chunk, *args, **kwargs)
        kept["keys_and_values"] += sum(x.nbytes for x in self._keys[chunk])

    LayerKV.put = count  # type: ignore[method-assign]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(**make_batch(rows=2, tokens=64))
    finally:
        LayerKV.put = put  # type: ignore[method-assign]
        revert(model)
    return {**kept, "saved": sum(storage.nbytes() for storage in storages.values())}


class ExchangeRecorder(TorchDispatchMode):
    """Notes when exchanges are started and waited for, and what is multiplied meanwhile."""

    def __init__(self) -> None:
        """Begin without records."""
        super().__init__()
        self.seen: list[str] = []
        self.coming: dict[int, int] = {}
        self.started = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and note it: "start 3", "wait 3", or "matmuls" for a run of them."""
        out = func(*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            self.coming[out.untyped_storage().data_ptr()] = self.started
            self.seen.append(f"start {self.started}")
            self.started += 1
        elif func is torch.ops._c10d_functional.wait_tensor.default:
            number = self.coming.pop(out.untyped_storage().data_ptr(), None)
            self.seen += [] if number is None else [f"wait {number}"]
        elif func is torch.ops.aten.mm.default and self.seen[-1:] != ["matmuls"]:
            self.seen.append("matmuls")
        return out


def exchanges_in_order(sp_size: int, recompute: str) -> list[str]:
    """Return the order of exchanges and matmuls of one layer in one chunk, forward and backward."""
    model = build_model({"name": "order", "family": "llama", "layers": 1})
    settings: dict[str, Any] = {"num_chunks": 1, "recompute": recompute, "offload": "none"}
    convert_over_ranks(model, SPPOConfig(sp_size=sp_size, show_plan=False, **settings))
    batch = make_batch(rows=1, tokens=16)
    model(**batch).loss.backward()
    with ExchangeRecorder() as order:
        model(**batch).loss.backward()
    revert(model)
    return order.seen


def prepare(job: dict[str, Any]) -> None:
    """Build the models, and import what compiling takes, which is more than a second."""
    pipeline_ranks.prepare(job)
    if job.get("compiled"):
        torch.compile(torch.sin, backend="aot_eager")(torch.ones(2, requires_grad=True))


def main(job: dict[str, Any]) -> None:
    """Run a job."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result: dict[str, Any] = {"cases": [], "refusals": {}}
    for case in job["cases"]:
        start = time.perf_counter()
        try:
            found = run_case(case, job["sp_size"])
        except Exception as error:
            error.add_note(f"in the case {case['name']!r}")
            raise
        result["cases"].append({**found, "seconds": time.perf_counter() - start})
    for case in job.get("refused", ()):
        result["refusals"][case["name"]] = all_gather(refusal_message(case, job["sp_size"]))
    if job.get("compiled"):
        sizes = job["sp_size"], job["backend"]
        result["compiled"] = [
            all_gather(compile_and_compare(*sizes, recompute)) for recompute in job["compiled"]
        ]
    if "actions" in job:
        result["actions"] = all_gather(planned_and_executed(job["sp_size"], job["actions"]))
    if job.get("machines"):
        result["machines"] = all_gather(refusals_across_machines(job["sp_size"]))
    result["orders"] = [exchanges_in_order(job["sp_size"], r) for r in job.get("orders", ())]
    if job.get("bytes"):
        result["bytes"] = [kept_bytes(size) for size in (1, job["sp_size"])]
    if dist.get_rank() == 0:
        Path(job["out"]).write_text(json.dumps(result))
    leave_together()
