"""`sppo estimate MODEL --seq-len N`: does it fit, how fast is it, and how long may sequences be?

Only arguments and printing; answering is `sppo_hf.planning.plan_request`. Neither torch nor
Transformers is imported, so the answer comes at once.
"""

from __future__ import annotations

import dataclasses

import typer

from sppo_hf.cli import planning_arguments as given
from sppo_hf.planning.plan_request import is_possible, request_plan
from sppo_hf.reporting.plan_json import answer_to_dict
from sppo_hf.reporting.plan_tables import estimate_table

_USUAL_RANK = 16


def estimate(
    model: given.Model,
    seq_len: given.SeqLen,
    device_memory: given.DeviceMemory = None,
    host_memory: given.HostMemory = None,
    disk: given.Disk = None,
    hardware: given.Hardware = None,
    lora: given.Lora = None,
    rows: given.Rows = 1,
    accumulate: given.Accumulate = False,
    dtype: given.ComputeDtype = given.Dtype.bfloat16,
    partition: given.Cut = given.Partition.auto,
    num_chunks: given.NumChunks = "auto",
    recompute: given.Recompute = None,
    attention_once: given.AttentionOnce = False,
    offload_kv: given.OffloadKv = given.Mode.auto,
    weights: given.Weights = given.Place.auto,
    optimizer: given.Optimizer = given.Place.auto,
    as_json: given.AsJson = False,
) -> None:
    """Say whether training MODEL at a length fits a machine, how fast, and what breaks first.

    The machine need not be this one, and no weights are read.

    Exit code 0: it fits. 1: it does not. 2: bad input.
    """
    arguments = given.from_options(given.PlanningArguments, locals())
    with given.bad_input(as_json):
        question = arguments.question()
        answer = request_plan(question)
        also = [] if answer.fits or as_json else _adapters_that_fit(arguments)
    if as_json:
        given.echo_json(answer_to_dict(answer))
    else:
        out = given.console()
        out.print(estimate_table(answer, arguments.title, also))
        out.print(arguments.hardware_note(question), style="dim", highlight=False)
    raise typer.Exit(given.FITS if answer.fits else given.FITS_NOT)


def _adapters_that_fit(arguments: given.PlanningArguments) -> list[str]:
    """Says so where adapters would fit in place of all weights."""
    if arguments.lora is not None:
        return []
    with_adapters = dataclasses.replace(arguments, lora=_USUAL_RANK)
    return [f"--lora {_USUAL_RANK}"] if is_possible(with_adapters.question()) else []
