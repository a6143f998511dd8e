"""Command lines with something odd in them, run in this process.

Right is: exit code 0 or 1 with an answer, 2 with a message; no traceback; with `--json`, one object
that a strict reader takes. What trains or measures (`bench` and `calibrate`) is only given words
that it must refuse.
"""

import contextlib
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn
from unittest.mock import patch

from typer.testing import CliRunner

import sppo_hf.profiling.calibrate  # noqa: F401 - what it imports is part of starting Python
from sppo_hf.cli import app
from sppo_hf.planning.hardware import profile_to_dict, shipped_profiles
from sppo_hf.schedule.generate import GENERATORS
from tests.attacks.outcomes import SECONDS, Case, Outcome, answered_in_process
from tests.cli.configs import LLAMA_8B, LLAMA_70B, TINY

SEARCH_SECONDS = 3 * SECONDS
"""For an answer that simulates layouts of many devices: 64 rows of a 70B model on 32 GPUs take 7 to
9 seconds of one slow core."""

_NUMBERS = (
    *("0", "1", "2", "3", "-1", "-0", "7", "64", "1000", "65536", "1000000000", "1" + "0" * 30),
    *(
        "9" * 5000,
        "1.5",
        "1e3",
        "1e308",
        "1e400",
        "nan",
        "inf",
        "-inf",
        "",
        " ",
        "x",
        "auto",
        "0x10",
    ),
    *(
        "1_000",
        "1,000",
        "²",
        "٣",
        "0" * 5000 + "1",
        "5e-324",
        "1e-12",
        "128K",
        "1M",
        "16M",
        "1000M",
    ),
)
_SIZES = (
    *("80GiB", "0.9", "1.0", "0", "-1GiB", "1KB", "1", "999999999999999999TiB", "9" * 400, "nan"),
    *("inf", "", "x", "1e3GiB", "80", "1" + "0" * 30, "0.0000001", "8EiB", "1 B"),
)
_PATHS = (
    *(
        "config",
        "pipe",
        "folder",
        "/dev/zero",
        "/dev/null",
        "/proc/self/mem",
        "x" * 5000,
        "a/" * 3000,
    ),
    *("~nobody/x", "", " ", "é", "llama-3.1-8b", "LLAMA-3.1-8B", "no/such", "a b", "..", "x.json"),
)
_HARDWARE = (*_PATHS, "h100", "cpu", "H200", "damaged", "slow", "fast", "profile")
_OPTIONS: dict[str, tuple[str, ...]] = {
    "--seq-len": _NUMBERS,
    "--device-memory": _SIZES,
    "--host-memory": _SIZES,
    "--disk": _SIZES,
    "--hardware": _HARDWARE,
    "--lora": _NUMBERS,
    "--rows": _NUMBERS,
    "--num-chunks": _NUMBERS,
    "--recompute": ("auto", "none", "selective", "full", "x", ""),
    "--offload-kv": ("auto", "none", "full", "x"),
    "--partition": ("flops", "even", "ramp", "x"),
    "--dtype": ("bfloat16", "float32", "float8", ""),
}
_CLUSTER: dict[str, tuple[str, ...]] = {
    "--gpus": ("2", "8", "24", "32", "64", "80", "128", "512", "65536"),
    "--rows": ("1", "2", "7", "16", "64", "96", "256", "1048576"),
    "--seq-len": ("8K", "100000", "128K", "512K", "1M", "4M", "16M"),
}
_SIMULATE: dict[str, tuple[str, ...]] = {
    "--schedule": (*GENERATORS, "x", ""),
    "--stages": _NUMBERS,
    "--micro-batches": _NUMBERS,
    "--chunks": _NUMBERS,
    "--virtual": _NUMBERS,
    "--forward": _NUMBERS,
    "--backward": _NUMBERS,
    "--weight": _NUMBERS,
    "--send": _NUMBERS,
    "--figure": ("a.xyz", "x" * 5000 + ".png", "no/such/a.png"),
    "--trace": ("x" * 5000, "no/such/a.json", "folder", "/dev/full"),
}
_OF_MODEL: dict[str, tuple[str, ...]] = {
    "--seq-len": _NUMBERS,
    "--hardware": _HARDWARE,
    "--link": _SIZES,
    "--rows": _NUMBERS,
    "--lora": _NUMBERS,
    "--offload": ("none", "full", "sppo", "x"),
}


def cases(count: int, seed: int) -> Iterator[Case]:
    """Yield `count` command lines."""
    chosen = random.Random(seed)
    makers = (
        _estimate,
        _estimate,
        _plan,
        _plan_cluster,
        _simulate,
        _simulate,
        _simulate_model,
        _model,
        _measuring,
    )
    for number in range(count):
        yield _case(makers[number % len(makers)](chosen))


def _estimate(chosen: random.Random) -> list[str]:
    return ["estimate", "config", "--seq-len", "4096", *_some(chosen, _OPTIONS), "--json"]


def _plan(chosen: random.Random) -> list[str]:
    words = ["plan", "config", "--seq-len", "4096", *_some(chosen, _OPTIONS)]
    policy = ("--policy", chosen.choice(("auto", "none", "full", "sppo", "x")))
    return [*words, *(policy if chosen.random() < 0.3 else ()), "--json"]


def _plan_cluster(chosen: random.Random) -> list[str]:
    """Layouts over many devices: sizes that are large but make sense, and now and then nonsense."""
    words = ["plan", chosen.choice(("config", "llama-3.1-8b", "llama-70b", "qwen3-4b"))]
    for name, numbers in _CLUSTER.items():
        words += [name, chosen.choice(numbers if chosen.random() < 0.9 else _NUMBERS)]
    odd = {"--gpus-per-node": _NUMBERS, "--link": _SIZES, **_OPTIONS}
    return [*words, *(_some(chosen, odd) if chosen.random() < 0.3 else ()), "--json"]


