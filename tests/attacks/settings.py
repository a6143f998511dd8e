"""Settings as files, as options, from the environment and from Python, each with something odd.

An accepted setting is right if it survives a round trip through a file and through Accelerate's
plugin, and if no number of it is one that nobody wrote.
"""

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import ConfigError
from sppo_hf.integrations.arguments import SPPOArguments
from sppo_hf.integrations.plugin import CONFIG_VARIABLE, SPPOPlugin
from tests.attacks.outcomes import Case, Outcome, answered_in_process

_NAMES = tuple(field.name for field in fields(SPPOConfig))
_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")

# What one value may be in YAML; BOMB stands for a value that refers to itself many times over.
_VALUES = (
    *("8", "1", "0", "-1", "auto", "none", "full", "true", "no", "null", "~", "", "80GiB", "0.5"),
    *("1:30", "010", "0o17", "0x10", "1_000", "1__0", "1e3", "1e400", ".inf", "-.inf", ".nan"),
    *("2020-13-45", "2020-01-01", "2020-01-01 10:00:00", "9" * 20, "9" * 5000, "9" * 100_000),
    *("!!int foo", "!!int ''", "!!float foo", "!!bool foo", "!!timestamp foo", "!!null foo"),
    *("!!binary '***'", "!!set {a}", "!!omap [a: 1]", "!!pairs [a: 1]", "!!str [a]", "!foo bar"),
    *("!!python/object/apply:os.system [true]", "!!python/name:os.system", "!!merge x"),
    *("[512, 512]", "[]", "[1, a]", "[[1]]", "{a: 1}", "{<<: {a: 1}}", "{? [a]: 1}", "[1, [2"),
    *("[" * 50, "[" * 5000, "{a: " * 5000, "- " * 5000, "? " * 5000, "!!int " * 500),
    *(
        "'x'",
        '"\\0"',
        '"\\ud800"',
        "' '",
        "'\\t'",
        "|\n  a\n",
        ">\n  a\n",
        "\t",
        "@",
        "`",
        "%",
        "*a",
    ),
    *("&a [*a]", "&a 8", "x" * 5000, "x" * 200_000, "'" + "x" * 100_000 + "'", "\x01", "é" * 3000),
    "[&a0 x" + "".join(f", &a{i} [{f'*a{i - 1}, ' * 9}]" for i in range(1, 30)) + "]",
    "[" + "1, " * 40_000 + "1]",
)
_TEXTS = (
    *(
        "",
        "#",
        "null",
        "8",
        "[]",
        "{}",
        "---",
        "--- 1\n--- 2",
        "%YAML 3.0\n---",
        "\ufeffoffload: none",
    ),
    *(
        "a: 1\na: 2",
        "<<: {a: 1}",
        "? [a]\n: b",
        "yes: 1",
        "1: 2",
        "null: 1",
        "'': 1",
        "a" * 100_000,
    ),
    *(
        "x: &x {num_chunks: 2}\n<<: *x",
        "- " * 60_000,
        "a:\n" * 40_000,
        "? " * 60_000,
        "[" * 130_000,
    ),
    "".join(f"k{i}: v\n" for i in range(9000)),
    "a: &a {}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 200)),
    "#" * (2 * 10**6),
    "\x00",
)
_OBJECTS = (
    *(8, 0, -1, 2**31, 10**5000, True, None, 1.5, float("nan"), float("inf"), 1e308, -0.0),
    *(
        "8",
        "",
        " ",
        "\0",
        "\ud800",
        "x" * 10**6,
        b"x",
        b"",
        [],
        [8],
        [8, "8"],
        [[8]],
        (8,),
        {},
        {8},
    ),
    *(
        object(),
        int,
        Path("x"),
        Path("x" * 5000),
        range(3),
        1j,
        Ellipsis,
        {"a": {"b": ["c"] * 10**6}},
    ),
)


def cases(count: int, seed: int) -> Iterator[Case]:
    """Yield `count` settings by all the ways in which they come."""
    chosen = random.Random(seed)
    ways = (_file, _file, _file, _option, _object, _object, _size, _whole_file, _path)
    for number in range(count):
        yield ways[number % len(ways)](chosen)


