"""`sppo plan MODEL --seq-len N`: what would be done with each chunk, and how policies compare.

With `--gpus`: which layouts over several devices are fastest, and why. Only arguments, printing and
files; answering is `sppo_hf.planning.plan_request`, of layouts `sppo_hf.planning.cluster`. Neither
torch nor Transformers is imported, and matplotlib only to draw.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sppo_hf.cli import common
from sppo_hf.cli.common import PlanningArguments
from sppo_hf.config import SPPOConfig, parse_bytes
from sppo_hf.errors import ConfigError
from sppo_hf.planning.activation_modes import RECOMPUTE_BY_SAVED
from sppo_hf.planning.choices import read_budgets
from sppo_hf.planning.chunk_bounds import Bounds
from sppo_hf.planning.cluster import ClusterAnswer, ClusterPlan, ClusterQuestion, solve_cluster
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.hardware import UNKNOWN_LINK
from sppo_hf.planning.layouts import SearchSpace
from sppo_hf.planning.pipeline_cost import PipelineCost
from sppo_hf.planning.plan import Plan, PlanRequest, make_plan, planned_for
from sppo_hf.planning.plan_request import (
    PlanResult,
    PolicyResult,
    compare_policies,
    plan_for,
    request_plan,
    timeline_of,
)
from sppo_hf.planning.tiers import HOST, TIERS, tiers_behind_host
from sppo_hf.reading import write_yaml
from sppo_hf.reporting.chrome_trace import write_trace
from sppo_hf.reporting.figures import ENDINGS, draw_plan
from sppo_hf.reporting.plan_json import actions_to_list, answer_to_dict, policies_to_list
from sppo_hf.reporting.plan_tables import plan_tables
from sppo_hf.rules import format_bytes
from sppo_hf.schedule.generate import MSP, Size, generate

_COLUMNS = (
    *("schedule", "dp/pp/sp", "chunks", "recompute", "K/V", "tokens/s", "step", "idle"),
    *("device", "host"),
)
_MAX_SIMULATED_ACTIONS = 240_000
"""Simulated for one answer; at about ten microseconds each that is two to three seconds."""

_OFFLOADED = {"full": "offloaded", "sppo": "partly offloaded"}


def plan(
    model: common.Model,
    seq_len: common.SeqLen,
    device_memory: common.DeviceMemory = None,
    host_memory: common.HostMemory = None,
    disk: common.Disk = None,
    offload_dir: common.OffloadDir = None,
    hardware: common.Hardware = None,
    lora: common.Lora = None,
    rows: common.Rows = 1,
    accumulate: common.Accumulate = False,
    dtype: common.ComputeDtype = common.Dtype.bfloat16,
    partition: common.Cut = common.Partition.auto,
    num_chunks: common.NumChunks = "auto",
    recompute: common.Recompute = None,
    attention_once: common.AttentionOnce = False,
    offload_kv: common.OffloadKv = common.Mode.auto,
    weights: common.Weights = common.Place.auto,
    optimizer: common.Optimizer = common.Place.auto,
    policy: Annotated[
        str,
        typer.Option(
            "--offload",
            help=f"What leaves the device, one of {', '.join(common.POLICIES)}: auto solves for"
            " time; the others (sppo is the paper's) are fixed, and recompute nothing unless"
            " --recompute says so.",
        ),
    ] = "auto",
    figure: Annotated[
        Path | None,
        typer.Option(help=f"Draw the plan into a file ({', '.join(ENDINGS)})."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the simulated step as JSON for ui.perfetto.dev."),
    ] = None,
    gpus: Annotated[
        int,
        typer.Option(
            min=1, max=2**16, help="Devices; more than one: the best layouts over them, and why."
        ),
    ] = 1,
    gpus_per_node: Annotated[
        int, typer.Option(min=1, max=2**16, help="Devices that share a host, with --gpus.")
    ] = 8,
    link: Annotated[
        str | None,
        typer.Option(
            help="Bytes per second between devices of different nodes, each way.  [default: the "
            "profile's, or 25GiB]"
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Write accelerate.yaml and sppo.yaml into a folder, and say how to launch them.",
            metavar="DIR",
        ),
    ] = None,
    as_json: common.AsJson = False,
) -> None:
    """Show the plan for training MODEL at a length on a machine, beside every fixed policy.

    The machine need not be this one, and no weights are read.

    Exit code 0: it fits. 1: it does not. 2: bad input.
    """
    arguments = common.from_options(common.PlanningArguments, locals())
    if gpus > 1:
        _plan_cluster(arguments, gpus, gpus_per_node, link, as_json, figure or trace, write)
    _plan_one(arguments, as_json, figure, trace, write)


def _plan_one(
    arguments: common.PlanningArguments,
    as_json: bool,
    figure: Path | None,
    trace: Path | None,
    write: Path | None,
) -> NoReturn:
    with common.bad_input(as_json):
        common.check_figure(figure)
        question = arguments.question()
        answer = request_plan(question)
        results = _compare(arguments, answer)
        _write_files(answer, arguments.title, figure, trace)
        launch = None
        if write is not None and answer.plan is not None:
            launch = launch_of_plan(arguments, question, answer.plan)
            launch.write(write)
    if as_json:
        policies, actions = policies_to_list(results), actions_to_list(answer.plan)
        said = {"policies": policies, "actions": actions, **_launched(launch, write)}
        common.echo_json({**answer_to_dict(answer), **said})
    else:
        out = common.console()
        out.print(plan_tables(answer, results, arguments.title))
        out.print(arguments.hardware_note(question), style="dim", highlight=False)
        _print_launch(launch, write)
    raise typer.Exit(common.FITS if answer.fits else common.FITS_NOT)


def _plan_cluster(
    arguments: common.PlanningArguments,
    gpus: int,
    gpus_per_node: int,
    link: str | None,
    as_json: bool,
    file: Path | None,
    write: Path | None,
) -> NoReturn:
    with common.bad_input(as_json):
        if file is not None:
            raise ConfigError(
                f"{file} was asked for with --gpus {gpus}. Allowed: pictures and traces of one "
                "device's plan. Remedy: `sppo simulate` draws a layout over several."
            )
        question = _cluster_question(arguments, gpus=gpus, gpus_per_node=gpus_per_node, link=link)
        answer = solve_cluster(question, most_actions=_MAX_SIMULATED_ACTIONS)
        launch: Launch | None = None
        actions: list[list[str]] | None = []
        if answer.best and (as_json or write is not None):
            best, single = answer.best[0], arguments.question()
            launch = launch_of_layout(
                arguments, question, single.config, best, written=write is not None
            )
            if write is not None:
                launch.write(write)
            if as_json:
                actions = actions_of_layout(question, single, launch, best)
    if as_json:
        said = {"actions": actions, **_launched(launch, write)}
        common.echo_json({**_cluster_to_dict(answer), **said})
    else:
        out = common.console()
        out.print(_cluster_table(answer, f"{arguments.title} on {gpus} devices"))
        shared = dataclasses.replace(arguments, devices_of_host=min(gpus, gpus_per_node))
        out.print(shared.hardware_note(shared.question()), style="dim", highlight=False)
        _print_launch(launch, write)
    raise typer.Exit(common.FITS if answer.best else common.FITS_NOT)


def _launched(launch: Launch | None, folder: Path | None) -> dict[str, str]:
    """Returns how to start what was written."""
    if launch is None or folder is None:
        return {}
    return {"launch": launch.command(folder), "arguments": launch.arguments}


def _print_launch(launch: Launch | None, folder: Path | None) -> None:
    said = _launched(launch, folder)
    if said:
        out = common.console()
        out.print(f"Launch, with {said['arguments']}:", highlight=False)
        out.print(said["launch"], soft_wrap=True, highlight=False)
    elif folder is not None:
        common.console(stderr=True).print("Nothing fits, so there is nothing to write.")


def _compare(arguments: common.PlanningArguments, answer: PlanResult) -> Sequence[PolicyResult]:
    """Lays all policies side by side, whichever of them was asked for."""
    if arguments.policy == "auto":
        return compare_policies(answer.question, answer.plan or plan_for(answer.question))
    automatic = dataclasses.replace(arguments, policy="auto").question()
    return compare_policies(automatic, plan_for(automatic))


def _write_files(answer: PlanResult, title: str, figure: Path | None, trace: Path | None) -> None:
    if figure is None and trace is None:
        return
    if answer.plan is None:
        common.console(stderr=True).print("Nothing fits, so there is no plan to draw or trace.")
        return
    timeline = timeline_of(answer.plan)
    budgets = {tier: answer.budgets.of(tier) for tier in TIERS}
    with common.writing(figure, trace):
        if figure is not None:
            draw_plan(answer.plan, timeline, budgets=budgets, path=figure, title=title)
        if trace is not None:
            write_trace(timeline, trace)


def _cluster_question(
    arguments: common.PlanningArguments, *, gpus: int, gpus_per_node: int, link: str | None
) -> ClusterQuestion:
    """Reads the model, length and machine of the command line."""
    chosen = {
        "--num-chunks": arguments.num_chunks != "auto",
        "--partition": arguments.partition.value != "auto",
        "--offload-kv": arguments.offload_kv.value != "auto",
        "--weights": arguments.weights.value == "host",
        "--optimizer": arguments.optimizer.value == "host",
        "--recompute": arguments.recompute is not None,
        "--offload": arguments.policy != "auto",
    }
    for option in (name for name, is_chosen in chosen.items() if is_chosen):
        raise ConfigError(
            f"{option} was given with --gpus {gpus}. Allowed: not both; the search over several "
            "devices chooses chunks and what is kept. Remedy: drop one of them, or ask `sppo "
            "simulate` about one layout."
        )
    devices_of_host = min(gpus, gpus_per_node)
    question = dataclasses.replace(arguments, devices_of_host=devices_of_host).question()
    profile = question.device.profile
    assert profile is not None, "a question from the command line has a profile"
    rate = profile.network_bytes_per_second or UNKNOWN_LINK
    if link is not None:
        rate = parse_bytes(link, field="--link", total_bytes=None)
    has_disk = question.config.offload_dir is not None
    for tier in TIERS.values():
        profile = tier.of_one_device(profile, devices_of_host)
    cost = ModelCost(shape=question.shape, profile=profile, dtype_name=question.dtype_name)
    return ClusterQuestion(
        cost=cost,
        total_tokens=question.total_tokens,
        rows=question.batch_rows,
        gpus=gpus,
        budgets=read_budgets(question.config, question.device),
        gpus_per_node=gpus_per_node,
        link_bytes_per_second=rate,
        node_bytes_per_second=profile.node_bytes_per_second,
        space=SearchSpace(activation_tiers=(HOST, *tiers_behind_host()) if has_disk else (HOST,)),
        shares_units=not question.shape.has_states,
    )


def _cluster_to_dict(answer: ClusterAnswer) -> dict[str, Any]:
    """Returns an answer in plain JSON types."""
    return {
        "fits": bool(answer.best),
        "plans": [_plan_to_dict(plan) for plan in answer.best],
        "closest": None if answer.closest is None else _plan_to_dict(answer.closest),
        "tried": answer.tried,
        "candidates": answer.candidates,
        "unseen": answer.unseen,
        "unseen_step_seconds": answer.unseen_seconds,
    }


def _cluster_table(answer: ClusterAnswer, title: str) -> Group:
    """Returns the best layouts, or the one that comes closest, as a table.

    Of "dp/pp/sp", dp are pipelines beside each other, pp the ranks of one, and sp the devices
    that share each of a rank's chunks. "interleaved 4" has four stages on each rank. "host" is a
    whole node's.
    """
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for name in _COLUMNS:
        left = name in ("schedule", "dp/pp/sp", "recompute", "K/V")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    rows = answer.best or ([] if answer.closest is None else [answer.closest])
    for plan in rows:
        table.add_row(*_cells(plan))
    said = (
        "dp: pipelines beside each other, pp: ranks of one, sp: ranks that share a sequence. "
        "host: of a whole node."
    )
    if any(plan.layout.virtual > 1 for plan in rows):
        said += " interleaved N: interleaved_seq1f1b with N stages on each rank."
    if any(plan.layout.schedule == MSP for plan in rows):
        said += " msp: ranks share the units that fill and drain the pipeline (pp_msp: on)."
    said += f"\n{answer.tried} of {answer.candidates} layouts were simulated."
    if answer.unseen_seconds is not None:
        said += (
            f" {answer.unseen} more might be faster and were not, so that this takes seconds; each"
            f" needs {answer.unseen_seconds:,.1f} s a step at least."
        )
    if not answer.best and answer.closest is not None:
        missing = format_bytes(answer.closest.missing_bytes)
        which = "None" if answer.unseen_seconds is None else "None of those simulated"
        said += f" {which} fits; the one shown comes closest and lacks {missing}."
    elif answer.closest is not None:
        missing = format_bytes(answer.closest.missing_bytes)
        said += f" {_name(answer.closest)} does not fit: {missing} are missing."
    return Group(Text(title, style="bold"), table, Text(said))


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
        "why": plan.why,
    }


def _cells(plan: ClusterPlan) -> tuple[str, ...]:
    layout = plan.layout
    virtual = f" {layout.virtual}" if layout.virtual > 1 else ""
    offloaded = f", {_OFFLOADED[layout.offload]}" if plan.offloads else ""
    offloaded += "" if layout.activation_tier == HOST else f" to {layout.activation_tier}"
    return (
        layout.schedule.removesuffix("_seq1f1b") + virtual,
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
        f"{layout.schedule} with dp/pp/sp {layout.replicas}/{layout.stages}/{layout.sp}, "
        f"{layout.num_chunks} chunks, recompute {RECOMPUTE_BY_SAVED[layout.saved]}, offload "
        f"{layout.offload}, K/V on the {layout.kv_tier}"
    )


_ACCELERATE, _SPPO = "accelerate.yaml", "sppo.yaml"

# Listed with --json: about three seconds, and 3 MB. A unit has about so many.
_MAX_LISTED_ACTIONS = 300_000
_ACTIONS_PER_UNIT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A run: its settings, processes and rows."""

    config: SPPOConfig
    """The settings of every process."""

    title: str
    """Model, length and devices, for whoever opens the files."""

    processes: int = 1
    """Of all machines."""

    machines: int = 1
    """As many processes on each."""

    batch_rows: int = 1
    """Rows that a process is given at once."""

    accumulated: int = 1
    """Batches of a step."""

    dtype_name: str = "bfloat16"
    """Dtype of the compute."""

    @property
    def arguments(self) -> str:
        """What the training script must be told."""
        said = f"per_device_train_batch_size {self.batch_rows}"
        if self.accumulated > 1:
            said += f", gradient_accumulation_steps {self.accumulated}"
        return said

    def command(self, folder: Path) -> str:
        """Returns what starts it."""
        words = ["accelerate launch", f"--config_file {folder / _ACCELERATE}"]
        if self.machines > 1:
            words.append("--machine_rank 0 --main_process_ip ADDRESS_OF_THE_FIRST")
        return " ".join([*words, f"-m sppo_hf.run --config {folder / _SPPO} train.py"])

    def write(self, folder: Path) -> None:
        """Writes both files.

        Raises:
            ConfigError: the folder has other files of these names, or cannot be written to.
        """
        texts = {_ACCELERATE: self._accelerate(folder), _SPPO: self._sppo()}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                path = folder / name
                if path.exists() and path.read_text(encoding="utf-8") != text:
                    raise ConfigError(
                        f"--write is {str(folder)!r}, which has another {name}. Allowed: a folder "
                        f"without {_ACCELERATE} and {_SPPO}, or with the same ones. Remedy: name "
                        "another folder, or remove them."
                    )
            for name, text in texts.items():
                (folder / name).write_text(text, encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--write is {str(folder)!r}, which cannot be used: "
                f"{getattr(error, 'strerror', None) or error}. Remedy: name a folder that can be "
                "written to."
            ) from error

    def _accelerate(self, folder: Path) -> str:
        several = self.processes > 1
        precision = {"bfloat16": "bf16", "float16": "fp16"}.get(self.dtype_name, "no")
        settings: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "MULTI_GPU" if several else "NO",
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
        head = f"# {self.title}. Start{' on each machine' if self.machines > 1 else ''}:\n"
        return head + f"# {self.command(folder)}\n" + _yaml(settings)

    def _sppo(self) -> str:
        plain = SPPOConfig().to_dict()
        chosen = {
            name: value for name, value in self.config.to_dict().items() if value != plain[name]
        }
        return f"# {self.title}.\n# The training script's: {self.arguments}.\n" + _yaml(chosen)


