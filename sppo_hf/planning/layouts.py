"""Layouts: how a step may be spread over devices, and which of these ways a search looks at.

Plain data and enumeration; knows nothing of seconds or bytes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal, NamedTuple

from sppo_hf.planning.activation_modes import Saved
from sppo_hf.planning.chunk_bounds import (
    Bounds,
    PrefixCost,
    auto_bounds,
    balanced_bounds,
    even_bounds,
)
from sppo_hf.planning.pipeline_cost import OffloadRule
from sppo_hf.planning.tiers import HOST, Tier
from sppo_hf.schedule.generate import INTERLEAVED, MSP, SHARING

Cut = Literal["even", "flops", "bounded"]
"""How a sequence is cut: equal lengths; equal FLOPs; equal FLOPs as far as no chunk is much longer
or shorter than the mean, so that no frame is."""


class Layout(NamedTuple):
    """How a step is spread over devices."""

    schedule: str
    """Name of the schedule."""

    stages: int
    """Ranks of a pipeline."""

    replicas: int
    """Pipelines beside each other, each with its share of the rows."""

    virtual: int
    """Stages of each rank."""

    num_chunks: int
    """Chunks of a sequence."""

    partition: Cut
    """How it is cut."""

    saved: Saved
    """What is kept of frames."""

    offload: OffloadRule
    """What of that leaves the device."""

    kv_tier: Tier = "device"
    """Where keys, values and their gradient sums wait."""

    sp: int = 1
    """Devices that share each stage's units by sequence parallelism: each rank of a pipeline is so
    many."""

    sharded: bool = False
    """Whether weights, gradients and optimizer states are sharded over all devices of a stage
    (FSDP); only without a pipeline."""

    frame_tier: Tier = HOST
    """Where what leaves goes."""

    @property
    def devices(self) -> int:
        """Devices in use."""
        return self.stages * self.replicas * self.sp

    def nodes_of(self, rank: int, devices_per_node: int) -> tuple[tuple[int, int], ...]:
        """Returns the first and last node that a rank's devices are on, in every replica.

        Devices are numbered by replica, then stage, then place in their group, and fill node after
        node; so groups stay within nodes where they can.
        """
        first = [(replica * self.stages + rank) * self.sp for replica in range(self.replicas)]
        return tuple((d // devices_per_node, (d + self.sp - 1) // devices_per_node) for d in first)

    def rank_nodes(self, devices_per_node: int) -> tuple[Hashable, ...]:
        """Returns a node for each rank: equal where two are on one node in all replicas."""
        found: list[Hashable] = []
        for rank in range(self.stages):
            nodes = self.nodes_of(rank, devices_per_node)
            within = all(first == last for first, last in nodes)
            found.append(nodes if within else rank)
        return tuple(found)

    def hops_between_nodes(self, devices_per_node: int) -> int:
        """Returns how many hops from stage to stage leave a node."""
        nodes = self.rank_nodes(devices_per_node)
        return sum(here != there for here, there in pairwise(nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """What a search may choose from."""

    schedules: tuple[str, ...] = ("seq1f1b", "zb_seq1f1b", "interleaved_seq1f1b", MSP)
    """Where there is more than one stage; on a single one they are all the same."""

    beyond_runtime: bool = False
    """Whether ranks may share units where none can yet run that: groups of sequence-parallel
    devices, or heads that cannot be divided."""

    virtual: tuple[int, ...] = (2, 4)
    """Stages of a rank, for schedules that put several on one."""

    partitions: tuple[Cut, ...] = ("flops",)
    """How sequences are cut."""

    frames: tuple[tuple[Saved, OffloadRule], ...] = (
        ("whole", "none"),
        ("whole", "sppo"),
        ("matmuls", "none"),
        ("matmuls", "full"),
        ("inputs", "none"),
        ("inputs", "full"),
    )
    """What is kept of frames, and what of that leaves, fastest first."""

    kv_tiers: tuple[Tier, ...] = ("device", "host")
    """Where K/V may wait."""

    frame_tiers: tuple[Tier, ...] = (HOST,)
    """Where what leaves of frames may go."""

    sp: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Sequence-parallel devices of a rank. Groups that leave a node are looked at only where
    nothing else fits."""

    sharded: tuple[bool, ...] = (False,)
    """Whether weights may be sharded where there is one stage."""

    chunk_tokens: tuple[int, int] = (2048, 32_768)
    """Least and most tokens of a chunk on one device, on average: of a rank's share where several
    share it. A row that is shorter is one chunk."""

    most_units: int = 1024
    """Chunks of all rows that pass through one pipeline in a step."""

    least_used: float = 1.0
    """Share of the devices that must be used; below 1, some may stand idle so that stages become
    equal."""

    def layouts(
        self, *, gpus: int, rows: int, total_tokens: int, num_layers: int, sp: Iterable[int] = (1,)
    ) -> Iterator[Layout]:
        """Yields every layout of `rows` rows over devices.

        Args:
            gpus: devices; stages times replicas times `sp` are as many, or a little fewer
                (`least_used`).
            rows: rows of a step; replicas divide them.
            total_tokens: length of a row.
            num_layers: no more stages than that.
            sp: devices that may share a rank's units.
        """
        for group in sp:
            for layout in self._of_groups(
                gpus // group, rows, -(-total_tokens // group), num_layers
            ):
                if layout.stages * layout.replicas * group >= self.least_used * gpus:
                    yield layout._replace(sp=group)

    def _of_groups(
        self, gpus: int, rows: int, total_tokens: int, num_layers: int
    ) -> Iterator[Layout]:
        """Yields layouts over groups of devices that each see so many tokens of a row."""
        shortest, longest = self.chunk_tokens
        chunks = [
            2**power
            for power in range(total_tokens.bit_length())
            if shortest * 2**power <= total_tokens <= longest * 2**power
        ]
        for stages in range(1, min(gpus, num_layers) + 1):
            least = math.ceil(self.least_used * gpus / stages)
            # A rank more than the largest stage's layers ask for only makes others smaller.
            needless = stages > 1 and -(-num_layers // stages) == -(-num_layers // (stages - 1))
            for replicas in range(least, gpus // stages + 1):
                if rows % replicas or (needless and stages * replicas < gpus):
                    continue
                for num_chunks in chunks or [1]:
                    if num_chunks * rows // replicas <= self.most_units:
                        yield from self._variants(stages, replicas, num_chunks, num_layers)

    def _variants(
        self, stages: int, replicas: int, num_chunks: int, num_layers: int
    ) -> Iterator[Layout]:
        # A single chunk is cut in no way, and a single stage is run by no schedule.
        cuts = self.partitions if num_chunks > 1 else self.partitions[:1]
        for schedule in self.schedules if stages > 1 else self.schedules[:1]:
            for virtual in self.virtual if schedule in INTERLEAVED and stages > 1 else (1,):
                if stages * virtual > num_layers or (schedule in SHARING and num_chunks < stages):
                    continue
                for partition in cuts:
                    for (saved, offload), kv_tier in product(self.frames, self.kv_tiers):
                        for sharded in self.sharded if stages == 1 else (False,):
                            for tier in (HOST,) if offload == "none" else self.frame_tiers:
                                yield Layout(
                                    *(schedule, stages, replicas, virtual, num_chunks),
                                    *(partition, saved, offload, kv_tier, 1, sharded, tier),
                                )


def bounds_of(curve: PrefixCost, total_tokens: int, num_chunks: int, partition: Cut) -> Bounds:
    """Cuts a sequence as a layout says."""
    if partition == "even":
        return even_bounds(total_tokens, num_chunks)
    if partition == "bounded":
        mean = total_tokens // num_chunks
        return auto_bounds(curve, total_tokens, target_tokens=mean, partition="flops")
    return balanced_bounds(curve, total_tokens, num_chunks)
