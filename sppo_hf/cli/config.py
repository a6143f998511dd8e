"""`sppo config`: every setting, what it does and its default, as a settings file to start from."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer
import yaml
from rich.console import Console

from sppo_hf.config import SPPOConfig, field_help
from sppo_hf.errors import SPPOError

BAD_INPUT = 2


def config(
    settings: Annotated[
        list[str] | None, typer.Argument(help="Names of settings; all of them by default.")
    ] = None,
) -> None:
    """Print all settings with their defaults, as a sppo.yaml to start from.

    sppo config > sppo.yaml
    """
    defaults = SPPOConfig().to_dict()
    try:
        helps = {name: field_help(name) for name in settings or defaults}
    except SPPOError as error:
        Console(stderr=True, soft_wrap=True).print(f"[red]bad input[/red] {error}", highlight=False)
        raise typer.Exit(BAD_INPUT) from error
    for name, text in helps.items():
        typer.echo(textwrap.fill(text, 88, initial_indent="# ", subsequent_indent="# "))
        typer.echo(yaml.safe_dump({name: defaults[name]}))
