"""`sppo estimate MODEL --seq-len N`: does it fit, how fast is it, and how long may sequences be?

Only arguments and printing; answering is `sppo_hf.planning.plan_request`. Neither torch nor
Transformers is imported, so the answer comes at once.
"""

from __future__ import annotations

import dataclasses

import typer

from sppo_hf.cli import common
from sppo_hf.planning.plan_request import is_possible, request_plan
from sppo_hf.reporting.plan_json import answer_to_dict
from sppo_hf.reporting.plan_tables import estimate_table

_USUAL_RANK = 16


def estimate(
    model: common.Model,
    seq_len: common.SeqLen,
    device_memory: common.DeviceMemory = None,
    host_memory: common.HostMemory = None,
    disk: common.Disk = None,
    hardware: common.Hardware = None,
    lora: common.Lora = None,
    rows: common.Rows = 1,
    accumulate: common.Accumulate = False,
    dtype: common.ComputeDtype = common.Dtype.bfloat16,
    partition: common.Cut = common.Partition.auto,
    num_chunks: common.NumChunks = "auto",
    recompute: common.Recompute = None,
    attention_once: common.AttentionOnce = False,
    offload_kv: common.OffloadKv = common.Mode.auto,
    weights: common.Weights = common.Place.auto,
    optimizer: common.Optimizer = common.Place.auto,
    as_json: common.AsJson = False,
) -> None:
    """Say whether training MODEL at a length fits a machine, how fast, and what breaks first.

    The machine need not be this one, and no weights are read.

    Exit code 0: it fits. 1: it does not. 2: bad input.
    """
    arguments = common.from_options(common.PlanningArguments, locals())
    with common.bad_input(as_json):
        question = arguments.question()
        answer = request_plan(question)
        also = [] if answer.fits or as_json else _adapters_that_fit(arguments)
    if as_json:
        common.echo_json(answer_to_dict(answer))
    else:
        out = common.console()
        out.print(estimate_table(answer, arguments.title, also))
        out.print(arguments.hardware_note(question), style="dim", highlight=False)
    raise typer.Exit(common.FITS if answer.fits else common.FITS_NOT)


def _adapters_that_fit(arguments: common.PlanningArguments) -> list[str]:
    """Says so where adapters would fit in place of all weights."""
    if arguments.lora is not None:
        return []
    with_adapters = dataclasses.replace(arguments, lora=_USUAL_RANK)
    return [f"--lora {_USUAL_RANK}"] if is_possible(with_adapters.question()) else []
