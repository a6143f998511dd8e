"""Tables for the terminal: plans, answers of `sppo estimate` and `sppo plan`, measured steps.

Neighbouring chunks that are treated alike share a row, so tables stay short with many chunks.
Tables are built with rich and returned; nothing is printed here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sppo_hf.planning.activation_modes import ActivationMode, Saved, all_modes
from sppo_hf.planning.decisions import Decisions, Order
from sppo_hf.planning.feasibility import PlanResult, PolicyResult
from sppo_hf.planning.memory import Budgets, MemoryEstimate
from sppo_hf.planning.plan import PipelineStep, Plan
from sppo_hf.planning.prediction import MeasuredStep
from sppo_hf.planning.solve import BudgetViolation, over_budget
from sppo_hf.planning.tiers import TIERS, Tier, offload_tiers
from sppo_hf.reporting.plan_json import offload_ratios
from sppo_hf.rules import format_bytes


@dataclass(frozen=True, slots=True)
class ChunkGroup:
    """Neighbouring chunks, and how many of their layers have each activation mode."""

    first: int
    """Index of the first chunk."""

    last: int
    """Index of the last chunk, inclusive."""

    layers: dict[ActivationMode, tuple[int, int]]
    """Minimum and maximum layers per chunk by mode, in the order of `all_modes`."""

    @property
    def title(self) -> str:
        """The chunks, counted from one: "chunk 3", "chunks 1-5"."""
        if self.first == self.last:
            return f"chunk {self.first + 1}"
        return f"chunks {self.numbers}"

    @property
    def numbers(self) -> str:
        """The chunks without a noun: "3", "1-5"."""
        return span(self.first + 1, self.last + 1)

    @property
    def text(self) -> str:
        """The modes of the layers: "20 kept, 12 full recompute to host"."""
        parts = (f"{span(*counts)} {words(mode)}" for mode, counts in self.layers.items())
        return ", ".join(parts)


def group_chunks(decisions: Decisions, *, most: int) -> list[ChunkGroup]:
    """Groups neighbouring chunks that are treated alike, into at most `most` groups.

    Groups chunks with equal modes; if that makes too many groups, chunks with the same modes in
    different numbers; if that does too, fixed numbers of chunks.
    """
    chunks = decisions.num_chunks
    counts = [Counter(row) for row in decisions.layer_modes]
    each = -(-chunks // most)
    keys: tuple[Callable[[int], Hashable], ...] = (
        lambda chunk: tuple(sorted((str(mode), n) for mode, n in counts[chunk].items())),
        lambda chunk: frozenset(counts[chunk]),
        lambda chunk: chunk // each,
    )
    groups: list[list[int]] = []
    for key in keys:
        groups = [list(group) for _, group in groupby(range(chunks), key)]
        if len(groups) <= most:
            break
    found: list[ChunkGroup] = []
    for group in groups:
        numbers = {mode: [counts[chunk][mode] for chunk in group] for mode in all_modes()}
        layers = {mode: (min(each), max(each)) for mode, each in numbers.items() if any(each)}
        found.append(ChunkGroup(group[0], group[-1], layers))
    return found


def words(mode: ActivationMode) -> str:
    """Describes an activation mode: "kept", "to host", "full recompute to host"."""
    recomputed = {
        "whole": "",
        "matmuls": "selective recompute",
        "inputs": "full recompute",
        "hidden": "full recompute with attention",
    }
    away = f"to {mode.tier}" if mode.offload else ""
    return f"{recomputed[mode.saved]} {away}".strip() or "kept"


def span(low: int, high: int) -> str:
    """Writes a range: "3" or "3-5"."""
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


_MAX_LENGTHS_SHOWN = 6
_MAX_GROUPS_SHOWN = 6
_MAX_CHUNKS_COMPARED = 12


ORDERS: dict[Order, str] = {
    "by_layer": "layer by layer, chunks inside",
    "by_chunk": "chunk by chunk, layers inside",
}
"""Descriptions of the orders of work."""


def kv_modes_text(plan: Decisions) -> str:
    """Describes the K/V modes of all layers: "20 kept, 12 recomputed"."""
    counts = Counter(map(plan.kv_mode, range(plan.num_layers)))
    texts = {"device": "kept", **{tier: f"to {tier}" for tier in offload_tiers()}}
    texts["recompute"] = "recomputed"
    return ", ".join(f"{counts[mode]} {text}" for mode, text in texts.items() if counts[mode])


def format_tokens(tokens: int) -> str:
    """Writes a number of tokens with thousands separated: "1 token", "65,536 tokens"."""
    return f"{tokens:,} token{'' if tokens == 1 else 's'}"


def format_lengths(lengths: tuple[int, ...]) -> str:
    """Describes chunk lengths briefly, however many there are.

    "1 chunk of 700", "3 chunks: 512 512 176", "32 chunks of 4,096", "33 chunks of 4,096, last 10",
    "64 chunks, 16,384 falling to 4,096".
    """
    if len(lengths) == 1:
        return f"1 chunk of {lengths[0]:,}"
    head = f"{len(lengths)} chunks"
    if len(set(lengths)) == 1:
        return f"{head} of {lengths[0]:,}"
    if len(lengths) <= _MAX_LENGTHS_SHOWN:
        return f"{head}: " + " ".join(f"{n:,}" for n in lengths)
    if len(set(lengths[:-1])) == 1:
        return f"{head} of {lengths[0]:,}, last {lengths[-1]:,}"
    if list(lengths) == sorted(lengths, reverse=True):
        return f"{head}, {lengths[0]:,} falling to {lengths[-1]:,}"
    return f"{head}, {min(lengths):,} to {max(lengths):,}"


def format_seconds(seconds: float) -> str:
    """Writes seconds with three digits: "850 us", "12.3 ms", "1.50 s", "64.7 s", "1,234 s"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    decimals = 2 if seconds < 9.995 else 1 if seconds < 99.95 else 0
    return f"{seconds:,.{decimals}f} s"


