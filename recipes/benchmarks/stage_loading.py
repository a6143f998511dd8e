"""Peak host memory of ranks that load their own stages of a checkpoint, or cut them out of it.

    python recipes/benchmarks/stage_loading.py --ranks 4 --check

Writes a random Llama as sharded safetensors, then starts gloo ranks that load it through
`SPPOPlugin.load_model`. Counted is everything resident (anonymous and mapped, Linux's VmHWM) above
what the process held before the call. A rank may need 1.2 times its stage and 1 GiB. With `--whole`
ranks load all of it by `from_pretrained` and cut their stages out of that, for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from sppo_hf import SPPOPlugin
from sppo_hf.engine.model_parts import find_parts
from sppo_hf.pipeline.convert import staged_model
from sppo_hf.rules import format_bytes

GIB = 1 << 30
MAX_RATIO = 1.2


def resident() -> dict[str, int]:
    """Bytes of this process: VmRSS and VmHWM, and the anonymous and mapped share of now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {n: int(fields[n].split()[0]) << 10 for n in ("VmRSS", "VmHWM", "RssAnon", "RssFile")}


def write_checkpoint(folder: Path, options: argparse.Namespace) -> None:
    """A Llama of random weights; about 2.7 GB in float32 at the defaults."""
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=options.hidden_size,
        intermediate_size=4 * options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.stored))
    model.save_pretrained(folder, max_shard_size="500MB")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """What loading takes on this rank."""
    PartialState(cpu=True)
    torch.set_num_threads(1)
    plugin = SPPOPlugin(pp_size=options.ranks)
    dtype = getattr(torch, options.dtype)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of what was imported
    before, began = resident(), time.perf_counter()
    if options.whole:
        model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=dtype)
        staged_model(find_parts(model), plugin.config, PartialState().process_index)
    else:
        model = plugin.load_model(options.checkpoint, dtype=dtype)
    loaded = resident()
    touch(model)
    seconds, after = time.perf_counter() - began, resident()
    return {
        "rank": PartialState().process_index,
        "stage_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "peak_bytes": after["VmHWM"] - before["VmRSS"],
        "kept_bytes": after["VmRSS"] - before["VmRSS"],
        "kept_mapped_bytes": after["RssFile"] - before["RssFile"],
        "loaded_bytes": loaded["VmRSS"] - before["VmRSS"],
        "seconds": seconds,
    }


def touch(model: nn.Module) -> None:
    """Read every weight: what is mapped is only in memory from then on."""
    for parameter in model.parameters():
        parameter.detach().sum()


def run_ranks(checkpoint: Path, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measurements of all ranks, which load at the same time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--checkpoint", str(checkpoint), "--dtype", options.dtype]
    command += ["--ranks", str(options.ranks)] + ["--whole"] * options.whole
    ranks = []
    for rank in range(options.ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        place |= {"WORLD_SIZE": str(options.ranks), "MASTER_PORT": str(port)}
        place |= {"SPPO_OUT": str(folder / f"{rank}.json"), "HF_HUB_OFFLINE": "1"}
        ranks.append(subprocess.Popen(command, env={**os.environ, **place}))
    if any([process.wait() for process in ranks]):
        raise SystemExit("a rank failed; see above")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(options.ranks)]


def show(taken: list[dict[str, Any]], options: argparse.Namespace) -> list[str]:
    """One table on the terminal; returns what exceeds the bound, in sentences."""
    how = "whole, then cut" if options.whole else "own stages"
    table = Table(title=f"{how}: stored {options.stored}, loaded {options.dtype}")
    for heading in ("rank", "stage", "peak", "allowed", "of allowed", "kept", "mapped", "seconds"):
        table.add_column(heading, justify="right")
    exceeded = []
    for rank in taken:
        allowed = MAX_RATIO * rank["stage_bytes"] + GIB
        sizes = [rank["stage_bytes"], rank["peak_bytes"], allowed]
        kept = [rank["kept_bytes"], rank["kept_mapped_bytes"]]
        table.add_row(
            str(rank["rank"]),
            *map(format_bytes, sizes),
            f"{rank['peak_bytes'] / allowed:.2f}",
            *map(format_bytes, kept),
            f"{rank['seconds']:.1f}",
        )
        if rank["peak_bytes"] > allowed:
            exceeded.append(
                f"rank {rank['rank']} took {format_bytes(rank['peak_bytes'])}, allowed are "
                f"{format_bytes(allowed)}"
            )
    Console().print(table)
    return exceeded


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden-size", type=int, default=1280)
    parser.add_argument("--stored", default="float32", help="dtype of the checkpoint")
    parser.add_argument("--dtype", default="float32", help="dtype that is asked for")
    parser.add_argument("--whole", action="store_true", help="load all, then cut, to compare")
    parser.add_argument("--folder", help="where the checkpoint is written for the time being")
    parser.add_argument("--json", type=Path, help="file that all numbers are written to")
    parser.add_argument("--check", action="store_true", help="exit status 1 if the bound is passed")
    parser.add_argument("--checkpoint", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    if options.checkpoint:
        Path(os.environ["SPPO_OUT"]).write_text(json.dumps(measure(options)))
        torch.distributed.destroy_process_group()
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write_checkpoint(Path(folder, "model"), options)
        taken = run_ranks(Path(folder, "model"), options, Path(folder))
    exceeded = show(taken, options)
    if options.json:
        content = {"settings": vars(options), "ranks": taken, "exceeded": exceeded}
        options.json.write_text(json.dumps(content, indent=2, default=str))
    for sentence in exceeded:
        print(f"exceeded: {sentence}", file=sys.stderr)
    return 1 if options.check and exceeded else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
