"""`sppo estimate MODEL --seq-len N`: does it fit, how fast is it, and how long may sequences be?

Neither torch nor Transformers is imported, so the answer comes at once.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from sppo_hf.cli import common
from sppo_hf.planning.feasibility import assess_request, is_possible
from sppo_hf.reporting.plan_json import answer_to_dict
from sppo_hf.reporting.plan_tables import estimate_table

_SUGGESTED_LORA_RANK = 16


Images = Annotated[
    bool,
    typer.Option(
        "--images",
        help="Rows have images, video or sound: what the text decoder is given for all tokens is"
        " held. Encoders are not counted, and adapters are those of the decoder.",
    ),
]


@common.with_options(common.PlanningArguments)
def estimate(
    arguments: common.PlanningArguments, images: Images = False, as_json: common.AsJson = False
) -> None:
    """Say whether training MODEL at a length fits a machine, how fast, and what breaks first.

    The machine need not be this one, and no weights are read.

    Exit code 0: it fits. 1: it does not. 2: bad input.
    """
    arguments = dataclasses.replace(arguments, images=images)
    with common.bad_input(as_json):
        request = arguments.plan_request()
        answer = assess_request(request)
        remedies = [] if answer.fits or as_json else _adapters_that_fit(arguments)
    if as_json:
        common.echo_json(answer_to_dict(answer))
    else:
        out = common.console()
        out.print(estimate_table(answer, arguments.title, remedies))
        out.print(arguments.hardware_note(request), style="dim", highlight=False)
    raise typer.Exit(common.EXIT_FITS if answer.fits else common.EXIT_DOES_NOT_FIT)


def _adapters_that_fit(arguments: common.PlanningArguments) -> list[str]:
    """Return the option for LoRA adapters if all weights are trained and adapters would fit."""
    if arguments.lora is not None:
        return []
    with_adapters = dataclasses.replace(arguments, lora=_SUGGESTED_LORA_RANK)
    fits = is_possible(with_adapters.plan_request())
    return [f"--lora {_SUGGESTED_LORA_RANK}"] if fits else []
