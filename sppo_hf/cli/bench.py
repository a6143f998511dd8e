"""`sppo bench MODEL`: how fast, how large and how long, beside the ways that users have today.

Measuring is `sppo_hf.cli.benchmark`. Torch is imported when a benchmark runs, not when results are
shown.
"""

from __future__ import annotations

import re
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sppo_hf.cli import common
from sppo_hf.cli.benchmark.contenders import parse_list
from sppo_hf.cli.benchmark.driver import Benchmark, Workers
from sppo_hf.cli.benchmark.report import draw, progress_line, tables
from sppo_hf.cli.benchmark.results import Job, ResultFile, Row
from sppo_hf.cli.benchmark.trace_summary import FILE as PROFILE_FILE
from sppo_hf.cli.benchmark.trace_summary import profile_table, profiles
from sppo_hf.config import parse_bytes
from sppo_hf.errors import ConfigError
from sppo_hf.planning.config_file import check_config
from sppo_hf.planning.hardware import load_profile
from sppo_hf.planning.machine import nvidia_driver_version, processor_name
from sppo_hf.planning.model_profile import LoraShape
from sppo_hf.rules import read_budget, show

LENGTHS = "8192,32768"
OUTPUT = Path("bench")
ATTENTION = ("auto", "cudnn", "flash", "efficient", "sdpa")
_CUDA_ONLY = ("cudnn", "flash", "efficient")
_MIN_WIDTH = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchArguments:
    """Options of `sppo bench`, as they were typed."""

    model: Annotated[
        str | None,
        typer.Argument(
            help="A shipped name (llama-3.1-8b, qwen3-4b, smollm2-135m), a local model folder, a"
            " config.json, or a hub id. Weights are random.",
            metavar="MODEL",
        ),
    ] = None
    seq_lens: Annotated[
        str | None,
        typer.Option(
            help=f"Lengths with commas between: 8192,32K,1M. By default {LENGTHS}; none with"
            " --longest.",
            show_default=False,
        ),
    ] = None
    contenders: Annotated[
        str,
        typer.Option(
            help="Names with commas between, or all. Plain, checkpointing, ours and the ideal also"
            " with +liger, those that checkpoint also with +tiled (the ideal's loss)."
        ),
    ] = "all"
    dtype: common.Dtype = "bfloat16"
    lora: Annotated[
        str, typer.Option(help="Rank of adapters on all linear layers, or full: all weights train.")
    ] = "16"
    lora_dtype: Annotated[
        str | None,
        typer.Option(help="Dtype of adapters: float32, as PEFT makes them, or that of --dtype."),
    ] = None
    steps: Annotated[
        int, typer.Option(min=1, max=10_000, help="Steps measured; their median counts.")
    ] = 3
    warm_up: Annotated[
        int,
        typer.Option(
            min=0,
            max=10_000,
            help="Steps before those. sppo may correct its plan until its third step.",
        ),
    ] = 3
    attention: Annotated[
        str,
        typer.Option(
            help="Attention kernel for all contenders: auto (the one that sppo takes), cudnn,"
            " flash, efficient; sdpa leaves each its default."
        ),
    ] = "auto"
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto.")] = "auto"
    autocast: Annotated[bool, typer.Option("--autocast", help="Train under bfloat16 autocast.")] = (
        False
    )
    device_memory: Annotated[
        str | None,
        typer.Option(help="Budget on the device, 40GiB: on CUDA a limit for all contenders."),
    ] = None
    host_memory: Annotated[
        str | None, typer.Option(help="Budget in host memory, for sppo only.")
    ] = None
    hardware: Annotated[
        str | None,
        typer.Option(help="Profile that sppo plans with; by default what is known of the device."),
    ] = None
    longest: Annotated[
        bool, typer.Option("--longest", help="Search the longest length each contender trains.")
    ] = False
    longest_step: Annotated[
        str, typer.Option(help="Resolution of that search, and its first length.")
    ] = "4096"
    longest_limit: Annotated[str, typer.Option(help="Lengths above are not searched.")] = "16M"
    trace: Annotated[
        bool, typer.Option("--trace", help="Profile one more step of sppo into trace-*.json.gz.")
    ] = False
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Profile one more step of all contenders; profile.json and a table say how long"
            " each kind of kernel takes per token.",
        ),
    ] = False
    timeout: Annotated[float, typer.Option(min=1, max=10**6, help="Seconds for one row.")] = 3600.0
    output: Annotated[
        Path, typer.Option(help="Folder of results.jsonl, results.png, logs and traces.")
    ] = OUTPUT
    again: Annotated[
        bool, typer.Option("--again", help="Also measure what results.jsonl already has.")
    ] = False
    show: Annotated[
        Path | None,
        typer.Option(help="Show the results in a folder, and measure nothing."),
    ] = None
    picture: Annotated[bool, typer.Option(help="Draw results.png.")] = True

    @property
    def lengths(self) -> list[int]:
        """Lengths to measure, in tokens."""
        text = self.seq_lens
        if text is None:
            text = "" if self.longest else LENGTHS
        return [common.parse_tokens(part) for part in text.split(",") if part.strip()]

    @property
    def search_range(self) -> tuple[int, int]:
        """The resolution and the end of the search for the longest length, in tokens."""
        step_tokens = common.parse_tokens(self.longest_step)
        max_tokens = common.parse_tokens(self.longest_limit)
        if self.longest and max_tokens < step_tokens:
            raise ConfigError(
                f"--longest-limit is {max_tokens:,} and --longest-step {step_tokens:,} tokens. "
                "Allowed: a limit of at least one step. Remedy: raise the one or lower the other."
            )
        return step_tokens, max_tokens

    def job(self, model: str) -> Job:
        """Return the job that those of all lengths and contenders are copies of."""
        return Job(
            model=model,
            contender="plain",
            total_tokens=1,
            device=self.device,
            dtype=self.dtype,
            lora_rank=_lora_rank(self.lora),
            lora_dtype=_lora_dtype(self.lora_dtype, self.dtype),
            steps=self.steps,
            warm_up=self.warm_up,
            attention=self.attention,
            autocast=self.autocast,
            device_memory=_budget("--device-memory", self.device_memory),
            host_memory=_budget("--host-memory", self.host_memory),
            hardware=self.hardware,
        )


