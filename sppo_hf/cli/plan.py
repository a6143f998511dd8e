"""`sppo plan MODEL --seq-len N`: what would be done with each chunk, and how policies compare.

With `--gpus`: which layouts over several devices are fastest, and why. Only arguments, printing and
files; answering is `sppo_hf.planning.plan_request`, of layouts `sppo_hf.planning.cluster`. Neither
torch nor Transformers is imported, and matplotlib only to draw.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sppo_hf.cli import planning_arguments as given
from sppo_hf.cli.plan_write import Launch, actions_of_layout, launch_of_layout, launch_of_plan
from sppo_hf.config import parse_bytes
from sppo_hf.errors import ConfigError
from sppo_hf.planning.activation_modes import RECOMPUTE_BY_SAVED
from sppo_hf.planning.choices import read_budgets
from sppo_hf.planning.cluster import ClusterAnswer, ClusterPlan, ClusterQuestion, solve_cluster
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.hardware import UNKNOWN_LINK
from sppo_hf.planning.layouts import SearchSpace
from sppo_hf.planning.plan_request import (
    PlanResult,
    PolicyResult,
    compare_policies,
    plan_for,
    request_plan,
    timeline_of,
)
from sppo_hf.planning.tiers import HOST, TIERS, tiers_behind_host
from sppo_hf.reporting.chrome_trace import write_trace
from sppo_hf.reporting.figures import ENDINGS, draw_plan
from sppo_hf.reporting.plan_json import actions_to_list, answer_to_dict, policies_to_list
from sppo_hf.reporting.plan_tables import plan_tables
from sppo_hf.rules import format_bytes
from sppo_hf.schedule.generate import MSP

_COLUMNS = (
    *("schedule", "dp/pp/sp", "chunks", "recompute", "K/V", "tokens/s", "step", "idle"),
    *("device", "host"),
)
_MOST_ACTIONS = 240_000
"""Simulated for one answer; at about ten microseconds each that is two to three seconds."""

_OFFLOADED = {"full": "offloaded", "sppo": "partly offloaded"}


def plan(
    model: given.Model,
    seq_len: given.SeqLen,
    device_memory: given.DeviceMemory = None,
    host_memory: given.HostMemory = None,
    disk: given.Disk = None,
    offload_dir: given.OffloadDir = None,
    hardware: given.Hardware = None,
    lora: given.Lora = None,
    rows: given.Rows = 1,
    accumulate: given.Accumulate = False,
    dtype: given.ComputeDtype = given.Dtype.bfloat16,
    partition: given.Cut = given.Partition.auto,
    num_chunks: given.NumChunks = "auto",
    recompute: given.Recompute = None,
    attention_once: given.AttentionOnce = False,
    offload_kv: given.OffloadKv = given.Mode.auto,
    weights: given.Weights = given.Place.auto,
    optimizer: given.Optimizer = given.Place.auto,
    policy: Annotated[
        str,
        typer.Option(
            "--offload",
            help=f"What leaves the device, one of {', '.join(given.POLICIES)}: auto solves for"
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
    as_json: given.AsJson = False,
) -> None:
    """Show the plan for training MODEL at a length on a machine, beside every fixed policy.

    The machine need not be this one, and no weights are read.

    Exit code 0: it fits. 1: it does not. 2: bad input.
    """
    arguments = given.from_options(given.PlanningArguments, locals())
    if gpus > 1:
        _plan_cluster(arguments, gpus, gpus_per_node, link, as_json, figure or trace, write)
    _plan_one(arguments, as_json, figure, trace, write)


def _plan_one(
    arguments: given.PlanningArguments,
    as_json: bool,
    figure: Path | None,
    trace: Path | None,
    write: Path | None,
) -> NoReturn:
    with given.bad_input(as_json):
        given.check_figure(figure)
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
        given.echo_json({**answer_to_dict(answer), **said})
    else:
        out = given.console()
        out.print(plan_tables(answer, results, arguments.title))
        out.print(arguments.hardware_note(question), style="dim", highlight=False)
        _print_launch(launch, write)
    raise typer.Exit(given.FITS if answer.fits else given.FITS_NOT)


def _plan_cluster(
    arguments: given.PlanningArguments,
    gpus: int,
    gpus_per_node: int,
    link: str | None,
    as_json: bool,
    file: Path | None,
    write: Path | None,
) -> NoReturn:
    with given.bad_input(as_json):
        if file is not None:
            raise ConfigError(
                f"{file} was asked for with --gpus {gpus}. Allowed: pictures and traces of one "
                "device's plan. Remedy: `sppo simulate` draws a layout over several."
            )
        question = _cluster_question(arguments, gpus=gpus, gpus_per_node=gpus_per_node, link=link)
        answer = solve_cluster(question, most_actions=_MOST_ACTIONS)
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
        given.echo_json({**_cluster_to_dict(answer), **said})
    else:
        out = given.console()
        out.print(_cluster_table(answer, f"{arguments.title} on {gpus} devices"))
        shared = dataclasses.replace(arguments, devices_of_host=min(gpus, gpus_per_node))
        out.print(shared.hardware_note(shared.question()), style="dim", highlight=False)
        _print_launch(launch, write)
    raise typer.Exit(given.FITS if answer.best else given.FITS_NOT)


def _launched(launch: Launch | None, folder: Path | None) -> dict[str, str]:
    """Returns how to start what was written."""
    if launch is None or folder is None:
        return {}
    return {"launch": launch.command(folder), "arguments": launch.arguments}


def _print_launch(launch: Launch | None, folder: Path | None) -> None:
    said = _launched(launch, folder)
    if said:
        out = given.console()
        out.print(f"Launch, with {said['arguments']}:", highlight=False)
        out.print(said["launch"], soft_wrap=True, highlight=False)
    elif folder is not None:
        given.console(stderr=True).print("Nothing fits, so there is nothing to write.")


def _compare(arguments: given.PlanningArguments, answer: PlanResult) -> Sequence[PolicyResult]:
    """Lays all policies side by side, whichever of them was asked for."""
    if arguments.policy == "auto":
        return compare_policies(answer.question, answer.plan or plan_for(answer.question))
    automatic = dataclasses.replace(arguments, policy="auto").question()
    return compare_policies(automatic, plan_for(automatic))


def _write_files(answer: PlanResult, title: str, figure: Path | None, trace: Path | None) -> None:
    if figure is None and trace is None:
        return
    if answer.plan is None:
        given.console(stderr=True).print("Nothing fits, so there is no plan to draw or trace.")
        return
    timeline = timeline_of(answer.plan)
    budgets = {tier: answer.budgets.of(tier) for tier in TIERS}
    with given.writing(figure, trace):
        if figure is not None:
            draw_plan(answer.plan, timeline, budgets=budgets, path=figure, title=title)
        if trace is not None:
            write_trace(timeline, trace)


def _cluster_question(
    arguments: given.PlanningArguments, *, gpus: int, gpus_per_node: int, link: str | None
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
        space=SearchSpace(frame_tiers=(HOST, *tiers_behind_host()) if has_disk else (HOST,)),
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
        **plan.layout._asdict(),
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
    offloaded += "" if layout.frame_tier == HOST else f" to {layout.frame_tier}"
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
