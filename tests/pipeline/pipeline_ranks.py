"""A job for each rank: tiny models as pipelines against one unmodified process.

The job holds `cases` (see `pipeline_cases`), `pp_size`, perhaps `sp_size`, `refused` (cases that
are refused) and `weights` (whether to note when they pass), and `out`, which rank 0 writes. Without
`sp_size` it says, too, what ran in which order (with `profiled` what the profiler saw of it), on
which mesh, and what a changed weight leads to.
"""

from __future__ import annotations

import json
import math
import time
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_outputs import ModelOutput

from sppo_hf.config import SPPOConfig
from sppo_hf.engine import mixer_kernels
from sppo_hf.engine.convert import get_engine, revert
from sppo_hf.engine.device_facts import model_profile
from sppo_hf.engine.family_guard import family_check_disabled
from sppo_hf.engine.model_parts import find_causal_lm, find_parts, suppress_peft_warnings
from sppo_hf.engine.step_observer import StepObserver, StepRecord
from sppo_hf.errors import SPPOError
from sppo_hf.integrations.accelerator import total_norm
from sppo_hf.pipeline import multiplex
from sppo_hf.pipeline.convert import convert_over_ranks, shared_mesh
from sppo_hf.pipeline.pipeline_engine import PipelineEngine
from sppo_hf.schedule.generate import Size, generate
from sppo_hf.schedule.lower import lower
from sppo_hf.testing.exactness import (
    GradientHooks,
    Gradients,
    float64_everywhere,
    parameter_errors,
    reference_attention,
)
from sppo_hf.testing.tiny_models import (
    add_images,
    add_lora,
    batch_for,
    build_tiny_classifier,
    build_tiny_model,
    make_batch,
)
from tests.engine.test_mixer_kernels import Installed, not_here
from tests.engine.unplanned import unplanned_shapes
from tests.noise import add_even_noise
from tests.pipeline.fork_server import leave_together
from tests.pipeline.pipeline_cases import TOKENS, Case

NamedGradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class CaseResult:
    """Results of a model in a case's micro-steps."""

    losses: list[float]
    grads: NamedGradients
    calls: dict[str, tuple[int, int]]
    """Calls of hooks on parameters, see `GradientHooks`."""


@dataclass
class LogProbOutput(ModelOutput):
    """Output of a head that was put on the model; for every label, `[B, T - 1]`."""

    log_probs: Tensor | None = None
    label_mask: Tensor | None = None


def add_log_prob_head(model: Any) -> None:
    """Let the model return log-probabilities of labels when it is asked to, as TRL does."""
    original = model.forward

    def forward(
        *args: Any, fused_lm_head: bool = False, shift_labels: Any = None, **kwargs: Any
    ) -> Any:
        if not fused_lm_head:
            return original(*args, **kwargs)
        labels, _ = kwargs.pop("labels", None), kwargs.pop("num_items_in_batch", None)
        logits = original(*args, **kwargs).logits
        if shift_labels is None:
            logits, shift_labels = logits[:, :-1], labels[:, 1:]
        mask = shift_labels != -100
        found = logits.log_softmax(-1).gather(-1, shift_labels.clamp(min=0)[..., None])[..., 0]
        return LogProbOutput(log_probs=found * mask, label_mask=mask)

    # A model's forward is known by the module of its code, and this one stands for TRL's.
    as_trl = types.FunctionType(
        forward.__code__, {**globals(), "__name__": "trl.models"}, None, None, forward.__closure__
    )
    as_trl.__kwdefaults__ = forward.__kwdefaults__
    model.forward = as_trl