@common.with_options(BenchArguments)
def bench(arguments: BenchArguments, as_json: common.AsJson = False) -> None:
    """Measure MODEL at several lengths: sppo_hf, what users have today, and the ideal.

    Contenders: plain, checkpointing, checkpointing-default, checkpointing-offload, trl-offload,
    trl-long, unsloth, alst, accelerate-cp (skipped: one GPU), sppo-none, sppo-full, sppo-sppo,
    sppo-auto, ideal.

    Every row is a process of its own and goes to results.jsonl at once; rows that are there are not
    measured again. Running out of memory or time is a row too.

    Exit code 0: done. 2: bad input.
    """
    with common.bad_input(as_json):
        if arguments.show is None:
            folder, file = arguments.output, _measure(arguments)
        else:
            folder, file = arguments.show, ResultFile(arguments.show)
            if not file.rows():
                raise ConfigError(f"there is no result in {file.path}. Remedy: name its folder.")
        _report(file, folder, picture=arguments.picture, as_json=as_json)


def _measure(arguments: BenchArguments) -> ResultFile:
    """Measure what the options ask for, each row in a process of its own."""
    model, device, attention = arguments.model, arguments.device, arguments.attention
    if model is None:
        raise ConfigError("MODEL is missing. Remedy: name one, or a folder with --show.")
    check_config(common.read_model(model))
    lengths = arguments.lengths
    step_tokens, max_tokens = arguments.search_range
    if arguments.hardware is not None:
        load_profile(arguments.hardware)  # refused here rather than by every worker
    _check_device(device, attention)
    job, file = arguments.job(model), ResultFile(arguments.output)
    names = parse_list(arguments.contenders)
    progress = _Progress((len(lengths) + arguments.longest) * len(names))
    logs = arguments.output / "logs"
    with closing(Workers(timeout_seconds=arguments.timeout, logs=logs)) as workers:
        if device != "cpu" and nvidia_driver_version() != "unknown":
            workers.start()  # it imports PyTorch while this process does
        kind = _device_kind(device, attention)
        # On a CPU it would take processors from a job that is measured, or makes its weights.
        workers.ahead = kind != "cpu"
        profiled = arguments.trace or arguments.profile
        benchmark = Benchmark(
            base=job.replace(device=kind, device_name=_device_name(kind)),
            contenders=names,
            file=file,
            run=workers.run,
            on_row=progress,
            again=arguments.again,
            trace_folder=arguments.output if profiled else None,
            trace_all=arguments.profile,
        )
        benchmark.measure(lengths)
        if arguments.longest:
            benchmark.find_longest(step_tokens=step_tokens, max_tokens=max_tokens)
    return file


