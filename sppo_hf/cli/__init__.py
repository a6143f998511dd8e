"""The `sppo` command line; nothing may import it, and it does its work through the rooms below.

Commands import torch and Transformers when they run, so that `sppo --help` answers at once.
"""

from __future__ import annotations

import gc

import typer

from sppo_hf.cli.bench import bench
from sppo_hf.cli.calibrate import calibrate
from sppo_hf.cli.check import check
from sppo_hf.cli.config import config
from sppo_hf.cli.estimate import estimate
from sppo_hf.cli.plan import plan
from sppo_hf.cli.renamed import RenamedOptions
from sppo_hf.cli.simulate import simulate

app = typer.Typer(
    name="sppo",
    help="Exact long-context fine-tuning of Hugging Face models, chunk by chunk.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(bench)
app.command()(calibrate)
app.command()(check)
app.command()(config)
for command in (estimate, plan, simulate):
    app.command(cls=RenamedOptions)(command)


@app.callback()
def _root() -> None:
    """Keeps `check` a subcommand while it is the only one."""


def main() -> None:
    """Entry point of the console script."""
    # Plans are many small objects and no circles: to look for these less often saves time.
    gc.set_threshold(50_000)
    app()