def format_speed(tokens_per_second: float, mfu: float | None) -> str:
    """Writes a speed: "2,026 tokens/s, MFU 27.3%"."""
    digits = 0 if tokens_per_second >= 100 else 1
    text = f"{tokens_per_second:,.{digits}f} tokens/s"
    return text if mfu is None else f"{text}, MFU {mfu:.1%}"


def plan_table(plan: Plan, model_name: str) -> Group:
    """Returns the table of a plan: what runs, how, why, and the bytes at each tier's peak."""
    table = start_table(f"SPPO plan: {model_name}")
    add_plan_rows(table, plan)
    table.add_section()
    add_byte_rows(table, plan.estimate, plan.budgets)
    return Group(table, *warning_lines(plan))


def start_table(title: str) -> Table:
    """Returns an empty table with the columns what, value and why."""
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", show_header=False)
    table.add_column("what", style="bold", no_wrap=True)
    table.add_column("value", justify="left", overflow="fold")
    table.add_column("why", style="dim", overflow="fold")
    return table


def add_plan_rows(table: Table, plan: Plan, *, layers: bool = True) -> None:
    """Adds the plan's decisions and its predicted time.

    `layers`: whether to add the layers' modes by groups of chunks.
    """
    tokens = _rows_of(plan.batch_rows) + format_tokens(plan.total_tokens)
    table.add_row("tokens", tokens, "training" if plan.training else "evaluation")
    table.add_row("chunks", format_lengths(plan.chunk_lengths), f"{plan.num_layers} layers each")
    whole = plan.by_layer and plan.num_chunks == 1
    order = "layer by layer, each over all tokens" if whole else ORDERS[plan.order]
    table.add_row("order", order, plan.order_reason)
    if 0 < plan.layer_tile_tokens < plan.batch_rows * max(plan.chunk_lengths):
        table.add_row(
            "tiles",
            f"of {format_tokens(plan.layer_tile_tokens)}",
            "MLPs, norms and adapters inside a layer; attention over a chunk at once",
        )
    table.add_row("device", plan.device.name, speeds_source(plan))
    table.add_row("attention", plan.backend_name, plan.backend_reason)
    if plan.training:
        _add_adapters(table, plan)
        _add_modes(table, plan, layers=layers)
    _add_places(table, plan)
    if plan.training and plan.by_layer and set(plan.kv_modes) - {"device"}:
        table.add_row("K/V", kv_modes_text(plan), f"of {plan.num_layers} layers, until backward")
    if plan.kv_tier != "device":
        blocks = f"in blocks of {format_tokens(plan.kv_block_tokens)}"
        if plan.kv_block_tokens >= plan.total_tokens:
            blocks = "layer by layer"
        table.add_row("K/V", f"on the {plan.kv_tier}", f"streamed back {blocks}")
    if plan.pipeline is not None:
        _add_pipeline(table, plan, plan.pipeline)
        return
    predicted = plan.prediction
    if predicted is not None:
        speed = format_speed(predicted.tokens_per_second, predicted.mfu)
        if predicted.stall_seconds > 0.0005 * predicted.step_seconds:
            speed += f"; {format_seconds(predicted.stall_seconds)} of it waits for copies"
        table.add_row("step", format_seconds(predicted.step_seconds), f"predicted: {speed}")


