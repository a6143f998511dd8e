"""Plans Llama-3.1-8B with LoRA on one H100, 16K to 1M tokens, with every policy.

    python recipes/benchmarks/planned_lengths.py --check
    python recipes/benchmarks/planned_lengths.py --all-weights
    python recipes/benchmarks/planned_lengths.py --hosts
    python recipes/benchmarks/planned_lengths.py --devices

With --all-weights the whole model is trained, with weights or optimizer on a host of 1,900 GiB.
With --hosts the table shows how much of four budgets of host memory "auto" uses, for this model
and for all weights of Qwen3-4B. With --devices it shows the longest rows on one of several devices
beside 64 GiB of host memory, for this model and for Qwen3-4B with LoRA.

Every number is a simulation with shipped profiles or datasheets; none is measured. Needs no GPU
and no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sppo_hf.cli.common import trace_unknown_model
from sppo_hf.config import SPPOConfig
from sppo_hf.planning.config_file import load_config
from sppo_hf.planning.feasibility import (
    PolicyResult,
    assess_request,
    compare_policies,
    plan_for,
    request_for,
    timeline_of,
)
from sppo_hf.planning.hardware import load_profile
from sppo_hf.planning.plan import Plan, PlanRequest
from sppo_hf.planning.solve import EQUALLY_FAST, over_budget
from sppo_hf.reporting.plan_json import weight_placement
from sppo_hf.reporting.plan_tables import format_seconds, kv_modes_text
from sppo_hf.rules import format_bytes

POLICIES = ("auto", "none", "full", "sppo")
BY_CHUNK = "auto, by chunk"
COLUMNS = (POLICIES[0], BY_CHUNK, *POLICIES[1:])
LENGTHS = tuple(2**power for power in range(14, 21))
HOSTS_GIB = (64, 128, 256, 512)
ALL_WEIGHTS_HOST = "1900GiB"
DEVICES = ("rtx-3090", "rtx-4090", "rtx-5090", "l40s", "a100-40gb", "rtx-pro-6000", "gh200", "b200")
PLACES = {
    "auto": ("auto", "auto"),
    "optimizer": ("device", "host"),
    "weights and optimizer": ("host", "host"),
}
"""Settings `weights` and `optimizer`, by what is on the host."""


def ask(model: str, hardware: str, tokens: int, lora: int | None, **settings: Any) -> PlanRequest:
    """Make the request for a row of so many tokens; all weights are trained without a LoRA rank."""
    return request_for(
        load_config(model),
        SPPOConfig(**settings),
        profile=load_profile(hardware),
        total_tokens=tokens,
        lora_rank=lora,
        trace=trace_unknown_model,
    )


def plan_length(options: argparse.Namespace, tokens: int, *, disk: bool) -> dict[str, Any]:
    """Return a row of the table: the best plan of each policy at a length."""
    budgets: dict[str, Any] = {"device_memory": "80GiB", "host_memory": "256GiB"}
    if disk:
        budgets |= {"disk_memory": "2TB", "offload_dir": options.dir}

    question = partial(ask, options.model, options.hardware, tokens, options.lora, **budgets)
    by_chunk = assess_request(question(order="by_chunk"))
    began = time.perf_counter()
    answer = assess_request(question())
    row: dict[str, Any] = {
        "tokens": tokens,
        "disk": disk,
        "seconds": time.perf_counter() - began,
        "max_seq_len": answer.max_seq_len,
        "max_seq_len_by_chunk": by_chunk.max_seq_len,
        "policies": {},
    }
    if answer.plan is None:
        assert answer.first_limit is not None, "what does not fit breaks a limit"
        row["first_limit"] = answer.first_limit.tier
        row["missing_bytes"] = answer.first_limit.missing_bytes
        return row
    plan = answer.plan
    began = time.perf_counter()
    timeline = timeline_of(plan)
    row |= {
        "simulated_actions": len(timeline),
        "simulation_seconds": time.perf_counter() - began,
        "order": plan.order,
        "kv_tier": plan.farthest_kv_tier,
        "keys": kv_modes_text(plan) if plan.by_layer else plan.kv_tier,
        "num_chunks": plan.num_chunks,
        "attention_again": bool(plan.program().reruns_attention.any()),
    }
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in POLICIES}
    for result in compare_policies(answer.request, plan):  # all in the chunks of this plan
        results[result.policy].append(_as_row(result))
    for policy, recompute in product(POLICIES[1:], ("full", "none")):  # each in its own chunks
        own = plan_for(question(offload=policy, recompute=recompute))
        results[policy].append(_as_row(own))
    results[BY_CHUNK] = [_as_row(by_chunk.plan or plan_for(question(order="by_chunk")))]
    for name in COLUMNS:
        row["policies"][name] = max(results[name], key=_rank)
    return row


def plan_all_weights(options: argparse.Namespace, tokens: int, *, longest: bool) -> dict[str, Any]:
    """Return a row of the table: all weights trained, by what is on the host."""
    row: dict[str, Any] = {"tokens": tokens, "places": {}}
    for name, (weights, optimizer) in PLACES.items():
        budgets = {"device_memory": "80GiB", "host_memory": ALL_WEIGHTS_HOST}
        places = {"weights": weights, "optimizer": optimizer}
        question = ask(options.model, options.hardware, tokens, None, **budgets, **places)
        plan = plan_for(question)
        predicted = plan.prediction
        assert predicted is not None, "a plan made with a profile is predicted"
        row["places"][name] = {
            **_as_row(plan),
            "step_seconds": predicted.step_seconds,
            "update_seconds": predicted.update_seconds,
            "stall_seconds": predicted.stall_seconds,
            "order": plan.order,
            "chunks": plan.num_chunks,
            "weights": weight_placement(plan)[0],
            "optimizer": weight_placement(plan)[1],
        }
        if longest:
            row["places"][name]["longest"] = assess_request(question).max_seq_len
    return row


def show_hosts(options: argparse.Namespace, lengths: Sequence[int]) -> None:
    """One table on the terminal: host memory used and the step, by the host's budget."""
    table = Table(title="host memory used and seconds of a step, by the budget of host memory")
    for heading in ("trained, tokens", *(f"{size} GiB" for size in HOSTS_GIB)):
        table.add_column(heading, justify="right")
    for model, lora in ((options.model, options.lora), ("qwen3-4b", None)):
        for tokens in lengths:
            cells = []
            for size in HOSTS_GIB:
                budgets = {"device_memory": "80GiB", "host_memory": f"{size}GiB"}
                plan = plan_for(ask(model, options.hardware, tokens, lora, **budgets))
                assert plan.prediction is not None, "a plan made with a profile is predicted"
                used_gib = plan.estimate.host.total / 2**30
                cells.append(f"{used_gib:.0f}, {plan.prediction.step_seconds:#.4g} s")
            table.add_row(f"{'LoRA' if lora else 'all weights'}, {tokens:,}", *cells)
    Console(width=120).print(table)


