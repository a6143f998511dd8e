"""`sppo check MODEL`: is this family exact under chunks? Loss and every gradient, in numbers.

Only arguments and the printed table; the comparison is `sppo_hf.testing.check`. Torch is imported
when the command runs.
"""

from __future__ import annotations

import dataclasses
import json
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from sppo_hf.cli import common
from sppo_hf.config import SPPOConfig
from sppo_hf.planning.config_file import check_sizes, read_fields

if TYPE_CHECKING:
    from sppo_hf.testing.check import CheckResult

EXIT_CODES = {"exact": 0, "not exact": 1, "refused": 2}
MOST_TOKENS = 4096
"""What even a model of one head may be checked with; see `sppo_hf.testing.check`."""


class Dtype(StrEnum):
    """Weights' dtype; a choice on the command line."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"


def check(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A Transformers model type (llama, qwen3, ...), a local model folder, a"
            " config.json, or a hub id (only its configuration is read)."
        ),
    ] = None,
    list_families: Annotated[
        bool,
        typer.Option(
            "--list",
            help="Print the families that were tried and their errors, and how long well-known"
            " checkpoints may be.",
        ),
    ] = False,
    chunks: Annotated[
        str,
        typer.Option(help="Number of chunks, or their lengths in tokens: 9,6,14."),
    ] = "4",
    tokens: Annotated[
        int, typer.Option(min=1, max=MOST_TOKENS, help="Length of the sequences, in tokens.")
    ] = 29,
    dtype: Annotated[
        Dtype,
        typer.Option(
            help="float64 and float32 compare directly, bfloat16 compares distances from float32."
        ),
    ] = Dtype.float64,
    recompute: Annotated[common.Mode, typer.Option(help="Mode under test.")] = common.Mode.full,
    offload: Annotated[common.Mode, typer.Option(help="Mode under test.")] = common.Mode.full,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Compare loss and all gradients of a small MODEL with and without sppo_hf.

    Exit code 0: exact. 1: not exact. 2: refused, or bad input.
    """
    if list_families:
        _print_list(as_json=as_json)
        return
    if model is None:
        raise typer.BadParameter("name a model, or use --list", param_hint="MODEL")
    with common.bad_input(as_json, name=model):
        config = SPPOConfig(
            **_chunks(chunks), recompute=recompute.value, offload=offload.value, min_offload_size=1
        )
        result = _run(model, config, tokens, dtype)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
    else:
        _print(result, tokens)
    raise typer.Exit(EXIT_CODES[result.status])


def _print_list(*, as_json: bool) -> None:
    """The tables of `recipes/tools`: families as they were tried, checkpoints as predicted."""
    found, longest = (
        json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
        for name in ("families.json", "checkpoints.json")
    )
    if as_json:
        typer.echo(json.dumps(found | {"longest": longest}, indent=1))
        return
    _print_families(found)
    _print_checkpoints(longest)


def _print_families(found: dict[str, Any]) -> None:
    table = Table(title=f"Transformers {found['transformers']}, float64", title_justify="left")
    for column in ("family", "", "what it exercises, or why it is refused"):
        table.add_column(column, overflow="fold")
    for row in found["families"]:
        exact = row["status"] == "exact"
        verdict = (
            f"[green]{row['error']:.0e}[/green]" if exact else f"[yellow]{row['status']}[/yellow]"
        )
        table.add_row(row["name"], verdict, escape(row["feature"] if exact else row["reason"]))
    common.console().print(table, highlight=False)


def _print_checkpoints(found: dict[str, Any]) -> None:
    table = Table(
        title="Longest sequence on one 80 GB H100, predicted, not measured: LoRA rank"
        f" {found['lora_rank']}, bf16, {found['host_memory']} of host memory",
        title_justify="left",
    )
    table.add_column("checkpoint", no_wrap=True)
    table.add_column("family")
    for column in ("parameters", "tokens", "made for"):
        table.add_column(column, justify="right")
    for row in found["checkpoints"]:
        table.add_row(
            row["name"],
            row["family"],
            f"{row['parameters'] / 1e9:.2f}B",
            f"{row['longest_tokens']:,}" if row["longest_tokens"] else "none fits",
            f"{row['positions_tokens']:,}" if row["positions_tokens"] else "any",
        )
    common.console().print(table, highlight=False)


def _chunks(text: str) -> dict[str, Any]:
    """`num_chunks` or `chunk_lengths` from "4" or "9,6,14"."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is neither a number of chunks (4) nor lengths in tokens (9,6,14)",
            param_hint="--chunks",
        ) from None
    return {"num_chunks": numbers[0]} if len(numbers) == 1 else {"chunk_lengths": numbers}


def _run(model: str, config: SPPOConfig, tokens: int, dtype: Dtype) -> CheckResult:
    path = Path(model).expanduser()
    if os.path.exists(path):  # False for what can be no path, where Path raises
        # Before torch is imported, which takes seconds.
        check_sizes(read_fields(path))
    import torch
    import transformers

    from sppo_hf.testing.check import check_model

    transformers.logging.set_verbosity_error()
    # Products of a few thousand numbers: handing them to other threads takes ten times as long.
    torch.set_num_threads(1)
    return check_model(model, config, tokens=tokens, dtype=getattr(torch, dtype.value))


def _print(result: CheckResult, tokens: int) -> None:
    """The result as a table, the verdict in its title."""
    colour = {"exact": "green", "not exact": "red", "refused": "yellow"}[result.status]
    table = Table(
        title=f"{result.name}: [{colour}]{result.status}[/{colour}]",
        title_justify="left",
        show_header=False,
    )
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    weights = "tiny random weights" if result.random_weights else "its own weights"
    table.add_row(
        "model", f"{result.model_class}, {result.num_parameters:,} parameters ({weights})"
    )
    if result.note:
        table.add_row("checked", result.note)
    if result.status == "refused":
        table.add_row("reason", result.reason)
    else:
        chunks = "" if result.num_chunks is None else f" in {result.num_chunks} chunks"
        table.add_row("run", f"2 rows of {tokens} tokens{chunks}, {result.dtype}")
        table.add_row("loss", f"{result.loss:.12g} (unmodified model {result.reference_loss:.12g})")
        kind = "worst error" if result.worst_parameters else "distance from float32"
        table.add_row(kind, f"{result.error:.2e} (allowed {result.allowed:.2e})")
        for index, (name, error) in enumerate(result.worst_parameters):
            table.add_row("worst parameters" if index == 0 else "", f"{name}  {error:.2e}")
    common.console().print(table)
