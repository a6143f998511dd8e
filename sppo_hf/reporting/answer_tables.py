"""Answers as tables: does it fit, how long may it be, what does each chunk do, which policy wins.

Uses rich and prints nothing by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sppo_hf.planning.memory_snapshots import Budgets
from sppo_hf.planning.plan import Plan
from sppo_hf.planning.plan_request import PlanResult, PolicyResult
from sppo_hf.planning.solve import BudgetViolation, over_budget
from sppo_hf.planning.tiers import TIERS, Tier
from sppo_hf.reporting.plan_json import offload_ratio
from sppo_hf.reporting.plan_tables import (
    ChunkGroup,
    add_byte_rows,
    add_plan_rows,
    format_seconds,
    format_speed,
    format_tokens,
    group_chunks,
    span,
    start_table,
    warning_lines,
)
from sppo_hf.rules import format_bytes

MFU_NOTE = (
    "MFU = model FLOPs / (seconds x the device's dense bf16 peak): every multiply-add as two, the "
    "causal half of attention once, recomputation not counted."
)
"""What MFU means here."""

_MOST_ROWS = 16


def estimate_table(answer: PlanResult, model_name: str, also: Sequence[str] = ()) -> Group:
    """Lays out the verdict, what is done and how fast it is, and bytes by tier and cause.

    `also` says what else would make it fit, where it does not.
    """
    table = start_table(f"SPPO estimate: {model_name}")
    _add_verdict(table, answer, also)
    table.add_section()
    if answer.plan is None:
        _add_question(table, answer)
    else:
        add_plan_rows(table, answer.plan)
    table.add_section()
    add_byte_rows(table, answer.estimate, answer.budgets)
    return Group(table, *_notes(answer))


def plan_tables(answer: PlanResult, results: Sequence[PolicyResult], model_name: str) -> Group:
    """Lays out a plan: the verdict and the plan, chunk by chunk, and policies side by side."""
    table = start_table(f"SPPO plan: {model_name}")
    _add_verdict(table, answer)
    table.add_section()
    if answer.plan is None:
        _add_question(table, answer)
        table.add_section()
        add_byte_rows(table, answer.estimate, answer.budgets)
        return Group(table, policy_table(results, answer.budgets), *_notes(answer))
    add_plan_rows(table, answer.plan, layers=False)
    for tier in TIERS:
        moment = answer.estimate.peak(tier)
        if moment.tier(tier).total:
            size = _of_budget(moment.tier(tier).total, answer.budgets.of(tier))
            table.add_row(f"{tier} memory", size, f"at the {moment.name}")
    chunks, policies = chunk_table(answer.plan), policy_table(results, answer.budgets)
    return Group(table, chunks, policies, *_notes(answer))


def chunk_table(plan: Plan) -> Table:
    """Lays out what becomes of each chunk's layers and what that takes.

    Equal neighbours share a row. Seconds are sums over the chunks of a row, forward and backward.
    """
    table = _numbers_table("Chunks: what becomes of their layers, seconds of each resource")
    said = () if plan.prediction is None else plan.prediction.chunks
    behind = [tier for tier in TIERS if any(chunk.tier_seconds.get(tier) for chunk in said)]
    table.add_column("chunk", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("layers", ratio=1, overflow="fold")
    for header in ("offloaded", "compute", "to host", "to device", *behind):
        table.add_column(header, justify="right", no_wrap=True)
    for group in group_chunks(plan, most=_MOST_ROWS):
        lengths = plan.chunk_lengths[group.first : group.last + 1]
        tokens = span(min(lengths), max(lengths))
        table.add_row(group.numbers, tokens, group.text, *_resources(plan, group, behind))
    return table


def policy_table(results: Sequence[PolicyResult], budgets: Budgets) -> Table:
    """Lays policies side by side, in the order in which they are given."""
    table = _numbers_table("Policies, in the same chunks and with K/V on the same tier")
    tiers: list[Tier] = [t for t in TIERS if any(r.estimate.peak(t).tier(t).total for r in results)]
    for header in ("policy", "recompute"):
        table.add_column(header, no_wrap=True)
    for header in ("step", "tokens/s", *(f"{tier} peak" for tier in tiers)):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("fits")
    for result in results:
        limit, seconds, speed = result.first_limit, result.step_seconds, result.tokens_per_second
        table.add_row(
            result.policy,
            result.frames,
            "-" if seconds is None else format_seconds(seconds),
            "-" if speed is None else format_speed(speed, None).removesuffix(" tokens/s"),
            *(format_bytes(result.estimate.peak(tier).tier(tier).total) for tier in tiers),
            Text("yes", style="green") if limit is None else f"no: {_lacking(limit)}",
        )
    said = [
        f"{tier} {'unlimited' if budget is None else format_bytes(budget)}"
        for tier, budget in ((tier, budgets.of(tier)) for tier in tiers)
    ]
    table.caption = "Budgets: " + ", ".join(said)
    table.caption_justify = "left"
    return table


def _add_verdict(table: Table, answer: PlanResult, also: Sequence[str] = ()) -> None:
    limit = answer.first_limit
    if limit is None:
        table.add_row("fits", Text("yes", style="green"), "")
    else:
        lacking = over_budget(answer.estimate, answer.budgets)
        why = " and ".join(f"{_lacking(one)} at the {one.moment}" for one in lacking)
        table.add_row("fits", Text("no", style="red"), f"{why}, in the plan that comes closest")
    if answer.max_seq_len:
        what = "rows that fit these budgets and settings"
        table.add_row("longest", format_tokens(answer.max_seq_len), what)
    else:
        table.add_row("longest", "none", "no row is short enough for these budgets and settings")
    if limit is not None:
        _add_remedies(table, answer, also)


def _add_remedies(table: Table, answer: PlanResult, also: Sequence[str]) -> None:
    """Adds what would make it fit, each by itself."""
    alone = [(one, "adapters in place of all weights") for one in also]
    for tier, size in answer.enough.items():
        alone.append((f"{format_bytes(size)} of {TIERS[tier].called}", TIERS[tier].option))
    for index, (value, how) in enumerate(alone):
        table.add_row("would do" if index == 0 else "", value, how)
    several = "several GPUs" if alone else "neither host memory nor a disk is enough: several GPUs"
    table.add_row("" if alone else "would do", several, "--gpus 8 of `sppo plan` says which layout")


def _add_question(table: Table, answer: PlanResult) -> None:
    question = answer.question
    rows = "" if question.batch_rows == 1 else f"{question.batch_rows} rows x "
    table.add_row("tokens", rows + format_tokens(question.total_tokens), "training")
    table.add_row("device", question.device.name, "")


def _notes(answer: PlanResult) -> list[Text]:
    notes = [] if answer.plan is None else warning_lines(answer.plan)
    return [*notes, Text(MFU_NOTE, style="dim")] if answer.plan is not None else notes


def _lacking(limit: BudgetViolation) -> str:
    return f"{limit.tier} lacks {format_bytes(limit.missing_bytes)}"


def _of_budget(size_bytes: int, budget_bytes: int | None) -> str:
    size = format_bytes(size_bytes)
    return size if budget_bytes is None else f"{size} of {format_bytes(budget_bytes)}"


def _numbers_table(title: str) -> Table:
    return Table(box=SIMPLE_HEAD, title=title, title_justify="left")


def _resources(plan: Plan, group: ChunkGroup, behind: Sequence[Tier]) -> list[str]:
    ratios = [round(100 * offload_ratio(plan, i)) for i in range(group.first, group.last + 1)]
    assert plan.prediction is not None, "a plan made with a profile is predicted"
    said = plan.prediction.chunks[group.first : group.last + 1]
    sums = [
        sum(chunk.compute_seconds for chunk in said),
        sum(chunk.d2h_seconds for chunk in said),
        sum(chunk.h2d_seconds for chunk in said),
        *(sum(chunk.tier_seconds.get(tier, 0.0) for chunk in said) for tier in behind),
    ]
    leaves = f"{span(min(ratios), max(ratios))}%"
    return [leaves, *(format_seconds(seconds) if seconds else "-" for seconds in sums)]