def show_devices(options: argparse.Namespace) -> None:
    """One table on the terminal: the longest row and the seconds of 32,768 tokens, by device."""
    models = (options.model, "qwen3-4b")
    table = Table(title="longest row; seconds of a step of 32,768 tokens; LoRA, host of 64 GiB")
    for heading in ("device", *models):
        table.add_column(heading, justify="right")
    for device in DEVICES:
        cells = []
        for model in models:
            answer = assess_request(ask(model, device, 2**15, options.lora, host_memory="64GiB"))
            plan = answer.plan
            seconds = (
                ""
                if plan is None or plan.prediction is None
                else (f"; {plan.prediction.step_seconds:#.3g} s")
            )
            cells.append(f"{answer.max_seq_len:,}{seconds}")
        table.add_row(device, *cells)
    Console(width=120).print(table)


def show_all_weights(rows: list[dict[str, Any]]) -> None:
    """One table on the terminal."""
    table = Table(title=f"Llama-3.1-8B, all weights, one H100, host {ALL_WEIGHTS_HOST}: tokens/s")
    for heading in ("tokens", "on the host", "tokens/s", "step", "update", "waits", "peaks"):
        table.add_column(heading, justify="right")
    for row in rows:
        for name, found in row["places"].items():
            label = name
            if name == "auto":
                label += f" (weights {found['weights']}, optimizer {found['optimizer']})"
            seconds = (found[f"{what}_seconds"] for what in ("step", "update", "stall"))
            speed, peaks = ("no", "") if found["lacks"] else _cell(found).split(" ", 1)
            table.add_row(f"{row['tokens']:,}", label, speed, *map(format_seconds, seconds), peaks)
    console = Console(width=160)
    console.print(table)
    for name, found in rows[0]["places"].items():
        console.print(f"longest, {name}: {found['longest']:,} tokens")


