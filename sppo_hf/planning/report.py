"""The plan as one table, and the way bytes and tokens are written everywhere.

Knows how a Plan reads to a person; decides nothing. Uses rich and prints nothing by itself.
"""

from __future__ import annotations

import io

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from sppo_hf.planning.plan import Plan

_CAUSES = {
    "weights": ("weights", ""),
    "lora": ("adapters", ""),
    "gradients": ("gradients", ""),
    "optimizer": ("optimizer", "assumed: AdamW, two float32 states"),
    "kv": ("K/V", ""),
    "dkv": ("dK/dV", "float32 accumulators"),
    "frames": ("frames", "all that backward needs"),
    "products": ("products", "layer inputs, attention and matrix products"),
    "skeletons": ("skeletons", "layer inputs, attention outputs"),
    "hidden": ("hidden", "gradients at the loss, embeddings"),
    "logits_tile": ("logits", "of one tile of the loss"),
    "workspace": ("workspace", "the running layer's temporaries"),
    "copies": ("copies", "on their way between tiers"),
    "slabs": ("slabs", "rest of the host slabs"),
    "reserve": ("reserve", "device context, fragmentation"),
}
_MOST_LENGTHS_SHOWN = 6


def format_bytes(size_bytes: int) -> str:
    """Writes bytes with a binary unit and three digits: "512 B", "1.50 KiB", "12.3 GiB"."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    size = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 999.5 or unit == "TiB":
            break
    decimals = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{decimals}f} {unit}"


def format_tokens(tokens: int) -> str:
    """Writes a number of tokens with thousands separated: "1 token", "65,536 tokens"."""
    return f"{tokens:,} token{'' if tokens == 1 else 's'}"


def format_lengths(lengths: tuple[int, ...]) -> str:
    """Writes chunk lengths so that many are as short to read as few.

    "1 chunk of 700", "3 chunks: 512 512 176", "32 chunks of 4,096", "33 chunks of 4,096, last 10",
    "64 chunks, 16,384 falling to 4,096".
    """
    if len(lengths) == 1:
        return f"1 chunk of {lengths[0]:,}"
    head = f"{len(lengths)} chunks"
    if len(set(lengths)) == 1:
        return f"{head} of {lengths[0]:,}"
    if len(lengths) <= _MOST_LENGTHS_SHOWN:
        return f"{head}: " + " ".join(f"{n:,}" for n in lengths)
    if len(set(lengths[:-1])) == 1:
        return f"{head} of {lengths[0]:,}, last {lengths[-1]:,}"
    if list(lengths) == sorted(lengths, reverse=True):
        return f"{head}, {lengths[0]:,} falling to {lengths[-1]:,}"
    return f"{head}, {min(lengths):,} to {max(lengths):,}"


def plan_table(plan: Plan, model_name: str) -> Group:
    """Lays out a plan: what runs, how, why, and where the bytes will be at the device's peak."""
    table = Table(
        box=SIMPLE_HEAD, title=f"SPPO plan: {model_name}", title_justify="left", show_header=False
    )
    table.add_column("what", style="bold", no_wrap=True)
    table.add_column("value", justify="left", overflow="fold")
    table.add_column("why", style="dim", overflow="fold")
    rows = "" if plan.batch_rows == 1 else f"{plan.batch_rows} rows x "
    purpose = "training" if plan.training else "evaluation"
    table.add_row("tokens", rows + format_tokens(plan.total_tokens), purpose)
    table.add_row("chunks", format_lengths(plan.chunk_lengths), f"{plan.num_layers} layers each")
    table.add_row("device", plan.device.name, "")
    table.add_row("attention", plan.backend_name, plan.backend_reason)
    if plan.training:
        modes = {mode for row in plan.layer_modes for mode in row}
        recompute = _all_or_some({mode.recompute for mode in modes})
        offload = _all_or_some({mode.offload for mode in modes})
        table.add_row("recompute", recompute, plan.recompute_reason)
        table.add_row("offload", offload, plan.offload_reason)
    table.add_section()
    _add_bytes(table, plan)
    warnings = (Text(f"Warning: {warning}.", style="yellow") for warning in plan.warnings)
    return Group(table, *warnings)


def render_plan(plan: Plan, model_name: str, width: int = 100) -> str:
    """Returns the table as plain text of at most `width` columns, for logs and terminals."""
    sink = io.StringIO()
    console = Console(file=sink, width=width, color_system=None, force_terminal=False)
    console.print(plan_table(plan, model_name))
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines()).strip("\n")


def _all_or_some(answers: set[bool]) -> str:
    if len(answers) == 2:
        return "some frames"
    return "full" if answers == {True} else "none"


def _add_bytes(table: Table, plan: Plan) -> None:
    predicted = plan.estimate
    note = f"predicted peak, at the {predicted.moment}"
    tiers = [("device", predicted.device, plan.budgets.device, note)]
    if predicted.host.total:
        tiers.append(("host", predicted.host, plan.budgets.host, "predicted, offloaded"))
    if predicted.disk.total:
        tiers.append(("disk", predicted.disk, plan.budgets.disk, "predicted, offloaded"))
    for tier, amounts, budget_bytes, note in tiers:
        size = format_bytes(amounts.total)
        if budget_bytes is not None:
            size += f" of {format_bytes(budget_bytes)}"
        table.add_row(f"{tier} memory", size, note)
        for cause, size_bytes in amounts.items():
            if size_bytes:
                name, explanation = _CAUSES[cause]
                table.add_row(f"  {name}", f"  {format_bytes(size_bytes)}", explanation)