def compute_loss(model: nn.Module, batch: dict[str, Any], kind: str | None) -> Tensor:
    """The loss of a micro-step: the model's, or one made of log-probabilities."""
    if kind is None:
        return model(**batch).loss
    found = model(**batch, fused_lm_head=True)
    log_probs, count = found.log_probs, found.label_mask.sum().clamp(min=1)
    # The numbers in front keep losses away from zero, by which errors are divided.
    if kind == "mean":
        return 1.0 - log_probs.sum() / count
    weights = torch.linspace(0.1, 2.0, log_probs.numel(), dtype=log_probs.dtype)
    return 1.0 + (weights.view_as(log_probs) * log_probs.exp()).sum() / count


_prepared: dict[str, nn.Module] = {}
"""Models of cases that nobody has used yet."""


def prepare(job: dict[str, Any]) -> None:
    """Build the models of all cases, and trace their profiles, before ranks are forked."""
    _prepared.clear()
    for case in [*job["cases"], *job.get("refused", ())]:
        model = build_model(case)
        model_profile(find_parts(model))
        _prepared[repr(case)] = model


def build_model(case: Case) -> nn.Module:
    """The model of a case; the same on every rank, whose first one of a case is prepared."""
    prepared = _prepared.pop(repr(case), None)
    if prepared is not None:
        return prepared
    overrides = dict(case.get("overrides", {}))
    if "layers" in case:
        overrides["num_hidden_layers"] = case["layers"]
    family, _, classifier = case["family"].partition(" ")
    if classifier:
        model: Any = build_tiny_classifier(family, classifier, **overrides)
    else:
        model = build_tiny_model(family, **overrides)
    for name, parameter in model.named_parameters():
        if any(part in name for part in case.get("frozen", ())):
            parameter.requires_grad_(False)
    if any("loss" in step for step in steps_of(case)):
        add_log_prob_head(model)
    if "noise" in case:
        add_even_noise(model, case["noise"])
    return add_lora(model) if case.get("lora") else model


def steps_of(case: Case) -> list[dict[str, Any]]:
    """The micro-steps of a case."""
    steps: list[dict[str, Any]] = case.get("steps", [{}])
    return steps


def make_batches(case: Case, model: nn.Module, replica: int) -> list[dict[str, Any]]:
    """A batch per micro-step, with labels for `model`, other ones for each replica."""
    rows, tokens = case.get("rows", 2), case.get("tokens", TOKENS)
    batches: list[dict[str, Any]] = []
    for index, _ in enumerate(steps_of(case)):
        seed = 10 * replica + index
        batch = make_batch(rows=rows, tokens=tokens, padding=case.get("padding", ()), seed=seed)
        if "packed" in case:
            positions = torch.cat([torch.arange(length) for length in case["packed"]])
            batch["position_ids"] = positions.expand(rows, -1).clone()
        if "labels" in case:
            start, end = case["labels"]
            batch["labels"][:, :start] = -100
            batch["labels"][:, end:] = -100
        if "images" in case:
            batch = add_images(find_causal_lm(model), batch, images=case["images"], seed=seed)
        batches.append(batch_for(find_causal_lm(model), batch))
    if case.get("items"):
        items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        for batch in batches:
            batch["num_items_in_batch"] = items
    return batches


def gradient_hooks(model: nn.Module, case: Case, replicas: int) -> GradientHooks:
    """Hooks on all trained parameters; with replicas only where the case asks for them.

    With replicas they change what is reduced when, and see one replica's gradient.
    """
    hooks = GradientHooks(model, after_accumulation=replicas == 1)
    return hooks if case.get("hooks", replicas == 1) else GradientHooks(nn.Module())


