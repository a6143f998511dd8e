"""Results of timing attention backends against each other, and their storage across processes.

Results are JSON files under the Hugging Face home, one per device, versions and requirement, so a
machine times each case once. The first result published for a key is never replaced: all processes
of a job read the same one.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sppo_hf.planning.json_store import cache_path, write_temporary

logger = logging.getLogger(__name__)

_FORMAT = 1
_CLOSE = 0.03
"""Relative difference below which rates are equal, so that noise does not decide."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Measured time of one backend."""

    name: str

    seconds: float
    """Seconds of one forward and one backward together."""

    flops_per_second: float
    """FLOP/s of both together: only visible (query, key) pairs count, and the backward counts as
    2.5 forwards."""


@dataclasses.dataclass(frozen=True, slots=True)
class AutotuneResult:
    """Measured times of all backends that could run a case."""

    load: str
    """Size of the timed call: "4K x 32K" is a chunk of 4K queries behind a prefix of 32K tokens."""

    laps: tuple[Timing, ...]
    """Measured backends, in their order of preference."""

    left_out: dict[str, str]
    """Reasons why backends were not timed, by name; each is text that follows the name."""

    lasting: bool = True
    """Whether the result is reproducible and may be stored; False if memory ran out."""

    def ranking(self) -> list[Timing]:
        """Returns the timings, best first.

        The first is the most preferred backend among those within 3% of the fastest; the same rule
        orders the rest.
        """
        rest, ranked = list(self.laps), list[Timing]()
        while rest:
            least = min(lap.seconds for lap in rest)
            best = next(lap for lap in rest if lap.seconds <= least * (1 + _CLOSE))
            rest.remove(best)
            ranked.append(best)
        return ranked

    def text(self, name: str) -> str:
        """Returns the result as text for the plan's table, where `name` is the chosen backend.

        Example: "cudnn: 612 TFLOPS at 4K x 32K, aten_flash 431, efficient 98.1".
        """
        speeds = {lap.name: format_tflops(lap.flops_per_second) for lap in self.ranking()}
        own = f"{name}: {speeds.pop(name)} TFLOPS at {self.load}"
        return ", ".join([own, *(f"{other} {speed}" for other, speed in speeds.items())])


def format_tflops(flops_per_second: float) -> str:
    """Writes a rate in TFLOPS with three digits: "612", "98.1", "0.0325"."""
    tflops = flops_per_second / 1e12
    return f"{tflops:.0f}" if tflops >= 99.95 else f"{tflops:.3g}"


def autotune_path(device_name: str, key: Mapping[str, object]) -> Path:
    """Returns the path of a result's file, whether or not it exists.

    `key` is everything that the result depends on beside the device, as JSON values.
    """
    return cache_path("attention", device_name, [_FORMAT, device_name, sorted(key.items())])


def read_autotune(path: Path) -> AutotuneResult | None:
    """Returns the result published at `path`; None if there is none or its file is damaged."""
    try:
        return _from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        logger.warning(
            "Timings of attention backends in %s cannot be read and are measured again: %r",
            path,
            error,
        )
        return None


def publish_autotune(path: Path, result: AutotuneResult) -> AutotuneResult:
    """Store a lasting result, unless another process has stored one.

    Returns:
        The stored result, which may be another process's; `result` if it cannot be stored, which is
        logged and is no error.
    """
    if not (result.lasting and result.laps):
        return result
    try:
        text = json.dumps({"format": _FORMAT, **dataclasses.asdict(result)}, indent=1)
        written = write_temporary(path, text)
        try:
            _put(written, path)
        finally:
            written.unlink(missing_ok=True)
    except OSError as error:
        logger.info("Timings of attention backends cannot be stored in %s: %s", path, error)
        return result
    return read_autotune(path) or result


def _put(written: Path, path: Path) -> None:
    """Move a written file to `path`, unless an undamaged file is there."""
    try:
        # Unlike a rename, a link fails if the name is taken, so the first file is kept.
        os.link(written, path)
    except FileExistsError:
        if read_autotune(path) is None:
            os.replace(written, path)
    except OSError:  # a file system without links
        os.replace(written, path)


def _from_json(text: str) -> AutotuneResult:
    """Read what `publish_autotune` wrote."""
    read: dict[str, Any] = json.loads(text)
    laps = tuple(
        Timing(str(lap["name"]), float(lap["seconds"]), float(lap["flops_per_second"]))
        for lap in read["laps"]
    )
    sound = all(lap.seconds > 0 and math.isfinite(lap.flops_per_second) for lap in laps)
    if read["format"] != _FORMAT or not laps or not sound:
        raise ValueError("no timings of this format")
    left_out = {str(name): str(reason) for name, reason in dict(read["left_out"]).items()}
    return AutotuneResult(str(read["load"]), laps, left_out)
