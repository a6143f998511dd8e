"""Which rank is which: stages beside replicas, and the process groups that they talk in.

Ranks of one pipeline are neighbours (rank = replica * pp_size + stage), so that a pipeline lies
within a node where it fits there. Knows nothing of models or schedules.

[Note: one group per direction] NCCL carries out what one group sends and receives in the order in
which each rank asks for it. Two ranks that send to each other through one group would each wait for
the other's receive. So every ordered pair of neighbours has a group of its own, in which messages
go one way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from sppo_hf.errors import ConfigError

STORAGE_TIMEOUT = timedelta(hours=2)
"""How much later than another a rank may be done with writing its files."""


MOST_CTAS = 4
"""Thread blocks, of a multiprocessor each, that NCCL may use for a link."""


@dataclass(frozen=True, eq=False)
class PipelineMesh:
    """This rank's place, and its groups."""

    pp_size: int
    dp_size: int
    pp_rank: int
    dp_rank: int
    device: torch.device
    pipeline: Any = field(repr=False)
    """All ranks of this pipeline."""
    control: Any = field(repr=False)
    """The same, for a few numbers on the CPU."""
    storage: Any = field(repr=False)
    """The same again, for what waits for slow disks."""
    replicas: Any = field(repr=False)
    """The ranks that hold the same stages; None where there is one pipeline."""
    replicas_control: Any = field(repr=False)
    """The same, for a few numbers on the CPU."""
    ends: Any = field(repr=False)
    """First and last rank of this pipeline, which share tied embeddings; None on others."""
    links: dict[tuple[int, int], Any] = field(repr=False)
    """By (from, to), as ranks of the pipeline, one of them this: the group of messages that go that
    way."""

    @property
    def is_first(self) -> bool:
        """Whether this rank begins its pipeline."""
        return self.pp_rank == 0

    def allow_seconds(self, seconds: float) -> None:
        """Let operations from now on wait for so long, in all groups but the one for storage."""
        groups = (self.pipeline, self.control, self.replicas, self.replicas_control, self.ends)
        for group in (*groups, *self.links.values()):
            if group is not None:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def world_rank(self, pp_rank: int) -> int:
        """The rank, of all, of a rank of this pipeline."""
        return self.dp_rank * self.pp_size + pp_rank


def check_world(pp_size: int, world_size: int) -> None:
    """Refuse a number of processes that is no multiple of the pipeline's ranks.

    Raises:
        ConfigError: Naming both numbers.
    """
    if world_size % pp_size:
        raise ConfigError(
            f"pp_size={pp_size}, but {world_size} process{'es were' if world_size > 1 else ' was'} "
            f"started. Allowed: a multiple of pp_size (each {pp_size} make one pipeline, the rest "
            "are data-parallel replicas). Remedy: accelerate launch --num_processes "
            f"{max(1, world_size // pp_size) * pp_size}, or another pp_size."
        )


def make_mesh(pp_size: int, device: torch.device, *, timeout_seconds: int) -> PipelineMesh:
    """Form the groups; every process of the launch calls this, in the same order.

    Args:
        pp_size: Ranks of a pipeline.
        device: Of this rank.
        timeout_seconds: After which an operation without an answer fails. The watchdog's should be
            shorter: it knows which rank does not answer.

    Raises:
        ConfigError: The number of processes is no multiple of `pp_size`.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    check_world(pp_size, world)
    dp_size, rank = world // pp_size, dist.get_rank()
    dp_rank, pp_rank = divmod(rank, pp_size)
    timeout = timedelta(seconds=timeout_seconds)
    mine: dict[str, Any] = {"replicas": None, "replicas_control": None, "ends": None}
    links: dict[tuple[int, int], Any] = {}
    for replica in range(dp_size):
        ranks = [replica * pp_size + stage for stage in range(pp_size)]
        here = replica == dp_rank
        made = {
            "pipeline": dist.new_group(ranks, timeout=timeout),
            "control": dist.new_group(ranks, timeout=timeout, backend="gloo"),
            "storage": dist.new_group(ranks, timeout=max(timeout, STORAGE_TIMEOUT), backend="gloo"),
            "ends": dist.new_group(sorted({ranks[0], ranks[-1]}), timeout=timeout),
        }
        if here:
            mine |= made
        for source in range(pp_size):
            for target in sorted({(source + 1) % pp_size, (source - 1) % pp_size}):
                pair = sorted((ranks[source], ranks[target]))
                group = dist.new_group(
                    pair, timeout=timeout, pg_options=link_options(device, timeout)
                )
                if here and pp_rank in (source, target):
                    links[source, target] = group
    if dp_size > 1:
        for stage in range(pp_size):
            ranks = [replica * pp_size + stage for replica in range(dp_size)]
            made = {
                "replicas": dist.new_group(ranks, timeout=timeout),
                "replicas_control": dist.new_group(ranks, timeout=timeout, backend="gloo"),
            }
            if stage == pp_rank:
                mine |= made
    if pp_rank not in (0, pp_size - 1):
        mine["ends"] = None
    mesh = PipelineMesh(
        pp_size=pp_size,
        dp_size=dp_size,
        pp_rank=pp_rank,
        dp_rank=dp_rank,
        device=device,
        links=links,
        **mine,
    )
    _try_groups(mesh)
    return mesh


def link_options(device: torch.device, timeout: timedelta) -> Any:
    """Options of a group whose messages go one way between two ranks; None without NCCL.

    NCCL's kernels of a send or a receive occupy whole multiprocessors from when they are posted
    until the other side is there, which in a pipeline may be several units later. A message of tens
    of MB takes a few of them no longer than it takes many, so a link is given no more.
    """
    if device.type != "cuda" or not dist.is_nccl_available():
        return None
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.max_ctas = MOST_CTAS
    return options


def _try_groups(mesh: PipelineMesh) -> None:
    """Send one number over every link and through every group, in an order that all ranks share.

    NCCL sets a group up when it is first used, and its ranks wait for each other then; within a
    schedule that would stall the first step, and here one that does not work is found at once.
    """
    for group in (mesh.pipeline, mesh.ends, mesh.replicas):
        if group is not None:
            dist.all_reduce(torch.ones(1, device=mesh.device), group=group)
    for source, target in sorted(mesh.links):
        number = torch.ones(1, device=mesh.device)
        group = mesh.links[source, target]
        if mesh.pp_rank == source:
            dist.send(number, mesh.world_rank(target), group=group)
        else:
            dist.recv(number, mesh.world_rank(source), group=group)