def run_steps(model: nn.Module, case: Case, replica: int, replicas: int) -> CaseResult:
    """Run a case's micro-steps; the same for the unmodified model and for a pipeline."""
    engine = get_engine(model)
    losses: list[float] = []
    with float64_everywhere(), gradient_hooks(model, case, replicas) as hooks:
        for step, batch in zip(steps_of(case), make_batches(case, model, replica), strict=True):
            trained = [p for p in model.parameters() if p.requires_grad]
            for name, parameter in model.named_parameters():
                if any(part in name for part in step.get("frozen", ())):
                    parameter.requires_grad_(False)
            if isinstance(engine, PipelineEngine):
                engine.syncs_gradients = lambda step=step: step.get("reduces", True)
            if step.get("evaluate"):
                model.eval()
                with torch.no_grad():
                    loss = compute_loss(model, batch, step.get("loss"))
                assert not loss.requires_grad
                model.train()
            else:
                loss = compute_loss(model, batch, step.get("loss"))
                if step.get("backward", True):
                    (loss * step.get("scale", 1.0)).backward()
            for parameter in trained:
                parameter.requires_grad_(True)
            losses.append(loss.item())
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return CaseResult(losses, grads, hooks.calls)


@dataclass(frozen=True)
class Reference:
    """Results of unmodified models in a case."""

    losses: list[list[float]]
    """Losses by replica."""
    grads: NamedGradients
    """Averaged over replicas."""
    calls: list[dict[str, tuple[int, int]]]
    """Calls of hooks on parameters, by replica."""
    tied: list[str]
    """Trained parameters that embedding and head share."""


def run_reference(case: Case, replicas: int) -> Reference:
    """Run the unmodified model on each replica's batches."""
    tied: list[str] = []
    runs: list[CaseResult] = []
    for replica in range(replicas):
        model = build_model(case)
        find_causal_lm(model).set_attn_implementation(reference_attention(model))
        # With a cache Transformers does not look for documents in the positions.
        find_causal_lm(model).config.use_cache = False
        runs.append(run_steps(model, case, replica, replicas))
        head = getattr(find_causal_lm(model).get_output_embeddings(), "weight", None)
        tied = [name for name in runs[0].grads if model.get_parameter(name) is head]
        if find_causal_lm(model).get_input_embeddings().weight is not head:
            tied = []
    mean: NamedGradients = {}
    for name in runs[0].grads:
        grads = [run.grads[name] for run in runs]
        present = [grad for grad in grads if grad is not None]
        mean[name] = sum(present) / replicas if present else None  # type: ignore[assignment]
    calls = [run.calls for run in runs]
    return Reference([run.losses for run in runs], mean, calls, tied)


def gradient_norm(grads: NamedGradients) -> float:
    """The norm of all gradients."""
    return math.sqrt(sum(g.square().sum().item() for g in grads.values() if g is not None))


def compare(case: Case, everyone: list[dict[str, Any]], sharing: int) -> dict[str, Any]:
    """Compare the results of all ranks in a case with the reference; `sharing` share a batch."""
    replicas = len(everyone) // sharing
    stages = sharing // len({one["sp_rank"] for one in everyone})
    wanted = run_reference(case, replicas)
    losses, theirs = wanted.losses, wanted.grads
    loss_error = 0.0
    for one in everyone:
        for mine, other in zip(one["losses"], losses[one["dp_rank"]], strict=True):
            both_nan = math.isnan(mine) and math.isnan(other)
            error = 0.0 if both_nan else abs(mine - other) / abs(other)
            loss_error = max(loss_error, math.inf if math.isnan(error) else error)
    worst: tuple[float, str] = (0.0, "")
    twice: set[str] = set()
    miscounted: set[str] = set()
    missing: set[str] = set()
    for replica in range(replicas):
        ranks = [one for one in everyone if one["dp_rank"] == replica]
        ranks.sort(key=lambda one: one["sp_rank"])
        whole: NamedGradients = {}
        for one in ranks:
            # A copy that two ranks hold is compared on both.
            if one["sp_rank"] == 0:
                twice |= whole.keys() & one["grads"].keys()
            whole |= one["grads"]
            miscounted |= {
                name
                for name, calls in one["calls"].items()
                if theirs[name] is not None and calls != wanted.calls[replica][name]
            }
            some = {**theirs, **one["grads"]}
            found = parameter_errors(Gradients(0.0, some), Gradients(0.0, theirs))[0]
            worst = max(worst, (found.error, found.name))
        missing |= whole.keys() ^ theirs.keys()
    norm = gradient_norm(theirs)
    return {
        "name": case["name"],
        "loss_error": loss_error,
        "gradient_error": worst[0],
        "worst": worst[1],
        "norm_error": max(abs(one["norm"] - norm) / max(norm, 1e-300) for one in everyone),
        "wrong_names": sorted(missing),
        "hooks_miscounted": sorted(miscounted),
        "held_twice": sorted(twice),
        "tied": sorted(wanted.tied),
        "stages": stages,
        "unplanned": [shape for one in everyone for shape in one["unplanned"]],
        "gradients": sum(grad is not None for grad in theirs.values()),
    }


