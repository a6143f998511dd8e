"""What a race of attention backends found, and keeping it across processes.

A result lies as JSON under the Hugging Face home, one file per device, versions and requirement, so
that a machine races once. The first result published for a key stays: all processes of a job read
the same.
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
"""Rates that differ by less are equal: noise should not decide, nor change from run to run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """One backend's time."""

    name: str

    seconds: float
    """Of one forward and one backward."""

    flops_per_second: float
    """Of both together; visible pairs only, the backward as 2.5 forwards."""


@dataclasses.dataclass(frozen=True, slots=True)
class AutotuneResult:
    """What a race found."""

    load: str
    """What was timed: "4K x 32K" for a chunk of 4K queries behind a prefix of 32K."""

    laps: tuple[Timing, ...]
    """In the order in which they were listed."""

    left_out: dict[str, str]
    """Why others have no lap, by name, in words that follow the name."""

    lasting: bool = True
    """Whether it would be the same another time: False where memory ran out."""

    def ranking(self) -> list[Timing]:
        """Laps, the one to take first.

        The earliest listed of those that are within 3% of the fastest, then likewise among the
        rest.
        """
        rest, ranked = list(self.laps), list[Timing]()
        while rest:
            least = min(lap.seconds for lap in rest)
            best = next(lap for lap in rest if lap.seconds <= least * (1 + _CLOSE))
            rest.remove(best)
            ranked.append(best)
        return ranked

    def text(self, name: str) -> str:
        """The race as the plan's table tells it, when the backend `name` is taken.

        "cudnn: 612 TFLOPS at 4K x 32K, aten_flash 431, efficient 98.1".
        """
        speeds = {lap.name: format_tflops(lap.flops_per_second) for lap in self.ranking()}
        own = f"{name}: {speeds.pop(name)} TFLOPS at {self.load}"
        return ", ".join([own, *(f"{other} {speed}" for other, speed in speeds.items())])


def format_tflops(flops_per_second: float) -> str:
    """Writes a rate in TFLOPS with three digits: "612", "98.1", "0.0325"."""
    tflops = flops_per_second / 1e12
    return f"{tflops:.0f}" if tflops >= 99.95 else f"{tflops:.3g}"


def autotune_path(device_name: str, key: Mapping[str, object]) -> Path:
    """Where the result of a race lies, whether or not it exists.

    Args:
        device_name: as the driver gives it.
        key: all that the result hangs on, in values that JSON knows.
    """
    return cache_path("attention", device_name, [_FORMAT, device_name, sorted(key.items())])


def read_autotune(path: Path) -> AutotuneResult | None:
    """The result that was published there; None where there is none or its file is damaged."""
    try:
        return _from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        logger.warning("The attention race in %s cannot be read and is run anew: %r", path, error)
        return None


def publish_autotune(path: Path, result: AutotuneResult) -> AutotuneResult:
    """Keep a lasting result, unless another process was first.

    Returns:
        What is published: by this process or by the one before it. `result` itself where nothing
        can be kept, which is logged and no error.
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
        logger.info("The attention race cannot be kept in %s: %s", path, error)
        return result
    return read_autotune(path) or result


def _put(written: Path, path: Path) -> None:
    """Give a written file its name, but only if no sound one has it."""
    try:
        # A link, unlike a rename, fails where the name is taken: the first stays.
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
        raise ValueError("no laps of this format")
    left_out = {str(name): str(reason) for name, reason in dict(read["left_out"]).items()}
    return AutotuneResult(str(read["load"]), laps, left_out)
