"""MemoryEstimate: the bytes of all tiers at every point of a step, by cause, and their peaks.

A step is a sequence of points, the computations of a device in order. A `Level` is one cause's
bytes on one tier at each point. An estimate is a set of levels, and so are the changes that the
simulator sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sppo_hf.planning.causes import Cause, MemoryBreakdown
from sppo_hf.planning.tiers import TIERS, Tier

Bytes = NDArray[np.int64]


class Budgets:
    """Bytes that each tier may hold; None for no limit, 0 for no such tier.

    Args:
        by_tier: bytes by the tier's name; tiers left out hold nothing.
    """

    def __init__(self, **by_tier: int | None) -> None:
        self.by_tier = by_tier

    def of(self, tier: Tier) -> int | None:
        """Returns a tier's budget."""
        return self.by_tier.get(tier, 0)

    def replace(self, **by_tier: int | None) -> Budgets:
        """Returns a copy with other budgets of some tiers."""
        return Budgets(**{**self.by_tier, **by_tier})

    @property
    def device(self) -> int | None:
        """Bytes that the device may hold; None for no limit."""
        return self.of("device")

    @property
    def host(self) -> int | None:
        """Bytes that host memory may hold; None for no limit."""
        return self.of("host")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Budgets) and all(self.of(t) == other.of(t) for t in TIERS)

    def __hash__(self) -> int:
        return hash(tuple(map(self.of, TIERS)))

    def __repr__(self) -> str:
        return f"Budgets({', '.join(f'{tier}={size}' for tier, size in self.by_tier.items())})"


class Level(NamedTuple):
    """Bytes of one cause on one tier at the points of a step."""

    before: int
    """Bytes before the first point."""

    during: Bytes
    """Bytes while each point runs, [points]."""

    after: Bytes
    """Bytes between each point and the next, [points]."""


Levels = Mapping[Tier, Mapping[Cause, Level]]


@dataclass(frozen=True, slots=True)
class Points:
    """The computations of a step in order: forward over chunks and layers, then backward.

    By chunk, all layers of a chunk come before the next chunk; by layer, all chunks of a layer
    before the next layer. Head and loss of a chunk follow its layers, as layer `num_layers`.
    Backward is the reverse, without heads.
    """

    num_chunks: int
    """Number of chunks."""

    num_layers: int
    """Number of decoder layers."""

    training: bool
    """Whether a backward follows."""

    by_layer: bool = False
    """Whether all chunks of a layer run before the next layer."""

    @property
    def num_forward(self) -> int:
        """Number of points of forward."""
        return self.num_chunks * (self.num_layers + 1)

    @property
    def count(self) -> int:
        """Number of points."""
        return self.num_forward + self.training * self.num_chunks * self.num_layers

    def forward(self, chunk: int, layer: int) -> int:
        """Returns the point of a forward, or of a chunk's head."""
        if self.by_layer:
            return layer * self.num_chunks + chunk
        return chunk * (self.num_layers + 1) + layer

    def backward(self, chunk: int, layer: int) -> int:
        """Returns the point of a backward."""
        chunks_after, layers_after = self.num_chunks - 1 - chunk, self.num_layers - 1 - layer
        if self.by_layer:
            return self.num_forward + layers_after * self.num_chunks + chunks_after
        return self.num_forward + chunks_after * self.num_layers + layers_after

    def unit(self, at: int) -> tuple[int, int]:
        """Returns the chunk and the layer of a point; `num_layers` for a head."""
        backward = at >= self.num_forward
        place = at - self.num_forward * backward
        if self.by_layer:
            layer, chunk = divmod(place, self.num_chunks)
        else:
            chunk, layer = divmod(place, self.num_layers + (not backward))
        if backward:
            return self.num_chunks - 1 - chunk, self.num_layers - 1 - layer
        return chunk, layer

    def lay(self, forward: Any, head: Any, backward: Any) -> NDArray[Any]:
        """Arranges quantities of units in the order of points.

        Args:
            forward: [chunks, layers] or a number, for forwards.
            head: [chunks] or a number, for heads.
            backward: [chunks, layers] or a number, for backwards.
        """
        layers = self.num_layers
        kind = np.result_type(forward, head, backward)
        laid = np.empty(self.count, dtype=np.float64 if kind.kind == "f" else np.int64)
        ahead = self._grid(laid[: self.num_forward], layers + 1)
        ahead[:, :layers] = forward
        ahead[:, layers] = head
        if self.training:
            self._grid(laid[self.num_forward :], layers)[::-1, ::-1] = backward
        return laid

    def in_backward(self, quantity: NDArray[Any]) -> NDArray[Any]:
        """Arranges [chunks, layers] in the order of backward."""
        walked = quantity.T if self.by_layer else quantity
        return walked[::-1, ::-1].ravel()

    def _grid(self, laid: NDArray[Any], layers: int) -> NDArray[Any]:
        """Returns a view of [points] as [chunks, layers]."""
        if self.by_layer:
            return laid.reshape(layers, self.num_chunks).T
        return laid.reshape(self.num_chunks, layers)

    def shown(self) -> list[int]:
        """Returns the end of each chunk's (or layer's) forward, and both ends of its backward."""
        chunks, layers = range(self.num_chunks), range(self.num_layers)
        last_chunk, last_layer = self.num_chunks - 1, self.num_layers - 1
        if self.by_layer:
            shown = [self.forward(last_chunk, layer) for layer in (*layers, self.num_layers)]
            ends = [(chunk, layer) for layer in layers[::-1] for chunk in (last_chunk, 0)]
        else:
            shown = [self.forward(chunk, self.num_layers) for chunk in chunks]
            ends = [(chunk, layer) for chunk in chunks[::-1] for layer in (last_layer, 0)]
        if self.training:
            shown += dict.fromkeys(self.backward(*unit) for unit in ends)
        return shown

    def name(self, at: int) -> tuple[str, int]:
        """Returns a point's name in words, and its chunk."""
        chunk, layer = self.unit(at)
        of_chunk = f"chunk {chunk + 1} of {self.num_chunks}"
        if layer == self.num_layers:
            return f"loss of {of_chunk}", chunk
        # Position among the points of the chunk's (or layer's) backward.
        place, most = self.num_layers - 1 - layer, self.num_layers
        if self.by_layer:
            place, most = self.num_chunks - 1 - chunk, self.num_chunks
        what, between = "forward", self.by_layer
        if at >= self.num_forward:
            between = 0 < place < most - 1
            what = (
                "backward" if between else "start of backward" if place == 0 else "end of backward"
            )
        if self.by_layer:
            within = f", {of_chunk}" if between else ""
            return f"{what} of layer {layer + 1} of {self.num_layers}{within}", chunk
        within = f" of layer {layer}" if between else ""
        return f"{what}{within} of {of_chunk}", chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot:
    """The bytes of all tiers at one point of a step."""

    name: str
    """Name of the point: "start of backward of chunk 8 of 8"."""

    chunk: int
    """Index of the running chunk."""

    held: Mapping[Tier, MemoryBreakdown]
    """Bytes by tier and cause; causes without bytes are left out."""

    def tier(self, tier: Tier) -> MemoryBreakdown:
        """Returns the bytes of one tier."""
        return self.held[tier]

    @property
    def device(self) -> MemoryBreakdown:
        """Bytes on the device; in ordinary memory if the CPU computes."""
        return self.held["device"]

    @property
    def host(self) -> MemoryBreakdown:
        """Offloaded bytes in host memory."""
        return self.held["host"]