class _Progress:
    """Prints a line on stderr for every row."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._num_done = 0
        self._start_seconds = time.monotonic()

    def __call__(self, row: Row) -> None:
        self._num_done += row.kind != "try"
        seconds = time.monotonic() - self._start_seconds
        line = progress_line(row, done=self._num_done, total=self._total, elapsed_seconds=seconds)
        typer.echo(line, err=True)


def _report(file: ResultFile, folder: Path, *, picture: bool, as_json: bool) -> None:
    """Draw and print what the file holds, or print it as one JSON object."""
    rows = file.rows()
    drawn = draw(rows, folder) if picture else []
    found = profiles(rows, folder)
    if as_json:
        pictures = [str(path) for path in drawn]
        data = {"rows": [row.to_dict() for row in rows], "pictures": pictures, "profiles": found}
        common.echo_json(data)
        return
    out = common.console()
    if not out.is_terminal:
        out.width = max(out.width, _MIN_WIDTH)
    out.print(tables(rows))
    if found:
        out.print(profile_table(found))
    for path in (file.path, *drawn, *([folder / PROFILE_FILE] if found else ())):
        out.print(str(path), style="dim", highlight=False)


def _lora_rank(text: str) -> int | None:
    """The rank of adapters; None where all weights train."""
    if text == "full":
        return None
    if re.fullmatch(r"[0-9]{1,9}", text) and int(text) > 0:
        return LoraShape(rank=int(text)).rank
    raise ConfigError(
        f"--lora is {show(text)}. Allowed: a rank above zero, or full. Remedy: 16 is common."
    )


def _lora_dtype(name: str | None, weights: str) -> str:
    """Check --lora-dtype; return the dtype of adapters."""
    if name in (None, "float32", weights):
        return name or "float32"
    raise ConfigError(
        f"--lora-dtype is {name!r}. Allowed: float32, {weights}. Remedy: leave the option out."
    )


def _budget(option: str, text: str | None) -> int | float | str | None:
    """A budget as settings take it."""
    if text is None:
        return None
    value = read_budget(text)
    # Only checked here, with any total: the worker knows the device's.
    parse_bytes(value, field=option, total_bytes=1)
    return value


def _device_name(kind: str) -> str:
    if kind == "cpu":
        return processor_name()
    import torch

    return torch.cuda.get_device_name(0)  # the only one that workers see


def _check_device(name: str, attention: str) -> None:
    """Check the words of --device and --attention."""
    if name not in ("auto", "cuda", "cpu"):
        raise ConfigError(
            f"--device is {name!r}. Allowed: auto, cuda, cpu. Remedy: choose one of several GPUs "
            "with CUDA_VISIBLE_DEVICES."
        )
    if attention not in ATTENTION:
        raise ConfigError(
            f"--attention is {attention!r}. Allowed: {', '.join(ATTENTION)}. Remedy: leave it out."
        )


def _device_kind(name: str, attention: str) -> str:
    """Return "cuda" or "cpu", where both options suit this machine."""
    if name != "cpu":
        import torch

        found = torch.cuda.is_available()
        if name == "cuda" and not found:
            raise ConfigError(
                "--device is cuda and PyTorch finds no CUDA device. Allowed: auto, cpu. Remedy: "
                "check the driver, or PyTorch's build."
            )
        name = "cuda" if found else "cpu"
    if name == "cpu" and attention in _CUDA_ONLY:
        raise ConfigError(
            f"--attention is {attention!r}, a kernel for CUDA, and the device is the CPU. Allowed: "
            "auto, sdpa. Remedy: leave the option out."
        )
    return name
