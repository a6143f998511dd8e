"""`sppo plan MODEL --seq-len N`: what would be done with each chunk, and how policies compare.

Only arguments, printing and files; answering is `sppo_hf.planning.plan_request`. Neither torch nor
Transformers is imported, and matplotlib only to draw.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from sppo_hf.cli import planning_arguments as given
from sppo_hf.cli.plan_cluster import (
    answer_cluster,
    cluster_question,
    cluster_table,
    cluster_to_dict,
)
from sppo_hf.cli.plan_write import Launch, actions_of_layout, launch_of_layout, launch_of_plan
from sppo_hf.errors import ConfigError
from sppo_hf.planning.plan_request import (
    PlanResult,
    PolicyResult,
    compare_policies,
    plan_for,
    request_plan,
    timeline_of,
)
from sppo_hf.planning.tiers import TIERS
from sppo_hf.reporting.answer_tables import plan_tables
from sppo_hf.reporting.chrome_trace import write_trace
from sppo_hf.reporting.plan_figure import draw_plan
from sppo_hf.reporting.plan_json import actions_to_list, answer_to_dict, policies_to_list
from sppo_hf.reporting.schedule_figure import ENDINGS


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
        question = cluster_question(arguments, gpus=gpus, gpus_per_node=gpus_per_node, link=link)
        answer = answer_cluster(question)
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
        given.echo_json({**cluster_to_dict(answer), **said})
    else:
        out = given.console()
        out.print(cluster_table(answer, f"{arguments.title} on {gpus} devices"))
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
    """Writes the picture and the trace that were asked for.

    Raises:
        ConfigError: a file cannot be written, there is no plan to draw, or matplotlib is missing.
    """
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