def launch_of_plan(arguments: PlanningArguments, question: PlanRequest, plan: Plan) -> Launch:
    """Returns the run of one device's plan: its chunks, and the settings that were asked for.

    Which layers leave or are recomputed the run decides as the plan did, from the same settings.
    """
    config = question.config
    return Launch(
        config=config.replace(
            **{"host_memory": None, **_given(arguments, config)},
            **_cut(plan.bounds),
            planned_for=planned_for(question.shape, question.total_tokens),
            num_chunks="auto",
            partition="auto",
        ),
        title=f"{arguments.title}, {question.total_tokens:,} tokens, one device",
        batch_rows=question.batch_rows,
        dtype_name=str(arguments.dtype),
    )


def launch_of_layout(
    arguments: PlanningArguments,
    question: ClusterQuestion,
    base: SPPOConfig,
    plan: ClusterPlan,
    *,
    written: bool,
) -> Launch:
    """Returns the run of a layout: every decision of it as a setting.

    Files (`written`) name a folder where there is a disk.
    """
    layout = plan.layout
    # Of what a node has, what each of its processes may take.
    local = min(layout.devices, question.gpus_per_node)
    given = {
        name: value // local if name in ("host_memory", "disk_memory") else value
        for name, value in _given(arguments, base, written=written).items()
        # Each stage of a pipeline would plan for its own peak, as if all were at theirs at once.
        if layout.stages == 1 or name not in ("host_memory", "disk_memory")
    }
    settings: dict[str, Any] = {
        **given,
        **_cut(plan.bounds),
        "planned_for": planned_for(question.cost.shape, question.total_tokens),
        "recompute": RECOMPUTE_BY_SAVED[layout.saved],
        "offload": layout.offload,
        "offload_kv": "none" if layout.kv_tier == "device" else "full",
    }
    pipeline = layout.stages > 1
    if pipeline:
        settings |= {
            "pp_size": layout.stages,
            "pp_virtual_stages": layout.virtual,
            "pp_layers": [len(held) for held in plan.layers],
        }
        shares = layout.schedule == MSP
        settings |= {"pp_msp": "on"} if shares else {"pp_schedule": layout.schedule}
    if layout.activation_tier != HOST:
        settings["offload_tier"] = layout.activation_tier
    elif layout.offload != "none" and base.offload_dir is not None:
        settings["offload_tier"] = HOST
    processes = layout.stages * layout.replicas * layout.sp
    machines = max(1, -(-processes // question.gpus_per_node))
    if layout.sp > 1:
        settings["sp_size"] = layout.sp
        # The launcher starts as many processes on each machine.
        if machines > 1 and processes // machines % layout.sp:
            settings["sp_across_nodes"] = True
    rows = question.rows // layout.replicas
    return Launch(
        config=SPPOConfig.from_dict(settings),
        title=f"{arguments.title}, {question.total_tokens:,} tokens, {processes} devices",
        processes=processes,
        machines=machines,
        # Rows of a batch pass a pipeline one after the other; a device takes one at a time.
        batch_rows=rows if pipeline else 1,
        accumulated=1 if pipeline else rows,
        dtype_name=str(arguments.dtype),
    )


def actions_of_layout(
    question: ClusterQuestion, single: PlanRequest, launch: Launch, plan: ClusterPlan
) -> list[list[str]] | None:
    """Returns what every rank of one replica does, all rows of it; the others do the same.

    A single stage is a device of its own, whose program lists single layers and one row. None where
    there are more actions than are worth listing.
    """
    layout = plan.layout
    if layout.stages == 1:
        shared = layout.sp > 1
        config = launch.config
        request = replace(
            single,
            # As `sppo_hf.engine.plan_cache` does for ranks that share sequences.
            config=config.replace(order="by_chunk") if shared else config,
            shape=replace(single.shape, sp=layout.sp),
            total_tokens=question.total_tokens,
            batch_rows=1,
            accumulates=launch.accumulated > 1,
            # Of several processes none has its weights on the host by itself.
            on_host=False,
        )
        made = make_plan(request)
        return [[str(action) for action in made.program().actions] for _ in range(layout.sp)]
    rows = question.rows // layout.replicas
    if (
        _ACTIONS_PER_UNIT * rows * layout.num_chunks * layout.stages * layout.virtual
        > _MAX_LISTED_ACTIONS
    ):
        return None
    schedule = generate(
        layout.schedule, Size(layout.stages, rows, layout.num_chunks, layout.virtual)
    )
    costs = PipelineCost(
        schedule,
        question.cost,
        plan.bounds,
        saved=layout.saved,
        offload=layout.offload,
        activation_tier=layout.activation_tier,
        kv_tier=layout.kv_tier,
    )
    listed = costs.lowered(schedule, reduce=layout.replicas > 1).texts()
    return [texts for texts in listed for _ in range(layout.sp)]


def _given(
    arguments: PlanningArguments, config: SPPOConfig, *, written: bool = True
) -> Mapping[str, Any]:
    """Machine and budgets of the command line, where they were named."""
    given: dict[str, Any] = {
        "device_memory": config.device_memory,
        # What was assumed of a machine is not a setting of it.
        "host_memory": None if arguments.host_memory is None else config.host_memory,
        "hardware": arguments.hardware,
    }
    if config.offload_dir is not None:
        if written and arguments.offload_dir is None:
            raise ConfigError(
                "--write was given with --disk-memory, but without a folder on that disk. "
                "Allowed: with --offload-dir, or without a disk. Remedy: add --offload-dir DIR."
            )
        given |= {"offload_dir": config.offload_dir, "disk_memory": config.disk_memory}
    return {name: value for name, value in given.items() if value is not None}


def _cut(bounds: Bounds) -> Mapping[str, Any]:
    return {"chunk_lengths": [end - start for start, end in bounds]}


def _yaml(settings: Mapping[str, Any]) -> str:
    file = io.StringIO()
    write_yaml(settings, file)
    return file.getvalue()