def settings_of(case: Case) -> dict[str, Any]:
    """The settings of a case, sizes aside."""
    settings = {"num_chunks": 3, "show_plan": False, **case.get("settings", {})}
    if "chunk_lengths" in settings:
        del settings["num_chunks"]
    return settings


def attending_units(engine: PipelineEngine) -> int:
    """Layers that attend, of all forwards that this rank has carried out in its last step."""
    attending, layers = engine.parts.attending_layers(), engine.staged.cut.layers
    forwards = [done.action.stage for done in engine.executed if done.action.kind == "F"]
    return sum(layer in attending for stage in forwards for layer in layers[stage])


@contextmanager
def failing_kernel(case: Case) -> Iterator[None]:
    """Let a kernel of the case's family be installed that fails when it is called."""
    if "kernel" not in case:
        yield
        return
    installed = Installed(case["family"], case["kernel"], not_here)
    try:
        with mock.patch.object(mixer_kernels, "PACKAGES", ("torch",)):
            yield
    finally:
        setattr(installed.module, installed.name, installed.own)


def run_case(case: Case, pp_size: int, sp_size: int) -> dict[str, Any] | None:
    """Run one case on this rank; rank 0 returns the comparison with the reference."""
    model = build_model(case)
    config = SPPOConfig(pp_size=pp_size, sp_size=sp_size, **settings_of(case))
    copies = CopyCounter()
    convert_over_ranks(model, config, observer=copies)
    engine = get_engine(model)
    assert isinstance(engine, PipelineEngine)
    with failing_kernel(case), unplanned_shapes() as unplanned:
        ran = run_steps(model, case, engine.mesh.dp_rank, engine.mesh.dp_size)
    mine = {"losses": ran.losses, "grads": ran.grads, "calls": ran.calls, "unplanned": unplanned}
    mine |= {"dp_rank": engine.mesh.dp_rank, "sp_rank": engine.mesh.sp_rank}
    mine["norm"] = total_norm(engine, list(model.parameters()), 2.0).item()
    mine["shared"] = sum(done.action.part is not None for done in engine.executed)
    foreign = [p for module in engine.staged.borrowed_modules() for p in module.parameters()]
    own = {id(p) for p in model.parameters()}
    left = [p for p in foreign if p.requires_grad and id(p) not in own]
    # What trains in other ranks' stages takes no memory between steps.
    mine["left"] = sum(p.untyped_storage().nbytes() for p in left)
    mine["left"] += sum(p.grad is not None for p in left)
    mine["written"] = copies.left_bytes, copies.disk_bytes
    mine["attended"] = engine.counters.get("attention_forwards", 0), attending_units(engine)
    revert(model)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, everyone if dist.get_rank() == 0 else None, dst=0)
    if dist.get_rank() > 0:
        return None
    found = compare(case, everyone, config.sharing_ranks)
    told = ("shared", "left", "written", "attended")
    return found | {name: [one[name] for one in everyone] for name in told}