def _file(chosen: random.Random) -> Case:
    lines = [
        f"{chosen.choice(_NAMES)}: {chosen.choice(_VALUES)}"
        for _ in range(chosen.choice((1, 1, 2)))
    ]
    return _yaml("\n".join(lines))


def _whole_file(chosen: random.Random) -> Case:
    return _yaml(chosen.choice(_TEXTS))


def _yaml(text: str) -> Case:
    def load():
        with TemporaryDirectory() as folder:
            path = Path(folder) / "sppo.yaml"
            path.write_text(text, encoding="utf-8", errors="surrogatepass")
            return SPPOConfig.from_yaml(path)

    return _case(f"settings: {text!r:.90}", load)


def _option(chosen: random.Random) -> Case:
    name, text = chosen.choice(_NAMES), chosen.choice(_VALUES)
    option = {f"sppo_{name}": text}
    return _case(
        f"settings: --sppo_{name} {text!r:.70}", lambda: SPPOArguments(**option).to_config()
    )


def _object(chosen: random.Random) -> Case:
    name, value = chosen.choice(_NAMES), chosen.choice(_OBJECTS)
    said = type(value).__name__ if isinstance(value, int | dict) else f"{value!r:.60}"
    return _case(f"settings: SPPOPlugin({name}={said})", lambda: SPPOPlugin(**{name: value}).config)


def _size(chosen: random.Random) -> Case:
    name, value = chosen.choice(_SIZES), chosen.choice(_OBJECTS)
    if isinstance(value, str) and value.isprintable() and chosen.random() < 0.7:
        variable = {f"PARALLELISM_CONFIG_{name.upper()}": value}
        return _case(
            f"settings: {name} of the environment {value!r:.60}", _with(variable, SPPOPlugin)
        )
    said = type(value).__name__ if isinstance(value, int | dict) else f"{value!r:.60}"
    return _case(f"settings: SPPOPlugin({name}={said})", lambda: SPPOPlugin(**{name: value}).config)


def _path(chosen: random.Random) -> Case:
    """A settings file that is none, named by Python or by the environment."""
    kind = chosen.choice(
        ("pipe", "folder", "/dev/zero", "/dev/full", "x" * 5000, "a/" * 3000, "é", "", "~x")
    )

    def load():
        with TemporaryDirectory() as folder:
            path = kind
            if kind in ("pipe", "folder"):
                path = str(Path(folder) / kind)
                os.mkfifo(path) if kind == "pipe" else os.mkdir(path)
            with patch.dict(os.environ, {CONFIG_VARIABLE: path}):
                return SPPOPlugin.from_env().config

    return _case(f"settings: {CONFIG_VARIABLE}={kind:.60}", load)


def _with(variables: dict[str, str], make: Callable[[], SPPOPlugin]) -> Callable[[], SPPOConfig]:
    def load():
        with patch.dict(os.environ, variables):
            return make().config

    return load


def _case(name: str, load: Callable[[], SPPOConfig]) -> Case:
    def attempt() -> tuple[Outcome, str]:
        outcome, seen = answered_in_process(load, refusals=(ConfigError,), right=_survives)
        if outcome is Outcome.REFUSED and len(seen) > 5000:
            return Outcome.RAW, f"a message of {len(seen):,} characters"
        return outcome, seen

    return Case(name, attempt)


def _survives(config: object) -> bool:
    """Whether accepted settings come back from a file and can name a folder."""
    assert isinstance(config, SPPOConfig)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "sppo.yaml"
        config.to_yaml(path)
        if path.stat().st_size < 10**5 and SPPOConfig.from_yaml(path) != config:
            return False
    if config.offload_dir is not None:
        os.path.lexists(config.offload_dir.encode())
    # Nobody wrote 90: it is what YAML 1.1 makes of 1:30.
    return 90 not in (config.num_chunks, config.chunk_tokens, config.pp_size)
