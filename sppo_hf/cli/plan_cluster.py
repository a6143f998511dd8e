"""`sppo plan MODEL --gpus 8 --seq-len N`: which layouts over several devices are fastest, and why.

Only arguments and printing; the search is `sppo_hf.planning.cluster`. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from sppo_hf.cli.planning_arguments import PlanningArguments
from sppo_hf.config import parse_bytes
from sppo_hf.errors import ConfigError
from sppo_hf.planning.activation_modes import RECOMPUTE_BY_SAVED
from sppo_hf.planning.choices import read_budgets
from sppo_hf.planning.cluster import (
    ClusterAnswer,
    ClusterPlan,
    ClusterQuestion,
    SearchSpace,
    solve_cluster,
)
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.hardware import UNKNOWN_LINK
from sppo_hf.planning.tiers import HOST, TIERS, tiers_behind_host
from sppo_hf.rules import format_bytes
from sppo_hf.schedule.generate import MSP

_COLUMNS = (
    *("schedule", "dp/pp/sp", "chunks", "recompute", "K/V", "tokens/s", "step", "idle"),
    *("device", "host"),
)
_MOST_ACTIONS = 240_000
"""Simulated for one answer; at about ten microseconds each that is two to three seconds."""

_OFFLOADED = {"full": "offloaded", "sppo": "partly offloaded"}


def cluster_question(
    arguments: PlanningArguments, *, gpus: int, gpus_per_node: int, link: str | None
) -> ClusterQuestion:
    """Reads the model, length and machine of the command line.

    Raises:
        ConfigError: a value is refused.
        UnsupportedModelError: the engine refuses such models.
    """
    chosen = {
        "--num-chunks": arguments.num_chunks != "auto",
        "--partition": arguments.partition.value != "auto",
        "--offload-kv": arguments.offload_kv.value != "auto",
        "--weights": arguments.weights.value == "host",
        "--optimizer": arguments.optimizer.value == "host",
        "--recompute": arguments.recompute is not None,
        "--offload": arguments.policy != "auto",
    }
    for option in (name for name, given in chosen.items() if given):
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


def answer_cluster(question: ClusterQuestion) -> ClusterAnswer:
    """Searches layouts.

    Raises:
        ConfigError: the devices cannot share the rows.
    """
    return solve_cluster(question, most_actions=_MOST_ACTIONS)


def cluster_to_dict(answer: ClusterAnswer) -> dict[str, Any]:
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


def cluster_table(answer: ClusterAnswer, title: str) -> Group:
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
    offloaded = "" if layout.offload == "none" else f", {_OFFLOADED[layout.offload]}"
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
