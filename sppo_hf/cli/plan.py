"""`sppo plan MODEL --seq-len N`: what happens to each chunk, and how the policies compare.

With `--gpus`: which layouts over several devices are fastest, and why. With `--write`: the files of
a run that does what is planned, every decision of which is in them. Neither torch nor Transformers
is imported, and matplotlib only to draw.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from packaging.version import Version
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sppo_hf.cli import common
from sppo_hf.config import SPPOConfig, parse_bytes
from sppo_hf.errors import ConfigError
from sppo_hf.planning.activation_modes import RECOMPUTE_BY_SAVED
from sppo_hf.planning.choices import read_budgets
from sppo_hf.planning.cluster import ClusterPlan, ClusterRequest, ClusterResult, solve_cluster
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.feasibility import (
    CastBy,
    PlanResult,
    PolicyResult,
    assess_request,
    compare_policies,
    plan_for,
    timeline_of,
)
from sppo_hf.planning.hardware import UNKNOWN_LINK
from sppo_hf.planning.layouts import FSDP2_TORCH, SearchSpace
from sppo_hf.planning.pipeline_cost import PipelineCost
from sppo_hf.planning.plan import Plan, PlanRequest, make_plan, planned_for
from sppo_hf.planning.tiers import HOST, TIERS, allowed_behind_host, offload_tiers
from sppo_hf.registry import OFFLOAD_POLICIES
from sppo_hf.reporting.chrome_trace import write_trace
from sppo_hf.reporting.figures import ENDINGS, draw_plan
from sppo_hf.reporting.plan_json import actions_to_list, answer_to_dict, policies_to_list
from sppo_hf.reporting.plan_tables import plan_tables
from sppo_hf.rules import format_bytes
from sppo_hf.schedule.generate import MSP, Size, generate
from sppo_hf.text_files import to_yaml

_MAX_SIMULATED_ACTIONS = 240_000
"""Actions simulated for one answer over several devices: about ten microseconds each."""

_MAX_LISTED_ACTIONS = 300_000
"""Actions listed with --json: about three seconds, and 3 MB."""

_ACTIONS_PER_UNIT = 8
"""About so many, for an estimate."""

FSDP2_SETTINGS = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
}
"""Accelerate's settings of a run with FSDP2, here and in recipes/configs."""

