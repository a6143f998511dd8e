"""`sppo config`: every setting, what it does and its default, as a settings file to start from."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer
import yaml

from sppo_hf.cli.common import bad_input
from sppo_hf.config import SPPOConfig, field_help


def config(
    settings: Annotated[
        list[str] | None, typer.Argument(help="Names of settings; all of them by default.")
    ] = None,
) -> None:
    """Print all settings with their defaults, as a sppo.yaml to start from.

    sppo config > sppo.yaml
    """
    defaults = SPPOConfig().to_dict()
    with bad_input(as_json=False):
        helps = {name: field_help(name) for name in settings or defaults}
    for name, text in helps.items():
        text = text.replace("None", "null")  # as it is written in YAML
        typer.echo(textwrap.fill(text, 88, initial_indent="# ", subsequent_indent="# "))
        typer.echo(yaml.safe_dump({name: defaults[name]}))