def _as_row(result: PolicyResult | Plan) -> dict[str, Any]:
    if isinstance(result, Plan):
        limit = next(over_budget(result.estimate, result.budgets), None)
        assert result.prediction is not None, "a plan made with a profile is predicted"
        speed = result.prediction.tokens_per_second if limit is None else None
    else:
        limit, speed = result.first_limit, result.tokens_per_second
    return {
        "tokens_per_second": speed,
        "device_bytes": result.estimate.device.total,
        "host_bytes": result.estimate.host.total,
        "disk_bytes": result.estimate.of("disk").total,
        "lacks": None if limit is None else [limit.tier, limit.missing_bytes],
    }


def _rank(result: dict[str, Any]) -> tuple[float, int]:
    """Sort key, larger is better: speed where it fits, else the fewest missing bytes."""
    return result["tokens_per_second"] or 0.0, -(result["lacks"] or ("", 0))[1]


def show(rows: list[dict[str, Any]]) -> None:
    """One table on the terminal."""
    table = Table(title="Llama-3.1-8B, LoRA, one H100: tokens/s (device + host + disk peak)")
    for heading in ("tokens", "order", "K/V", *COLUMNS):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [_cell(row["policies"][name]) for name in COLUMNS] if row["policies"] else []
        if not cells:
            cells = [f"no: {row['first_limit']} lacks {format_bytes(row['missing_bytes'])}"]
        name = f"{row['tokens']:,}" + (" + disk" if row["disk"] else "")
        table.add_row(name, row.get("order", ""), row.get("keys", ""), *cells)
    console = Console(width=160)
    console.print(table)
    for disk in (False, True):
        both = [
            max((row[name] for row in rows if row["disk"] is disk), default=0)
            for name in ("max_seq_len", "max_seq_len_by_chunk")
        ]
        where = "with" if disk else "without"
        console.print(f"longest {where} the disk: {both[0]:,} tokens, by chunk {both[1]:,}")
    slowest = max(rows, key=lambda row: row["seconds"])
    console.print(f"slowest answer: {format_seconds(slowest['seconds'])}, {slowest['tokens']:,}")


def _cell(result: dict[str, Any]) -> str:
    if result["lacks"]:
        tier, size = result["lacks"]
        return f"no: {tier} lacks {format_bytes(size)}"
    parts = [format_bytes(result[f"{tier}_bytes"]) for tier in ("device", "host", "disk")]
    used = " + ".join(part for part in parts if part != "0 B")
    return f"{result['tokens_per_second']:,.0f} ({used})"


def not_first(rows: list[dict[str, Any]]) -> list[str]:
    """Lengths at which a fixed policy that fits is faster than `auto`."""
    found = []
    for row in rows:
        speeds = {n: r["tokens_per_second"] or 0.0 for n, r in row["policies"].items()}
        # So much of its time it may give for less host memory.
        if speeds and EQUALLY_FAST * speeds["auto"] < max(speeds.values()):
            found.append(f"{row['tokens']:,} tokens: {speeds}")
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b", help="config.json or a shipped name")
    parser.add_argument("--hardware", default="h100", help="a shipped profile, or a JSON file")
    parser.add_argument("--lora", type=int, default=16, help="rank")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--dir", default="a disk of 2 TB", help="only named, never written")
    parser.add_argument("--json", type=Path, help="file that all numbers are written to")
    parser.add_argument("--check", action="store_true", help="exit status 1 if auto is not first")
    parser.add_argument("--all-weights", action="store_true", help="train all, with a large host")
    parser.add_argument("--hosts", action="store_true", help="compare budgets of host memory")
    parser.add_argument("--devices", action="store_true", help="compare devices, host of 64 GiB")
    options = parser.parse_args(argv)
    if options.devices:
        show_devices(options)
        return 0
    if options.hosts:
        show_hosts(options, [tokens for tokens in options.lengths if 2**15 <= tokens <= 2**18])
        return 0
    if options.all_weights:
        rows = [
            plan_all_weights(options, tokens, longest=at == 0)
            for at, tokens in enumerate(options.lengths)
        ]
        show_all_weights(rows)
        if options.json:
            options.json.write_text(json.dumps({"rows": rows}, indent=2))
        return 0
    rows = [plan_length(options, tokens, disk=False) for tokens in options.lengths]
    # Where attention runs again for want of memory, a disk may be faster.
    poor = [row for row in rows if not row["policies"] or row["attention_again"]]
    rows += [plan_length(options, row["tokens"], disk=True) for row in poor]
    show(rows)
    wrong = not_first(rows)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "not_first": wrong}, indent=2))
    for sentence in wrong:
        print(f"missed: {sentence}", file=sys.stderr)
    return 1 if options.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