def _simulate(chosen: random.Random) -> list[str]:
    words = ["simulate", "--schedule", chosen.choice(list(GENERATORS)), "--stages", "4"]
    return [*words, *_some(chosen, _SIMULATE), *chosen.choice(([], ["--json"]))]


def _simulate_model(chosen: random.Random) -> list[str]:
    words = ["simulate", "--schedule", "seq1f1b", "--stages", "2", "--model", "config"]
    sizes = {name: _NUMBERS for name in ("--micro-batches", "--chunks")}
    return [*words, "--seq-len", "8K", *_some(chosen, {**_OF_MODEL, **sizes}), "--json"]


def _model(chosen: random.Random) -> list[str]:
    return [chosen.choice(("estimate", "plan")), chosen.choice(_PATHS), "--seq-len", "8K", "--json"]


def _measuring(chosen: random.Random) -> list[str]:
    """Commands that measure, each with one word that must be refused."""
    refused = {
        "--seq-lens": ("0", "x", "-1", "1000000M", "1,,x", "nan"),
        "--contenders": ("x", "", ",", "plain+x", "x" * 5000),
        "--lora": ("0", "-1", "x", "9" * 5000, "²"),
        "--steps": ("0", "-1", "x", "1" + "0" * 12, "nan"),
        "--warm-up": ("-1", "x", "1" + "0" * 12),
        "--timeout": ("0", "-1", "nan", "inf", "1e308", "x"),
        "--attention": ("x", "", "cudnn"),
        "--device": ("x", "", "cuda:99999999999"),
        "--device-memory": ("x", "-1", "nan", "0"),
        "--hardware": ("x", "pipe", "/dev/zero", "damaged", "x" * 5000),
        "--longest-limit": ("x", "0", "1000000M"),
        "--show": ("folder", "pipe", "/dev/zero", "x" * 5000, "no/such"),
    }
    name = chosen.choice(list(refused))
    model = ["--longest"] if name == "--longest-limit" else []
    bench = ["bench", "config", "--device", "cpu", "--output", "out", *model]
    if chosen.random() < 0.7:
        return [*bench, name, chosen.choice(refused[name]), "--json"]
    options = {
        "--device": ("x", "", "meta", "cuda:99999999999", "cpu:x", "mps", "x" * 5000),
        "--dtype": ("x", "", "int8", "x" * 5000),
        "--offload-dir": ("/dev/null", "x" * 5000, "pipe", "config"),
    }
    name = chosen.choice(list(options))
    return ["calibrate", "--quick", name, chosen.choice(options[name]), "--json"]


def _some(chosen: random.Random, options: dict[str, tuple[str, ...]]) -> list[str]:
    names = chosen.sample(list(options), chosen.choice((1, 1, 2, 3)))
    return [word for name in names for word in (name, chosen.choice(options[name]))]


def _case(words: list[str]) -> Case:
    name = " ".join(word if len(word) <= 40 else f"{word[:20]}…({len(word)})" for word in words)

    def attempt() -> tuple[Outcome, str]:
        with TemporaryDirectory() as folder, contextlib.chdir(folder):
            _fill(Path())
            with patch.dict(os.environ, {"HF_HUB_OFFLINE": "1", "HF_HOME": f"{folder}/home"}):
                return answered_in_process(
                    lambda: _run(words),
                    refusals=(_Refused,),
                    right=_reads_well,
                    seconds=SEARCH_SECONDS if "--gpus" in words else SECONDS,
                )

    return Case(f"commands: {name}", attempt)


class _Refused(Exception):
    """Exit code 2, with a message."""


def _run(words: list[str]) -> tuple[list[str], int, str]:
    result = CliRunner().invoke(app, words, terminal_width=120)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    said = result.stdout + result.stderr
    if result.exit_code == 2:
        if not said.strip() or "Traceback" in said or len(said) > 20_000:
            raise RuntimeError(f"no message: {said[:200]}")
        if "--json" in words and result.stdout.strip():
            _strict(result.stdout)
        raise _Refused(" ".join(said.split())[:300])
    return words, result.exit_code, result.stdout


def _reads_well(answer: object) -> bool:
    words, code, said = _answered(answer)
    if words[0] in ("bench", "calibrate"):
        return words[1:2] == ["--quick"] or "--show" in words
    if code not in (0, 1) or "nan" in said.lower().split() or "inf" in said.lower().split():
        return False
    return "--json" not in words or bool(_strict(said))


def _answered(answer: object) -> tuple[list[str], int, str]:
    words, code, said = answer  # pyright: ignore[reportGeneralTypeIssues]
    return words, code, said


def _strict(text: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def _fill(folder: Path) -> None:
    """Create the files and folders that this module's paths name."""
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_text(json.dumps(TINY))
    (folder / "llama-70b").mkdir()
    (folder / "llama-70b" / "config.json").write_text(json.dumps(LLAMA_70B))
    (folder / "x.json").write_text(json.dumps({**LLAMA_8B, "num_hidden_layers": 10**12}))
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    profile = profile_to_dict(shipped_profiles()["h100-80gb"])
    changes: dict[str, Callable[[float], object]] = {
        "profile": lambda rate: rate,
        "damaged": lambda rate: "x",
        "slow": lambda rate: 1e-12,
        "fast": lambda rate: 1e24,
    }
    for name, change in changes.items():
        changed = {k: change(v) if isinstance(v, float) else v for k, v in profile.items()}
        (folder / name).write_text(json.dumps(changed))