_TORCH_OF_FSDP2 = f"PyTorch {'.'.join(map(str, FSDP2_TORCH))} or newer"
_ACCELERATE_FILE, _SPPO_FILE = "accelerate.yaml", "sppo.yaml"
_COLUMNS = (
    *("layout", "dp/pp/sp", "chunks", "recompute", "K/V", "tokens/s", "step", "idle"),
    *("device", "host"),
)
_OFFLOAD_TEXTS = {"full": "offloaded", "sppo": "partly offloaded"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanArguments(common.PlanningArguments):
    """Options of `sppo plan`, as they were typed."""

    offload_dir: Annotated[
        str | None,
        typer.Option(help="Folder on that disk, for --write; naming it allows the disk, too."),
    ] = None
    offload: Annotated[
        str,
        typer.Option(
            help=f"What is offloaded, one of {', '.join(('auto', *OFFLOAD_POLICIES.names()))}:"
            " auto solves for time; the others (sppo is the paper's) are fixed, and recompute"
            " nothing unless --recompute says so.",
        ),
    ] = "auto"
    figure: Annotated[
        Path | None,
        typer.Option(help=f"Draw the plan into a file ({', '.join(ENDINGS)})."),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the simulated step as JSON for ui.perfetto.dev."),
    ] = None
    gpus: Annotated[
        int,
        typer.Option(
            min=1,
            max=2**16,
            help="Devices; more than one: the best layouts over them (DDP, FSDP2, pipelines, shared"
            " sequences), and why, for a step of --micro-batch-size rows in all.",
        ),
    ] = 1
    gpus_per_node: Annotated[
        int, typer.Option(min=1, max=2**16, help="Devices that share a host, with --gpus.")
    ] = 8
    link: Annotated[
        str | None,
        typer.Option(
            help="Bytes per second between devices of different nodes, each way. \\[default: the "
            "profile's, or 25GiB]"
        ),
    ] = None
    write: Annotated[
        Path | None,
        typer.Option(
            help="Write accelerate.yaml and sppo.yaml into a folder, and say how to launch them."
            " The run, and what is planned then, is in mixed precision.",
            metavar="DIR",
        ),
    ] = None

    @property
    def devices_of_host(self) -> int:
        """Devices that share a host."""
        return min(self.gpus, self.gpus_per_node)

    @property
    def cast_by(self) -> CastBy:
        """What casts float32 adapters in the run: `Launch` has mixed precision.

        That is autocast without FSDP2.
        """
        return "nothing" if self.gpus == 1 and self.write is None else "autocast"


@common.with_options(PlanArguments)
def plan(arguments: PlanArguments, as_json: common.AsJson = False) -> None:
    """Show the plan for training MODEL at a length on a machine, beside every fixed policy.

    The machine need not be this one, and no weights are read.

    Exit code 0: it fits. 1: it does not. 2: bad input.
    """
    show = _plan_over_devices if arguments.gpus > 1 else _plan_one_device
    with common.bad_input(as_json):
        fits = show(arguments, as_json)
    raise typer.Exit(common.EXIT_FITS if fits else common.EXIT_DOES_NOT_FIT)


def _plan_one_device(arguments: PlanArguments, as_json: bool) -> bool:
    """Plan for one device and print the answer; returns whether a plan fits."""
    common.check_figure(arguments.figure)
    request = arguments.plan_request(cast_by=arguments.cast_by)
    answer = assess_request(request)
    results = _compare(arguments, answer)
    _draw_and_trace(arguments, answer)
    launch = None
    if arguments.write is not None and answer.plan is not None:
        launch = launch_of_plan(arguments, request, answer.plan)
        launch.write(arguments.write)
    if as_json:
        policies, actions = policies_to_list(results), actions_to_list(answer.plan)
        answered = {**answer_to_dict(answer), "policies": policies, "actions": actions}
        _print_json(answered, launch, arguments.write)
    else:
        table = plan_tables(answer, results, arguments.title)
        _print(table, arguments.hardware_note(request), launch, arguments.write)
    return answer.fits


def _plan_over_devices(arguments: PlanArguments, as_json: bool) -> bool:
    """Search layouts over several devices and print the answer; returns whether one fits."""
    file, folder = arguments.figure or arguments.trace, arguments.write
    if file is not None:
        raise ConfigError(
            f"{file} was requested with --gpus {arguments.gpus}. Allowed: pictures and traces of "
            "one device's plan. Remedy: `sppo simulate` draws a layout over several."
        )
    request = _cluster_request(arguments)
    answer = solve_cluster(request, max_actions=_MAX_SIMULATED_ACTIONS)
    launch: Launch | None = None
    actions: list[list[str]] | None = []
    if answer.best and (as_json or folder is not None):
        best, single = answer.best[0], arguments.plan_request()
        launch = launch_of_layout(arguments, request, single.config, best)
        if folder is not None:
            launch.write(folder)
        if as_json:
            actions = actions_of_layout(request, single, launch, best)
    if as_json:
        answered = {**_cluster_to_dict(answer), "fsdp2_refusal": request.fsdp2_refusal or None}
        _print_json({**answered, "actions": actions}, launch, folder)
    else:
        sharing = arguments.devices_of_host
        single = arguments.plan_request(devices_of_host=sharing)
        note = arguments.hardware_note(single, devices_of_host=sharing)
        title = f"{arguments.title} on {arguments.gpus} devices"
        table = _cluster_table(answer, title, request.fsdp2_refusal)
        _print(table, note, launch, folder)
    return bool(answer.best)


def _print_json(answered: dict[str, Any], launch: Launch | None, folder: Path | None) -> None:
    if launch is not None and folder is not None:
        answered |= {"launch": launch.command(folder), "arguments": launch.arguments}
    common.echo_json(answered)


def _print(table: Group, note: str, launch: Launch | None, folder: Path | None) -> None:
    out = common.console()
    out.print(table)
    out.print(note, style="dim", highlight=False)
    if launch is not None and folder is not None:
        out.print(f"Launch, with {launch.arguments}:", highlight=False)
        out.print(launch.command(folder), soft_wrap=True, highlight=False)
    elif folder is not None:
        common.console(stderr=True).print("Nothing fits, so there is nothing to write.")


def _compare(arguments: PlanArguments, answer: PlanResult) -> Sequence[PolicyResult]:
    """Plan with every policy, whichever of them was requested."""
    if arguments.offload == "auto":
        return compare_policies(answer.request, answer.plan or plan_for(answer.request))
    automatic = dataclasses.replace(arguments, offload="auto")
    automatic = automatic.plan_request(cast_by=arguments.cast_by)
    return compare_policies(automatic, plan_for(automatic))


def _draw_and_trace(arguments: PlanArguments, answer: PlanResult) -> None:
    figure, trace = arguments.figure, arguments.trace
    if figure is None and trace is None:
        return
    if answer.plan is None:
        common.console(stderr=True).print("Nothing fits, so there is no plan to draw or trace.")
        return
    timeline = timeline_of(answer.plan)
    budgets = {tier: answer.budgets.of(tier) for tier in TIERS}
    with common.writing(figure, trace):
        if figure is not None:
            title = arguments.title
            draw_plan(answer.plan, timeline, budgets=budgets, path=figure, title=title)
        if trace is not None:
            write_trace(timeline, trace)


def _cluster_request(arguments: PlanArguments) -> ClusterRequest:
    """Read the model, length and machine of the command line."""
    gpus = arguments.gpus
    chosen = {
        "--num-chunks": arguments.num_chunks != "auto",
        "--partition": arguments.partition != "auto",
        "--offload-kv": arguments.offload_kv != "auto",
        "--weights": arguments.weights == "host",
        "--optimizer": arguments.optimizer == "host",
        "--recompute": arguments.recompute is not None,
        "--offload": arguments.offload != "auto",
    }
    for option in (name for name, is_chosen in chosen.items() if is_chosen):
        raise ConfigError(
            f"{option} was given with --gpus {gpus}. Allowed: not both; the search over several "
            "devices chooses chunks and what is kept. Remedy: drop one of them, or ask `sppo "
            "simulate` about one layout."
        )
    devices_of_host = arguments.devices_of_host
    request = arguments.plan_request(devices_of_host=devices_of_host, cast_by=arguments.cast_by)
    profile = request.device.profile
    assert profile is not None, "a request from the command line has a profile"
    link_rate = profile.network_bytes_per_second or UNKNOWN_LINK
    if arguments.link is not None:
        link_rate = parse_bytes(arguments.link, field="--link", total_bytes=None)
    for tier in TIERS.values():
        profile = tier.of_one_device(profile, devices_of_host)
    behind = allowed_behind_host(request.config, profile.kind)
    cost = ModelCost(shape=request.shape, profile=profile, dtype_name=request.dtype_name)
    refusal = common.fsdp2_refusal(common.read_model(arguments.model))
    gathered = request.shape if refusal else arguments.plan_request(cast_by="fsdp2").shape
    return ClusterRequest(
        cost=cost,
        sharded_cost=replace(cost, shape=gathered),
        fsdp2_refusal=refusal,
        total_tokens=request.total_tokens,
        rows=request.batch_rows,
        gpus=gpus,
        budgets=read_budgets(request.config, request.device),
        gpus_per_node=arguments.gpus_per_node,
        link_bytes_per_second=link_rate,
        node_bytes_per_second=profile.node_bytes_per_second,
        space=SearchSpace(activation_tiers=(HOST, *behind)),
        shares_units=request.shape.units_can_be_shared,
    )


def _cluster_to_dict(answer: ClusterResult) -> dict[str, Any]:
    """Return an answer in plain JSON types."""
    return {
        "fits": bool(answer.best),
        "plans": [_plan_to_dict(plan) for plan in answer.best],
        "closest": None if answer.closest is None else _plan_to_dict(answer.closest),
        "tried": answer.num_simulated,
        "candidates": answer.num_candidates,
        "unseen": answer.num_skipped,
        "unseen_step_seconds": answer.skipped_min_seconds,
        "fsdp2": None if answer.sharded is None else _plan_to_dict(answer.sharded),
    }


def _cluster_table(answer: ClusterResult, title: str, fsdp2_refusal: str) -> Group:
    """Lay out the best layouts, or the one that comes closest to fitting."""
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for name in _COLUMNS:
        left = name in ("layout", "dp/pp/sp", "recompute", "K/V")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    rows = answer.best or ([] if answer.closest is None else [answer.closest])
    compared = answer.sharded
    for plan in (*rows, *(() if compared is None else [compared])):
        table.add_row(*_cells(plan))
    caption = (
        "dp: pipelines beside each other, pp: ranks of one, sp: ranks that share a sequence. "
        "host: of a whole node."
    )
    if compared is not None:
        missing = format_bytes(compared.missing_bytes)
        what = f"does not fit: {missing} are missing" if compared.missing_bytes else "is slower"
        caption += f" Last row, to compare: FSDP2 {what}."
    if compared is not None or any(plan.layout.sharded for plan in rows):
        caption += (
            " FSDP2: weights, gradients and optimizer are sharded over all GPUs "
            f"({_TORCH_OF_FSDP2}{_older_torch()})."
        )
    caption += f" {fsdp2_refusal}" * bool(fsdp2_refusal)
    if any(plan.layout.virtual > 1 for plan in rows):
        caption += " interleaved N: interleaved_seq1f1b with N stages on each rank."
    if any(plan.layout.schedule == MSP for plan in rows):
        caption += " msp: ranks share the units that fill and drain the pipeline (pp_msp: on)."
    caption += f"\n{answer.num_simulated} of {answer.num_candidates} layouts were simulated."
    if answer.skipped_min_seconds is not None:
        caption += (
            f" {answer.num_skipped} more might be faster and were not, so that this takes seconds;"
            f" each needs {answer.skipped_min_seconds:,.1f} s a step at least."
        )
    if not answer.best and answer.closest is not None:
        missing = format_bytes(answer.closest.missing_bytes)
        which = "None" if answer.skipped_min_seconds is None else "None of those simulated"
        caption += f" {which} fits; the one shown comes closest and lacks {missing}."
    elif answer.closest is not None:
        missing = format_bytes(answer.closest.missing_bytes)
        caption += f" {_name(answer.closest)} does not fit: {missing} are missing."
    return Group(Text(title, style="bold"), table, Text(caption))


def _older_torch() -> str:
    """Text that names the PyTorch of this machine where it is too old for FSDP2."""
    try:
        installed = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""
    old = Version(installed).release < FSDP2_TORCH
    return f"; {installed} is installed here" if old else ""


def _plan_to_dict(plan: ClusterPlan) -> dict[str, Any]:
    return {
        **plan.layout.to_json(),
        "layers": [[held.start, held.stop] for held in plan.layers],
        "chunk_lengths": [end - start for start, end in plan.bounds],
        "step_seconds": plan.step_seconds,
        "tokens_per_second": plan.tokens_per_second,
        "bubble_fraction": plan.bubble_fraction,
        "recompute_fraction": plan.recompute_fraction,
        "peak_bytes": list(plan.peak_bytes),
        "host_bytes": plan.host_bytes,
        "disk_bytes": plan.disk_bytes,
        "missing_bytes": plan.missing_bytes,
        "why": plan.reason,
        "needs": _TORCH_OF_FSDP2 if plan.layout.sharded else None,
    }


def _cells(plan: ClusterPlan) -> tuple[str, ...]:
    layout = plan.layout
    virtual = f" {layout.virtual}" if layout.virtual > 1 else ""
    offloaded = f", {_OFFLOAD_TEXTS[layout.offload]}" if plan.offloads else ""
    offloaded += "" if layout.activation_tier == HOST else f" to {layout.activation_tier}"
    return (
        layout.kind.removesuffix("_seq1f1b") + virtual,
        f"{layout.replicas}/{layout.stages}/{layout.sp}",
        f"{layout.num_chunks}",
        RECOMPUTE_BY_SAVED[layout.saved] + offloaded,
        layout.kv_tier,
        f"{plan.tokens_per_second:,.0f}",
        f"{plan.step_seconds:,.1f} s",
        f"{plan.bubble_fraction:.1%}",
        format_bytes(max(plan.peak_bytes)),
        format_bytes(plan.host_bytes),
    )


def _name(plan: ClusterPlan) -> str:
    layout = plan.layout
    return (
        f"{layout.name}, {layout.num_chunks} chunks, recompute {RECOMPUTE_BY_SAVED[layout.saved]}, "
        f"offload {layout.offload}, K/V on the {layout.kv_tier}"
    )


# -- files of a run --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A run that does what is planned, as two settings files."""

    config: SPPOConfig
    """Settings of every process."""

    title: str
    """Model, length and devices, for a comment at the top of the files."""

    processes: int = 1
    """Processes on all machines together."""

    sharded: bool = False
    """Whether FSDP2 shards the model over them."""

    machines: int = 1
    """Machines, each with the same number of processes."""

    batch_rows: int = 1
    """Rows of a batch of one process."""

    accumulated: int = 1
    """Batches of an optimizer step."""

    dtype_name: str = "bfloat16"
    """Dtype of the compute."""

    @property
    def arguments(self) -> str:
        """The Trainer's arguments that the plan depends on, as text."""
        text = f"per_device_train_batch_size {self.batch_rows}"
        if self.accumulated > 1:
            text += f", gradient_accumulation_steps {self.accumulated}"
        return text

    def command(self, folder: Path) -> str:
        """Return the command that starts the run."""
        words = ["accelerate launch", f"--config_file {folder / _ACCELERATE_FILE}"]
        if self.machines > 1:
            words.append("--machine_rank 0 --main_process_ip ADDRESS_OF_THE_FIRST")
        return " ".join([*words, f"-m sppo_hf.run --config {folder / _SPPO_FILE} train.py"])

    def write(self, folder: Path) -> None:
        """Write both files.

        Raises:
            ConfigError: The folder has other files of these names, or cannot be written to.
        """
        texts = {_ACCELERATE_FILE: self._accelerate_yaml(folder), _SPPO_FILE: self._sppo_yaml()}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                path = folder / name
                if path.exists() and path.read_text(encoding="utf-8") != text:
                    raise ConfigError(
                        f"--write is {str(folder)!r}, which has another {name}. Allowed: a folder "
                        f"without {_ACCELERATE_FILE} and {_SPPO_FILE}, or with the same ones. "
                        "Remedy: name another folder, or remove them."
                    )
            for name, text in texts.items():
                (folder / name).write_text(text, encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--write is {str(folder)!r}, which cannot be used: "
                f"{getattr(error, 'strerror', None) or error}. Remedy: name a folder that can be "
                "written to."
            ) from error

    def _accelerate_yaml(self, folder: Path) -> str:
        precision = {"bfloat16": "bf16", "float16": "fp16"}.get(self.dtype_name, "no")
        distributed = "MULTI_GPU" if self.processes > 1 else "NO"
        settings: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "FSDP" if self.sharded else distributed,
            **({"fsdp_config": FSDP2_SETTINGS} if self.sharded else {}),
            "mixed_precision": precision,
            "num_machines": self.machines,
            "num_processes": self.processes,
        }
        if self.machines > 1:
            settings |= {
                "machine_rank": 0,
                "main_process_ip": "127.0.0.1",
                "main_process_port": 29500,
                "rdzv_backend": "static",
                "same_network": True,
            }
        needs = f" Needs {_TORCH_OF_FSDP2}." if self.sharded else ""
        head = f"# {self.title}.{needs} Start{' on each machine' if self.machines > 1 else ''}:\n"
        return head + f"# {self.command(folder)}\n" + to_yaml(settings)

    def _sppo_yaml(self) -> str:
        plain = SPPOConfig().to_dict()
        chosen = {k: v for k, v in self.config.to_dict().items() if v != plain[k]}
        return f"# {self.title}.\n# The training script's: {self.arguments}.\n" + to_yaml(chosen)