class CopyCounter(StepObserver):
    """Counts the bytes written to the disk."""

    def __init__(self) -> None:
        """Begin without records."""
        self.left_bytes = self.disk_bytes = 0

    def on_record(self, record: StepRecord) -> None:
        """Add a step's bytes."""
        self.left_bytes += record.offload.d2h_bytes
        self.disk_bytes += record.offload.disk_write_bytes


class CollectiveRecorder(TorchDispatchMode):
    """Notes when weights and gradients pass between ranks, and what is multiplied meanwhile.

    Stands for torch.distributed in the module that sends them.
    """

    def __init__(self) -> None:
        """Begin without records."""
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and note a run of matmuls as "matmuls"."""
        if func is torch.ops.aten.mm.default and self.seen[-1:] != ["matmuls"]:
            self.seen.append("matmuls")
        return func(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        """Pass other names on to `torch.distributed`."""
        return getattr(dist, name)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        """Note when weights start, and when they are waited for."""
        return self._noted("weights", dist.broadcast(*args, **kwargs))

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Note when gradients start, and when they are waited for."""
        return self._noted("gradients", dist.reduce(*args, **kwargs))

    def _noted(self, what: str, work: Any) -> Any:
        self.seen.append(f"start {what}")

        def wait() -> None:
            self.seen.append(f"wait {what}")
            work.wait()

        return SimpleNamespace(wait=wait)


def collectives_in_order(pp_size: int) -> list[str]:
    """Return the order of this rank's collectives and matmuls in a step of shared units."""
    model = build_model({"name": "order", "family": "llama", "layers": pp_size})
    settings: dict[str, Any] = {"num_chunks": 3, "pp_msp": "on", "show_plan": False}
    convert_over_ranks(model, SPPOConfig(pp_size=pp_size, **settings))
    batch = make_batch(rows=1, tokens=TOKENS)
    with CollectiveRecorder() as order, mock.patch.object(multiplex, "dist", order):
        model(**batch).loss.backward()
    revert(model)
    return order.seen


def refusal_message(case: Case, pp_size: int) -> str:
    """Return the error with which conversion, or the first forward, refuses a case."""
    try:
        model = build_model(case)
        settings = {"show_plan": False, "pp_size": pp_size, **case["settings"]}
        convert_over_ranks(model, SPPOConfig(**settings))
        for name, parameter in model.named_parameters():
            if any(part in name for part in case.get("frozen_later", ())):
                parameter.requires_grad_(False)
        model(**make_batches(case, model, 0)[0])
    except SPPOError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def executed_and_listed_actions(pp_size: int, *, profiled: bool) -> dict[str, list[str]]:
    """Return this rank's actions as the engine, the schedule and a profiler list them."""
    from torch.profiler import ProfilerActivity, profile

    # The profiler takes long to read what it has seen of each operation.
    model = build_tiny_model("llama", num_hidden_layers=pp_size)
    chunks, rows, name = 2, 2, "zb_seq1f1b"
    settings: dict[str, Any] = {"num_chunks": chunks, "pp_schedule": name, "show_plan": False}
    convert_over_ranks(model, SPPOConfig(pp_size=pp_size, **settings))
    engine = get_engine(model)
    assert isinstance(engine, PipelineEngine)
    batch = make_batch(rows=rows, tokens=9)
    watching = profile(activities=[ProfilerActivity.CPU]) if profiled else nullcontext()
    with watching as profiler:
        model(**batch).loss.backward()
    reduce = engine.mesh.dp_size > 1
    schedule = lower(generate(name, Size(pp_size, rows, chunks)), reduce=reduce)
    found = {"executed": [str(done.action) for done in engine.executed]}
    revert(model)
    if profiler is not None:
        events = [e for e in profiler.events() or () if e.name.startswith("sppo/")]
        events.sort(key=lambda event: event.time_range.start)
        found["profiled"] = [event.name.removeprefix("sppo/") for event in events]
    return {**found, "listed": schedule.texts()[engine.mesh.pp_rank]}


