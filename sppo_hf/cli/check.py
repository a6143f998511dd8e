"""`sppo check MODEL`: is this model exact chunk by chunk? Compares the loss and every gradient.

The comparison is `sppo_hf.testing.check`. Torch is imported when the command runs.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from sppo_hf.cli import common
from sppo_hf.config import SPPOConfig
from sppo_hf.planning.config_file import check_sizes, read_fields

if TYPE_CHECKING:
    from sppo_hf.testing.check import CheckResult

EXIT_CODES = {"exact": 0, "not exact": 1, "refused": 2}
MAX_TOKENS = 4096
"""Longest sequence, even for a model of one head; `sppo_hf.testing.check` has the reason."""

Dtype = Literal["float64", "float32", "bfloat16"]
Mode = Annotated[Literal["auto", "none", "full"], typer.Option(help="Mode under test.")]


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
        int, typer.Option(min=1, max=MAX_TOKENS, help="Length of the sequences, in tokens.")
    ] = 29,
    dtype: Annotated[
        Dtype,
        typer.Option(
            help="float64 and float32 compare directly, bfloat16 compares distances from float32."
        ),
    ] = "float64",
    recompute: Mode = "full",
    offload: Mode = "full",
    as_json: common.AsJson = False,
) -> None:
    """Compare loss and all gradients of a small MODEL with and without sppo_hf.

    A batch of text, and if MODEL takes images, one with images. Of these only gradients that are
    wrong change the exit code.

    Exit code 0: exact. 1: not exact. 2: refused, or bad input.
    """
    if list_families:
        _print_list(as_json=as_json)
        return
    if model is None:
        raise typer.BadParameter("name a model, or use --list", param_hint="MODEL")
    with common.bad_input(as_json, name=model):
        config = SPPOConfig(
            **_parse_chunks(chunks), recompute=recompute, offload=offload, min_offload_size=1
        )
        result = _run(model, config, tokens, dtype)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
    else:
        _print(result, tokens)
    raise typer.Exit(EXIT_CODES[result.status])


def _print_list(*, as_json: bool) -> None:
    """Print the tables made by `recipes/tools`: tested families, and predicted lengths."""
    here = Path(__file__)
    families, checkpoints = (
        json.loads(path.read_text(encoding="utf-8"))
        for path in (
            here.parents[1] / "engine" / "families.json",
            here.with_name("checkpoints.json"),
        )
    )
    if as_json:
        typer.echo(json.dumps(families | {"longest": checkpoints}, indent=1))
        return
    _print_families(families)
    _print_checkpoints(checkpoints)


def _print_families(listed: dict[str, Any]) -> None:
    table = Table(title=f"Transformers {listed['transformers']}, float64", title_justify="left")
    for column in ("family", "", "what it exercises, or why it is refused"):
        table.add_column(column, overflow="fold")
    for row in listed["families"]:
        exact = row["status"] == "exact"
        verdict = (
            f"[green]{row['error']:.0e}[/green]" if exact else f"[yellow]{row['status']}[/yellow]"
        )
        table.add_row(row["name"], verdict, escape(row["feature"] if exact else row["reason"]))
    common.console().print(table, highlight=False)


def _print_checkpoints(listed: dict[str, Any]) -> None:
    table = Table(
        title="Longest sequence on one 80 GB H100, predicted, not measured: LoRA rank"
        f" {listed['lora_rank']}, bf16, {listed['host_memory']} of host memory",
        title_justify="left",
    )
    table.add_column("checkpoint", no_wrap=True)
    table.add_column("family")
    for column in ("parameters", "tokens", "made for"):
        table.add_column(column, justify="right")
    for row in listed["checkpoints"]:
        table.add_row(
            row["name"],
            row["family"],
            f"{row['parameters'] / 1e9:.2f}B",
            f"{row['longest_tokens']:,}" if row["longest_tokens"] else "none fits",
            f"{row['positions_tokens']:,}" if row["positions_tokens"] else "any",
        )
    common.console().print(table, highlight=False)


def _parse_chunks(text: str) -> dict[str, Any]:
    """Return the setting `num_chunks` or `chunk_lengths` from "4" or "9,6,14"."""
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
    if os.path.exists(path):  # unlike Path.exists, False for texts that can be no path
        check_sizes(read_fields(path))  # before torch is imported, which takes seconds
    source = model
    if model.count("/") == 1 and not os.path.exists(path) and not path.is_absolute():
        # Asks once, with a short timeout; Transformers would ask for a minute where nobody answers.
        source = str(common.model_path(model))
    import torch
    import transformers

    from sppo_hf.testing.check import check_model

    transformers.logging.set_verbosity_error()
    # Tensors of a few thousand numbers: with several threads each operator takes ten times as long.
    torch.set_num_threads(1)
    result = check_model(source, config, tokens=tokens, dtype=getattr(torch, dtype), images=True)
    return dataclasses.replace(result, name=model)


def _print(result: CheckResult, tokens: int) -> None:
    """Print the result as a table with the verdict in its title."""
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
    if found := result.images:
        number = "" if found.error is None else f"{found.error:.2e}"
        details = " ".join(part for part in (number, found.reason) if part)
        table.add_row("with images", f"{found.status}: {details}")
    common.console().print(table)