def launch_of_plan(arguments: PlanArguments, request: PlanRequest, plan: Plan) -> Launch:
    """Return the run of one device's plan: its chunks, and the settings that were given.

    Which layers are offloaded or recomputed the run decides as the plan did, from these settings.
    """
    config = request.config
    return Launch(
        config=config.replace(
            **{"host_memory": None, **_given_budgets(arguments, config)},
            chunk_lengths=[end - start for start, end in plan.bounds],
            planned_for=planned_for(request.shape, request.total_tokens),
            num_chunks="auto",
            partition="auto",
        ),
        title=f"{arguments.title}, {request.total_tokens:,} tokens, one device",
        batch_rows=request.batch_rows,
        dtype_name=arguments.dtype,
    )


def launch_of_layout(
    arguments: PlanArguments,
    request: ClusterRequest,
    base: SPPOConfig,
    plan: ClusterPlan,
) -> Launch:
    """Return the run of a layout: every decision of it as a setting.

    `base` are the settings of the command line, as for one device.
    """
    layout = plan.layout
    # The host budget of a process is its share of the node's.
    local = min(layout.devices, request.gpus_per_node)
    given = SPPOConfig(**_given_budgets(arguments, base))
    for tier in (TIERS[name] for name in offload_tiers()):
        if tier.named(given) is not None:
            # Stages reach their peaks at different times, so in a pipeline no share of the node's
            # host memory or disk is the right budget of one.
            share = (request.budgets.of(tier.name) or 0) // local
            given = tier.with_budget(given, share if layout.stages == 1 else None)
    settings: dict[str, Any] = {
        "chunk_lengths": [end - start for start, end in plan.bounds],
        "planned_for": planned_for(request.cost.shape, request.total_tokens),
        "recompute": RECOMPUTE_BY_SAVED[layout.saved],
        "offload": layout.offload,
        "offload_kv": "none" if layout.kv_tier == "device" else "full",
    }
    in_pipeline = layout.stages > 1
    if in_pipeline:
        settings |= {
            "pp_size": layout.stages,
            "pp_virtual_stages": layout.virtual,
            "pp_layers": [len(held) for held in plan.layers],
            **({"pp_msp": "on"} if layout.schedule == MSP else {"pp_schedule": layout.schedule}),
        }
    else:
        settings["order"] = layout.order
    if layout.activation_tier != HOST:
        settings["offload_tier"] = layout.activation_tier
    elif layout.offload != "none" and allowed_behind_host(base, request.cost.profile.kind):
        settings["offload_tier"] = HOST
    processes = layout.devices
    machines = max(1, -(-processes // request.gpus_per_node))
    if layout.sp > 1:
        settings["sp_size"] = layout.sp
        # Machines have equally many processes, so groups of sp_size may not fit on one.
        if machines > 1 and processes // machines % layout.sp:
            settings["sp_across_nodes"] = True
    rows = request.rows // layout.replicas
    return Launch(
        config=given.replace(**settings),
        title=f"{arguments.title}, {request.total_tokens:,} tokens, {layout.name}",
        processes=processes,
        sharded=layout.sharded,
        machines=machines,
        # The rows of a batch pass a pipeline one after the other. One stage accumulates over them.
        batch_rows=rows if in_pipeline else 1,
        accumulated=1 if in_pipeline else rows,
        dtype_name=arguments.dtype,
    )


def actions_of_layout(
    request: ClusterRequest, single: PlanRequest, launch: Launch, plan: ClusterPlan
) -> list[list[str]] | None:
    """Return the actions of every rank of one replica, for all of its rows; replicas are alike.

    With a single stage, the program of one device is listed, with its layers and for one row. None
    if there are more actions than are listed.
    """
    layout = plan.layout
    if layout.stages == 1:
        on_device = replace(
            single,
            config=launch.config,
            shape=request.bounds_of_layout.cost(layout).shape,
            sharded=layout.sharded,
            total_tokens=request.total_tokens,
            batch_rows=1,
            accumulates=launch.accumulated > 1,
            # Of several processes none has its weights on the host by itself.
            on_host_refusal="",
        )
        return actions_to_list(make_plan(on_device)) * layout.sp
    rows = request.rows // layout.replicas
    units = rows * layout.num_chunks * layout.stages * layout.virtual
    if _ACTIONS_PER_UNIT * units > _MAX_LISTED_ACTIONS:
        return None
    schedule = generate(
        layout.schedule, Size(layout.stages, rows, layout.num_chunks, layout.virtual)
    )
    costs = PipelineCost(
        schedule,
        request.cost,
        plan.bounds,
        saved=layout.saved,
        offload=layout.offload,
        activation_tier=layout.activation_tier,
        kv_tier=layout.kv_tier,
    )
    listed = costs.lowered(schedule, reduce=layout.replicas > 1).texts()
    return [texts for texts in listed for _ in range(layout.sp)]


def _given_budgets(arguments: PlanArguments, config: SPPOConfig) -> Mapping[str, Any]:
    """Return the budgets and the hardware profile that the command line names, as settings."""
    has_disk = config.offload_dir is not None
    if has_disk and arguments.write is not None and arguments.offload_dir is None:
        raise ConfigError(
            "--write was given with --disk-memory, but without a folder on that disk. "
            "Allowed: with --offload-dir, or without a disk. Remedy: add --offload-dir DIR."
        )
    given: dict[str, Any] = {
        "device_memory": config.device_memory,
        # Assumed host memory is no setting of the machine.
        "host_memory": None if arguments.host_memory is None else config.host_memory,
        "hardware": arguments.hardware,
        "offload_dir": config.offload_dir,
        "disk_memory": config.disk_memory if has_disk else None,
        "more_tiers": config.more_tiers,
    }
    return {name: value for name, value in given.items() if value is not None}