def change_weights_before_backward(pp_size: int) -> str:
    """Return the error of a backward after a weight of each rank was changed in place."""
    model = build_tiny_model("llama", num_hidden_layers=pp_size + 1)
    convert_over_ranks(model, SPPOConfig(pp_size=pp_size, num_chunks=2, show_plan=False))
    loss = model(**make_batch(rows=2, tokens=TOKENS)).loss
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    try:
        loss.backward()
    except SPPOError as error:
        return str(error)
    finally:
        revert(model)
    return "nothing"


def run_backward_of_two_losses(pp_size: int) -> str:
    """Return the error of a backward after another forward, which writes into weights itself.

    PEFT's adapters on experts put the base weight, as it was, back after every call.
    """
    from peft import LoraConfig, get_peft_model

    model: nn.Module = build_tiny_model("qwen3_moe", num_hidden_layers=pp_size + 1)
    lora = LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.gate.weight"])
    with suppress_peft_warnings():
        model = get_peft_model(model, lora)
    convert_over_ranks(model, SPPOConfig(pp_size=pp_size, num_chunks=2, show_plan=False))
    batch = make_batch(rows=2, tokens=TOKENS)
    try:
        (model(**batch).loss + model(**batch).loss).backward()
    except SPPOError as error:
        return str(error)
    finally:
        revert(model)
    return "nothing"


def mesh_facts(pp_size: int) -> dict[str, Any]:
    """Return this rank's coordinates and groups in the mesh."""
    mesh = shared_mesh(SPPOConfig(pp_size=pp_size), torch.device("cpu"))

    def ranks(group: Any) -> list[int] | None:
        return None if group is None else dist.get_process_group_ranks(group)

    return {
        "pp_rank": mesh.pp_rank,
        "dp_rank": mesh.dp_rank,
        "dp_size": mesh.dp_size,
        "is_first": mesh.is_first,
        "pipeline": ranks(mesh.pp_group),
        "control": ranks(mesh.control_group),
        "replicas": ranks(mesh.replica_group),
        "ends": ranks(mesh.embedding_group),
        "world_ranks": [mesh.world_rank(rank) for rank in range(pp_size)],
        "links": {f"{a}>{b}": ranks(group) for (a, b), group in mesh.links.items()},
        "distinct_links": len({id(group) for group in mesh.links.values()}),
        "smallest": min(map(dist.get_world_size, dist.distributed_c10d._world.pg_map)),
    }


def all_gather(mine: Any) -> list[Any]:
    """Everyone's, on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def main(job: dict[str, Any]) -> None:
    """Run a job."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    began = time.perf_counter()
    result: dict[str, Any] = {"cases": []}
    for case in job["cases"]:
        start = time.perf_counter()
        try:
            with family_check_disabled():  # what it would find is found here
                found = run_case(case, job["pp_size"], job.get("sp_size", 1))
        except Exception as error:
            error.add_note(f"in the case {case['name']!r}")
            raise
        if found is not None:
            result["cases"].append({**found, "seconds": time.perf_counter() - start})
    for case in job.get("refused", ()):
        result.setdefault("refusals", {})[case["name"]] = all_gather(
            refusal_message(case, job["pp_size"])
        )
    if "sp_size" not in job:
        result["order"] = all_gather(
            executed_and_listed_actions(job["pp_size"], profiled=job["profiled"])
        )
        result["changed"] = all_gather(change_weights_before_backward(job["pp_size"]))
        result["written"] = all_gather(run_backward_of_two_losses(job["pp_size"]))
        result["places"] = all_gather(mesh_facts(job["pp_size"]))
    if job.get("weights"):
        result["weights"] = all_gather(collectives_in_order(job["pp_size"]))
    result["seconds"] = time.perf_counter() - began
    if dist.get_rank() == 0:
        Path(job["out"]).write_text(json.dumps(result))
    leave_together()