def _add_places(table: Table, plan: Plan) -> None:
    """Adds the parts of the model that are host-resident, if any."""
    resident = plan.shape.host_resident
    if resident is None:
        return
    if not resident.keeps_device_copies:
        text = "on the host, two layers on the device"
        table.add_row("weights", text, plan.places_reason)
    if plan.training and resident.gradient_bytes:
        why, predicted = plan.places_reason, plan.prediction
        if predicted is not None:
            why += f"; its update takes {format_seconds(predicted.update_seconds)} of the step"
        table.add_row("optimizer", "on the host", why)


def _add_pipeline(table: Table, plan: Plan, step: PipelineStep) -> None:
    """Adds the schedule, and the step time of all stages together."""
    ranks = f"{step.schedule} over {step.ranks} ranks"
    if step.replicas > 1:
        ranks += f", {step.replicas} times"
    table.add_row("schedule", ranks, step.reason)
    if step.step_seconds is not None:
        tokens = step.micro_batches * plan.batch_rows * plan.total_tokens
        speed = format_speed(tokens / step.step_seconds, step.mfu)
        said = f"predicted, all stages and {step.micro_batches} micro-batches: {speed}"
        said += f"; ranks idle {step.bubble_fraction:.1%}"
        table.add_row("step", format_seconds(step.step_seconds), said)


def speeds_source(plan: Plan) -> str:
    """Returns whether the plan's speeds are estimated or measured; "" if there are none."""
    profile = plan.device.profile
    if profile is None:
        return ""
    if not profile.estimated:
        return "speeds were measured"
    if profile.partly_measured:
        return "speeds as measured on one"
    return "speeds and sizes are estimates"


def warning_lines(plan: Plan) -> list[Text]:
    """Returns the plan's warnings, to print below a table."""
    return [Text(f"Warning: {warning}.", style="yellow") for warning in plan.warnings]


def _add_adapters(table: Table, plan: Plan) -> None:
    """Adds a hint if adapters are wider than the model, which is PEFT's default.

    Each of their matmuls then casts the layer's activations up and back, and keeps the copies;
    under autocast only where PEFT's code runs. On a CPU 16 bits are not faster.
    """
    shape = None if plan.cost is None else plan.cost.shape
    if plan.device.kind == "cpu" or shape is None or shape.lora is None:
        return
    in_place = shape.lora.autocast and shape.layer_kernels and not shape.lora.dropout
    if shape.lora.dtype_bytes > shape.dtype_bytes and not in_place:
        table.add_row(
            "adapters",
            f"{8 * shape.lora.dtype_bytes} bits",
            f"with get_peft_model(..., autocast_adapter_dtype=False) they have the model's "
            f"{8 * shape.dtype_bytes} and cost less time and memory",
        )


def _add_modes(table: Table, plan: Plan, *, layers: bool) -> None:
    modes = {mode for row in plan.layer_modes for mode in row}
    offloads = {mode.offload for mode in modes}
    offload = "some layers" if len(offloads) == 2 else "full" if True in offloads else "none"
    table.add_row("recompute", _recomputed({mode.saved for mode in modes}), plan.recompute_reason)
    if any(mode.saved == "hidden" for mode in modes):
        assert plan.prediction is not None, "attention runs again in plans that are predicted"
        seconds = plan.program().attention_rerun_seconds
        why = f"{format_seconds(seconds)}, {seconds / plan.prediction.step_seconds:.1%} of the step"
        why += "; memory has no room for its output"
        table.add_row("attention again", attention_recompute_text(plan), why)
    table.add_row("offload", offload, plan.offload_reason)
    if layers and len(modes) > 1:
        for index, group in enumerate(group_chunks(plan, most=_MAX_GROUPS_SHOWN)):
            table.add_row("layers per chunk" if index == 0 else "", group.text, group.title)
    ahead = plan.max_pending_d2h_bytes, plan.max_prefetch_bytes
    if True in offloads and None not in ahead:
        out, back = (format_bytes(size or 0) for size in ahead)
        both = out if out == back else f"{out} out, {back} back"
        table.add_row("look-ahead", both, "on the device, waiting for a copy or ahead of its use")


