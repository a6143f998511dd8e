"""Tokens per second and peak memory at 8K to 256K tokens: ours, what users have today, the ideal.

    python recipes/benchmarks/long_context.py
    python recipes/benchmarks/long_context.py qwen3-4b --seq-lens 32K,64K --output results/qwen
    python recipes/benchmarks/long_context.py --longest

This is `sppo bench` with defaults: Llama-3.1-8B's shape with random weights, bfloat16, LoRA r=16 on
all linear layers, every contender. All its options hold; `sppo bench --help` says what they are.
Made for one GPU of 80 GB; a run that is stopped goes on where it was.
"""

from __future__ import annotations

import sys

from sppo_hf.cli import app

MODEL = "llama-3.1-8b"
LENGTHS = ["--seq-lens", "8K,32K,64K,128K,256K"]
SETTINGS = ["--dtype", "bfloat16", "--lora", "16", "--contenders", "all"]


def arguments(argv: list[str]) -> list[str]:
    """The command line of `sppo`: what is given comes after the defaults, and so wins."""
    given = list(argv)
    model = given.pop(0) if given and not given[0].startswith("-") else MODEL
    lengths = [] if "--longest" in given else LENGTHS
    return ["bench", model, *lengths, *SETTINGS, *given]


if __name__ == "__main__":
    app(arguments(sys.argv[1:]))
