"""What tests leave out unless everything is asked for: `bash tests/run.sh --all`.

A sweep over many that are alike runs on a sample with one of each kind, and random examples are
fewer. What is the only one of its kind runs always. Where a sweep has two axes, families and
settings, each setting is met by some of the families and each family has some of the settings;
where it has three (`pairs`), every two settings meet.
Launches of ranks have several special things in one case where they fit into one and that is less
work (`pipeline_cases.merge_cases`), and leave families that others have out of their sweep over
families, of which pipelines and shared sequences meet every second one each; what is special is met
by two ranks, and by three or four where more stages make it another thing; even chunks of most
schedules are met by three. Of trainings that are compared step by step one has fifty steps in one
process and one has twenty in a pipeline, others have a few. Of launchers `accelerate launch` starts
processes by itself; others' ranks are forked. Of scripts that a program under `sppo_hf.run` starts
one imports the real packages; others have stand-ins. What ranks compile, Inductor compiles in one
process, to code for one number at a time. Tests are collected without optional packages in a fork
of a process that has imported torch and Transformers with them.
Of what is left, `--one-in 3` runs every third case of each test: `.ci/run` does so with the oldest
libraries.
"""

import os
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from hypothesis import settings

ALL = os.environ.get("SPPO_TESTS_ALL") == "1"
"""Whether sweeps are whole."""

KINDS = frozenset(
    # Rotary tables: of other lengths, of a part of a head, none; positions that scale queries.
    "llama-dynamic-rope phi3-longrope phi cohere2 ministral3 gpt2"
    # Biases, norms over all heads, norms in attention, multipliers, soft caps, one head of keys.
    " qwen2 olmo2 bitnet granite gemma2 gpt_bigcode"
    # Windows, blocks and sinks; latent attention; two sizes of heads; keys that are values.
    " llama4_text granite_swa minicpm3 deepseek_v3 mimo_v2_flash gemma4_text-26b-a4b"
    # Experts: beside attention, inside it, of clipped products, with a loss of their routers.
    " qwen3_moe jetmoe dbrx gpt_oss-router-loss"
    # Inputs of each layer, keys of other layers; encoders, positions along three axes.
    " gemma4_text gemma3n_text gemma3 qwen2_5_vl".split()
)
"""Families of `tiny_families` without states that differ in how they attend or are built."""


def sample(items: Sequence[Any], step: int) -> list[Any]:
    """Every `step`-th item; or all."""
    return list(items if ALL else items[::step])


def turn(items: Sequence[Any], step: int, index: int) -> list[Any]:
    """As `sample`, but one that begins elsewhere for each `index`, so that all are met in turn."""
    return list(items if ALL else items[index % step :: step])


def one_in(step: int, names: Sequence[str]) -> set[str]:
    """Every `step`-th case of each test, and one where it has fewer.

    `names` are pytest's. Each test begins with another case than the one before, so that tests over
    the same axis share it.
    """
    tests: dict[str, list[str]] = {}
    for name in names:
        tests.setdefault(name.partition("[")[0], []).append(name)
    kept = set[str]()
    for index, cases in enumerate(tests.values()):
        kept.update(cases[index % min(step, len(cases)) :: step])
    return kept


def pairs(first: Iterable[Any], second: Iterable[Any], third: Sequence[Any]) -> list[Any]:
    """The product of three axes; or of it as many as have every pair of settings of two axes.

    These have each pair of the first two once, and go through the third, which must not be longer.
    """
    return [
        (one, other, last)
        for (i, one), (j, other) in product(enumerate(first), enumerate(second))
        for last in turn(third, len(third), i + j)
    ]


def examples(count: int, *, whole: int) -> settings:
    """Hypothesis's settings for `count` examples; or for `whole`."""
    return settings(max_examples=whole if ALL else count)
