"""HardwareProfile: how fast a machine computes and copies, and how much it holds.

Measured by `sppo calibrate` or shipped as data from public figures. Knows nothing of torch, models
or plans. Rates are per second of one device; curves give a rate by the number of tokens of a chunk,
because small chunks are slower.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Curve:
    """A rate by tokens, linear in the logarithm of tokens between points and flat outside."""

    points: tuple[tuple[int, float], ...]
    """(tokens, rate), tokens strictly increasing."""

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

    numa_node: int | None = None
    """NUMA node of the device; None where there is one node or it is not known."""

    versions: dict[str, str] = field(default_factory=dict[str, str])
    """Of torch, CUDA and the driver, for measured profiles; a profile of others is not reused."""