def attention_recompute_text(plan: Plan) -> str:
    """Says where attention is recomputed: "chunks 1-4 of layers 1-20; chunks 1-8 of layers 21"."""
    reruns = plan.program().reruns_attention
    layers: dict[tuple[int, ...], list[int]] = {}
    for layer in range(plan.num_layers):
        chunks = tuple(reruns[:, layer].nonzero()[0].tolist())
        if chunks:
            layers.setdefault(chunks, []).append(layer)
    if len(layers) > _MAX_GROUPS_SHOWN:
        return f"{reruns.sum():,} of {reruns.size:,} chunks of layers"
    parts = (
        f"{_spans('chunk', chunks)} of {_spans('layer', of_layers)}"
        for chunks, of_layers in layers.items()
    )
    return "; ".join(parts)


def _spans(noun: str, numbers: Sequence[int]) -> str:
    """Writes indices as ranges, counted from one: "chunks 1-4, 7", "layer 2"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    plural = "" if len(numbers) == 1 else "s"
    return f"{noun}{plural} " + ", ".join(span(low + 1, high + 1) for low, high in runs)


def _recomputed(saved: set[Saved]) -> str:
    """Says what is recomputed: "none", "full", "selective and full in some layers"."""
    words = {"matmuls": "selective", "inputs": "full", "hidden": "full with attention"}
    kinds = " and ".join(word for what, word in words.items() if what in saved)
    return f"{kinds} in some layers" if kinds and "whole" in saved else kinds or "none"


def add_byte_rows(table: Table, predicted: MemoryEstimate, budgets: Budgets) -> None:
    """Adds the bytes of each tier at its peak, by cause, against its budget."""
    for tier in TIERS:
        amounts, budget_bytes, note = predicted.of(tier), budgets.of(tier), "predicted, offloaded"
        if tier == "device":
            note = f"predicted peak, at the {predicted.moment}"
        elif not amounts.total:
            continue
        table.add_row(f"{tier} memory", _of_budget(amounts.total, budget_bytes), note)
        for cause, size_bytes in amounts.shown():
            table.add_row(f"  {cause.label}", f"  {format_bytes(size_bytes)}", cause.meaning)


def comparison_table(before: Plan, after: Plan, measured: MeasuredStep) -> Group:
    """Returns a table of a measured step beside its plan, and what changes in the plan."""
    planned = before.prediction
    assert planned is not None, "a plan is corrected where it predicted something"
    title = "SPPO: measured beside planned"
    if before.pipeline is not None:
        title += ", one micro-batch on this rank's stage"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("what", style="bold")
    table.add_column("planned", justify="right")
    table.add_column("measured", justify="right")
    forward = sum(chunk.forward_seconds for chunk in planned.chunks)
    backward = sum(chunk.backward_seconds for chunk in planned.chunks)
    for name, said, took in (
        ("forward", forward, sum(measured.forward_seconds)),
        ("backward", backward, sum(measured.backward_seconds)),
        ("standing still", planned.stall_seconds, measured.stall_seconds),
        ("step", planned.forward_backward_seconds, measured.step_seconds),
    ):
        table.add_row(name, format_seconds(said), format_seconds(took))
    for name, said, took in (
        ("to host", planned.d2h_bytes, measured.d2h_bytes),
        ("to device", planned.h2d_bytes, measured.h2d_bytes),
        ("to disk", None, measured.disk_write_bytes),
        ("from disk", None, measured.disk_read_bytes),
    ):
        if said or took:
            table.add_row(name, "" if said is None else format_bytes(said), format_bytes(took))
    for chunk in _chunks_shown(before.num_chunks):
        said = planned.chunks[chunk].compute_seconds
        took = measured.forward_seconds[chunk] + measured.backward_seconds[chunk]
        name = f"chunk {chunk + 1}, both ways"
        table.add_row(name, format_seconds(said), format_seconds(took))
    return Group(table, Text(_plan_changes(before, after)))


def _chunks_shown(num_chunks: int) -> list[int]:
    """Returns all chunks, or a limited number, evenly spaced from the first to the last."""
    most = min(num_chunks, _MAX_CHUNKS_COMPARED)
    return sorted({round(i * (num_chunks - 1) / max(1, most - 1)) for i in range(most)})


def _plan_changes(before: Plan, after: Plan) -> str:
    same = ("order", "layer_modes", "kv_tier", "kv_modes")
    if all(getattr(after, name) == getattr(before, name) for name in same):
        return "The same plan is chosen again; only its prediction is corrected."
    assert after.prediction is not None, "a corrected plan is predicted"
    changed = sum(
        a != b
        for row_a, row_b in zip(before.layer_modes, after.layer_modes, strict=True)
        for a, b in zip(row_a, row_b, strict=True)
    )
    return (
        f"Planned anew with the measured speeds: {changed} of "
        f"{before.num_chunks * before.num_layers} layers of chunks are treated otherwise, "
        f"{after.prediction.step_seconds:.3g} s a step predicted."
    )


MFU_NOTE = (
    "MFU = model FLOPs / (seconds x the device's dense bf16 peak): every multiply-add as two, the "
    "causal half of attention once, recomputation not counted."
)
"""Definition of MFU, printed below tables."""

_MAX_ROWS = 16


def estimate_table(answer: PlanResult, model_name: str, also: Sequence[str] = ()) -> Group:
    """Returns the table of `sppo estimate`: does it fit, the plan, and bytes by tier and cause.

    `also`: further remedies to list if it does not fit.
    """
    table = _answer_table(f"SPPO estimate: {model_name}", answer, also)
    if answer.plan is not None:
        add_plan_rows(table, answer.plan)
    table.add_section()
    add_byte_rows(table, answer.estimate, answer.budgets)
    return Group(table, *_notes(answer))


def plan_tables(answer: PlanResult, results: Sequence[PolicyResult], model_name: str) -> Group:
    """Returns the tables of `sppo plan`: the plan, its chunks, and policies side by side."""
    table = _answer_table(f"SPPO plan: {model_name}", answer)
    policies = policy_table(results, answer.budgets)
    if answer.plan is None:
        table.add_section()
        add_byte_rows(table, answer.estimate, answer.budgets)
        return Group(table, policies, *_notes(answer))
    add_plan_rows(table, answer.plan, layers=False)
    for tier in TIERS:
        if total := answer.estimate.of(tier).total:
            size = _of_budget(total, answer.budgets.of(tier))
            table.add_row(f"{tier} memory", size, f"at the {answer.estimate.moment_of(tier)}")
    return Group(table, chunk_table(answer.plan), policies, *_notes(answer))


def chunk_table(plan: Plan) -> Table:
    """Returns a table of the modes and seconds of each chunk.

    Equal neighbours share a row. Seconds are sums over the chunks of a row, forward and backward.
    """
    table = Table(
        box=SIMPLE_HEAD,
        title="Chunks: what becomes of their layers, seconds of each resource",
        title_justify="left",
    )
    said = () if plan.prediction is None else plan.prediction.chunks
    behind = [tier for tier in TIERS if any(chunk.tier_seconds.get(tier) for chunk in said)]
    table.add_column("chunk", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("layers", ratio=1, overflow="fold")
    for header in ("offloaded", "compute", "to host", "to device", *behind):
        table.add_column(header, justify="right", no_wrap=True)
    ratios = [round(100 * ratio) for ratio in offload_ratios(plan)]
    for group in group_chunks(plan, most=_MAX_ROWS):
        part = ratios[group.first : group.last + 1]
        leaves = f"{span(min(part), max(part))}%"
        lengths = plan.chunk_lengths[group.first : group.last + 1]
        tokens = span(min(lengths), max(lengths))
        table.add_row(group.numbers, tokens, group.text, leaves, *_resources(plan, group, behind))
    return table


def policy_table(results: Sequence[PolicyResult], budgets: Budgets) -> Table:
    """Returns a table that compares policies, in the given order."""
    tiers: list[Tier] = [t for t in TIERS if any(r.estimate.of(t).total for r in results)]
    limits = {tier: budgets.of(tier) for tier in tiers}
    said = (f"{t} {'unlimited' if b is None else format_bytes(b)}" for t, b in limits.items())
    table = Table(
        box=SIMPLE_HEAD,
        title="Policies, in the same chunks and with K/V on the same tier",
        title_justify="left",
        caption="Budgets: " + ", ".join(said),
        caption_justify="left",
    )
    for header in ("policy", "recompute"):
        table.add_column(header, no_wrap=True)
    for header in ("step", "tokens/s", *(f"{tier} peak" for tier in tiers)):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("fits")
    for result in results:
        limit, seconds, speed = result.first_limit, result.step_seconds, result.tokens_per_second
        table.add_row(
            result.policy,
            result.recompute,
            "-" if seconds is None else format_seconds(seconds),
            "-" if speed is None else format_speed(speed, None).removesuffix(" tokens/s"),
            *(format_bytes(result.estimate.of(tier).total) for tier in tiers),
            Text("yes", style="green") if limit is None else f"no: {_missing_text(limit)}",
        )
    return table


def _answer_table(title: str, answer: PlanResult, also: Sequence[str] = ()) -> Table:
    """Returns a table with the verdict and, where no plan fits, what was asked."""
    table = start_table(title)
    limit = answer.first_limit
    if limit is None:
        table.add_row("fits", Text("yes", style="green"), "")
    else:
        lacking = over_budget(answer.estimate, answer.budgets)
        why = " and ".join(f"{_missing_text(one)} at the {one.moment}" for one in lacking)
        table.add_row("fits", Text("no", style="red"), f"{why}, in the plan that comes closest")
    if answer.max_seq_len:
        what = "rows that fit these budgets and settings"
        table.add_row("longest", format_tokens(answer.max_seq_len), what)
    else:
        table.add_row("longest", "none", "no row is short enough for these budgets and settings")
    if limit is not None:
        _add_remedies(table, answer, also)
    table.add_section()
    if answer.plan is None:
        request = answer.request
        tokens = _rows_of(request.batch_rows) + format_tokens(request.total_tokens)
        table.add_row("tokens", tokens, "training")
        table.add_row("device", request.device.name, "")
    return table


def _rows_of(batch_rows: int) -> str:
    return "" if batch_rows == 1 else f"{batch_rows} rows x "


def _add_remedies(table: Table, answer: PlanResult, also: Sequence[str]) -> None:
    """Adds remedies, each of which alone makes it fit."""
    alone = [(one, "adapters in place of all weights") for one in also]
    if answer.forbidding:
        options = ", ".join(f"--{name.replace('_', '-')} auto" for name in answer.forbidding)
        alone.append((options, "what the planner chooses itself"))
    for tier, size in answer.enough.items():
        alone.append((f"{format_bytes(size)} of {TIERS[tier].called}", TIERS[tier].option))
    for index, (value, how) in enumerate(alone):
        table.add_row("would do" if index == 0 else "", value, how)
    several = "several GPUs" if alone else "neither host memory nor a disk is enough: several GPUs"
    table.add_row("" if alone else "would do", several, "--gpus 8 of `sppo plan` says which layout")


def _notes(answer: PlanResult) -> list[Text]:
    plan = answer.plan
    return [] if plan is None else [*warning_lines(plan), Text(MFU_NOTE, style="dim")]


def _missing_text(limit: BudgetViolation) -> str:
    return f"{limit.tier} lacks {format_bytes(limit.missing_bytes)}"


def _of_budget(size_bytes: int, budget_bytes: int | None) -> str:
    size = format_bytes(size_bytes)
    return size if budget_bytes is None else f"{size} of {format_bytes(budget_bytes)}"


def _resources(plan: Plan, group: ChunkGroup, behind: Sequence[Tier]) -> list[str]:
    assert plan.prediction is not None, "a plan made with a profile is predicted"
    said = plan.prediction.chunks[group.first : group.last + 1]
    sums = [
        sum(chunk.compute_seconds for chunk in said),
        sum(chunk.d2h_seconds for chunk in said),
        sum(chunk.h2d_seconds for chunk in said),
        *(sum(chunk.tier_seconds.get(tier, 0.0) for chunk in said) for tier in behind),
    ]
    return [format_seconds(seconds) if seconds else "-" for seconds in sums]
