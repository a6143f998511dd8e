"""HardwareProfile: how fast a machine computes and copies, and how much it holds.

Measured by `sppo calibrate` or shipped as data from public figures. Knows nothing of torch, models
or plans. Rates are per second of one device; curves give a rate by the number of tokens of a chunk,
because small chunks are slower.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from sppo_hf.errors import ConfigError
from sppo_hf.rules import show

UNKNOWN_LINK = 25 * 2.0**30
"""Bytes per second between devices where a profile has no rate: a 200 Gbit/s network card's."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A rate by tokens, linear in the logarithm of tokens between points and flat outside."""

    points: tuple[tuple[int, float], ...]
    """(tokens, rate), tokens strictly increasing."""

    def __post_init__(self) -> None:
        """Refuse a curve that has no rate to give.

        Raises:
            ConfigError: there is no point, tokens do not increase from 1 up, or a rate is not a
                number above zero.
        """
        tokens = [point[0] for point in self.points]
        rising = all(low < high for low, high in pairwise(tokens))
        if not tokens or tokens[0] < 1 or not rising:
            raise ConfigError(
                f"A curve has points at {show(tokens)} tokens. Allowed: at least one point, tokens "
                "strictly increasing, the first at least 1. Remedy: sort them, each one once."
            )
        for at, rate in self.points:
            if not (rate > 0 and math.isfinite(rate)):
                raise ConfigError(
                    f"A curve has the rate {rate} at {at} tokens. Allowed: numbers above zero. "
                    "Remedy: leave the point out, or measure it again."
                )

    def at(self, tokens: float) -> float:
        """Returns the rate for a chunk of `tokens` tokens."""
        index = bisect_right(self.points, (tokens, math.inf))
        if index == 0:
            return self.points[0][1]
        if index == len(self.points):
            return self.points[-1][1]
        (low, low_rate), (high, high_rate) = self.points[index - 1], self.points[index]
        share = math.log(tokens / low) / math.log(high / low)
        return low_rate + share * (high_rate - low_rate)

    def scaled(self, factor: float) -> Curve:
        """Returns the curve with every rate times `factor`."""
        return Curve(tuple((tokens, rate * factor) for tokens, rate in self.points))


# Which dtype's rate stands for one that a profile does not list, and its share of it: the 16-bit
# dtypes run on the same units; float64 has half of float32's rate on processors and on the
# accelerators this is meant for (on others much less, but nobody trains in it there).
_STANDS_FOR: dict[str, tuple[tuple[str, float], ...]] = {
    "bfloat16": (("float16", 1.0), ("float32", 1.0)),
    "float16": (("bfloat16", 1.0), ("float32", 1.0)),
    "float32": (("bfloat16", 0.1), ("float16", 0.1)),
    "float64": (("float32", 0.5), ("bfloat16", 0.05), ("float16", 0.05)),
}


def curve_for(curves: Mapping[str, Curve], dtype_name: str) -> Curve:
    """The curve of a dtype, or what its nearest relative lets expect.

    Args:
        curves: by dtype name, as in `HardwareProfile.matmul_flops`.
        dtype_name: such as "bfloat16".

    Returns:
        `curves[dtype_name]` where it is listed. Else the other 16-bit dtype's curve for a 16-bit
        one, half of float32's for float64, a tenth of a 16-bit one's for float32 (tensor cores
        are that much faster), and the slowest one listed for a dtype that is not known here.
    """
    if dtype_name in curves:
        return curves[dtype_name]
    for other, factor in _STANDS_FOR.get(dtype_name, ()):
        if other in curves:
            return curves[other].scaled(factor)
    return min(curves.values(), key=lambda curve: curve.points[-1][1])


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """Speeds and sizes of one machine, as seen by one device of it."""

    name: str
    """As the driver names the device, or the processor's name."""

    kind: str
    """"cpu" or "cuda"."""

    estimated: bool
    """True where figures are public ones or guesses, False where they were measured here."""

    source: str
    """Where the figures come from, in words."""

    matmul_flops: dict[str, Curve]
    """FLOP/s of the linear layers by dtype name ("bfloat16") and tokens."""

    attention_forward_flops: dict[str, Curve]
    """FLOP/s of attention forward (visible pairs only counted) by dtype name and chunk tokens."""

    attention_backward_flops: dict[str, Curve]
    """The same of its backward, which is counted as 2.5 times the forward's FLOPs."""

    memory_bytes_per_second: float
    """Reads and writes of the device's own memory; bounds elementwise work."""

    launch_seconds: float
    """Time one layer's forward takes at least, however few tokens: launches and Python."""

    d2h_bytes_per_second: float
    """Pinned copy to the host while nothing else is copied."""

    h2d_bytes_per_second: float
    """Pinned copy to the device while nothing else is copied."""

    both_d2h_bytes_per_second: float
    """Copy to the host while another runs the other way."""

    both_h2d_bytes_per_second: float
    """Copy to the device while another runs the other way."""

    node_bytes_per_second: float | None = None
    """From one device to another of the same node, each way; None where not known."""

    network_bytes_per_second: float | None = None
    """From one device to one of another node, each way, while all others do the same; None where
    not known."""

    host_update_bytes_per_second: float | None = None
    """Bytes that an optimizer's update in host memory reads and writes: AdamW's fused kernel, with
    all threads; None where not measured."""

    disk_write_bytes_per_second: float | None = None
    """Writing to the disk that offload_dir is on; None where not measured."""

    disk_read_bytes_per_second: float | None = None
    """Reading from it."""

    device_bytes: int | None = None
    """Memory of the device; of the machine for a CPU."""

    host_bytes: int | None = None
    """Host memory this process may use, control group limits included."""

    pinned_bytes: int | None = None
    """Host memory it may lock (RLIMIT_MEMLOCK); None where there is no limit."""

    disk_bytes: int | None = None
    """Free bytes on the disk."""

    offload_dir: str | None = None
    """Folder whose disk was measured; None where none was."""

    numa_node: int | None = None
    """NUMA node of the device; None where there is one node or it is not known."""

    versions: dict[str, str] = field(default_factory=dict[str, str])
    """Of torch, CUDA and the driver, for measured profiles; a profile of others is not reused."""