class MemoryEstimate:
    """Predicted bytes per tier over a step: constant ones and levels."""

    def __init__(
        self, points: Points, standing: Mapping[Tier, Mapping[Cause, int]], levels: Levels
    ) -> None:
        self._points = points
        self._standing = standing
        self._levels = levels
        self._peaks: dict[Tier, MemorySnapshot] = {}

    def total(self, tier: Tier) -> Bytes:
        """Returns a tier's bytes at every point: [points]."""
        total = np.full(self._points.count, sum(self._standing[tier].values()), dtype=np.int64)
        for level in self._levels[tier].values():
            total += level.during
        return total

    def peak_bytes(self, *tiers: Tier) -> int:
        """Returns the peak of the sum of some tiers' bytes."""
        return int(np.sum([self.total(tier) for tier in tiers], axis=0).max())

    def most_bytes(self, cause: Cause) -> int:
        """Returns the peak of a cause's level on the device."""
        level = self._levels["device"].get(cause)
        return 0 if level is None else int(level.during.max())

    def standing_bytes(self, cause: Cause) -> int:
        """Returns a cause's constant bytes on the device and the host."""
        return sum(self._standing[tier].get(cause, 0) for tier in ("device", "host"))

    def peak(self, tier: Tier) -> MemorySnapshot:
        """Returns the first point at which a tier holds most bytes."""
        if tier not in self._peaks:
            self._peaks[tier] = self._moment(int(self.total(tier).argmax()))
        return self._peaks[tier]

    @cached_property
    def moments(self) -> tuple[MemorySnapshot, ...]:
        """Bytes at the end of each chunk's (or layer's) forward and both ends of its backward."""
        return tuple(map(self._moment, self._points.shown()))

    @property
    def device(self) -> MemoryBreakdown:
        """The device's bytes at its peak."""
        return self.peak("device").device

    @property
    def host(self) -> MemoryBreakdown:
        """Offloaded bytes in host memory at its peak."""
        return self.peak("host").host

    def of(self, tier: Tier) -> MemoryBreakdown:
        """A tier's bytes at its peak."""
        return self.peak(tier).tier(tier)

    @property
    def moment(self) -> str:
        """Name of the point of the device's peak."""
        return self.peak("device").name

    def _moment(self, at: int) -> MemorySnapshot:
        held: dict[Tier, MemoryBreakdown] = {}
        for tier in TIERS:
            found = dict(self._standing[tier])
            for cause, level in self._levels[tier].items():
                found[cause] = found.get(cause, 0) + int(level.during[at])
            held[tier] = MemoryBreakdown((cause, size) for cause, size in found.items() if size)
        name, chunk = self._points.name(at)
        return MemorySnapshot(name=name, chunk=chunk, held=held)
