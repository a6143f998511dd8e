"""Ranks and process groups: one mesh (dp, pp, sp) of replicas, stages and parts of a sequence.

Ranks that share a sequence are neighbours, and so are those of one pipeline (rank = (replica *
pp_size + stage) * sp_size + part), so that they are on one machine where they fit there: the
exchange of tokens for heads wants the fastest link, messages between stages the next.

[Note: one group per direction] NCCL carries out what one group sends and receives in the order in
which each rank starts it. Two ranks that send to each other through one group would each wait for
the other's receive. So every ordered pair of neighbours has a group of its own, in which messages
go one way.

[Note: streams of groups] Each group works in a stream of its own, which PyTorch takes from a pool
of 32 for each priority, and after the 32nd the first comes again. In one stream with another, a
link would wait behind that one's message. With shared units a rank of 16 has 30 links and 17 other
groups, so links take theirs from the pool of high priority, and the other groups share theirs with
copies alone.

[Note: groups are formed one by one] A script may bind the launch's group to a device
(`init_process_group(device_id=...)`). PyTorch then splits every later group off that group's NCCL
communicator, for which all processes of the launch wait, members or not; but members of a gloo
group do not split anything, so ranks would count different splits. Here each group is set up by its
own ranks, when it is first used (`_try_groups`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import ConfigError
from sppo_hf.planning.machine import MAX_CONNECTIONS

STORAGE_TIMEOUT = timedelta(hours=2)
"""Longest time that ranks wait for another one to finish writing its files."""

DIMS = ("dp", "pp", "sp")
"""Dims of the mesh: replicas, stages, parts of a sequence."""

MAX_CTAS = 4
"""Thread blocks (each occupies a multiprocessor) that NCCL may use for a link."""

LARGE_NUMEL = 2**24
"""Numbers of a message that NCCL sends like a bucket of gradients: 64 MiB in float32."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PipelineMesh:
    """This rank's coordinates and process groups; a group is None where it would have one rank.

    A control group has the same ranks as another, for a few numbers on the CPU.
    """

    pp_size: int
    dp_size: int
    pp_rank: int
    dp_rank: int
    device: torch.device
    pp_group: Any = field(default=None, repr=False)
    """All ranks of this pipeline."""
    control_group: Any = field(default=None, repr=False)
    """All ranks that share this one's batches."""
    storage_group: Any = field(default=None, repr=False)
    """All ranks of this pipeline, with a timeout for slow disks."""
    replica_group: Any = field(default=None, repr=False)
    """The ranks that hold the same stages."""
    replica_control_group: Any = field(default=None, repr=False)
    embedding_group: Any = field(default=None, repr=False)
    """First and last rank of this pipeline, which share tied embeddings; None on others. Equal to
    `pp_group` for a pipeline of two."""
    links: dict[tuple[int, int], Any] = field(default_factory=dict, repr=False)
    """Groups for messages one way, by (source, target): pipeline ranks, of which one is this."""
    sp_size: int = 1
    sp_rank: int = 0
    sp_group: Any = field(default=None, repr=False)
    """The ranks that share a sequence and hold the same stages."""
    sp_control_group: Any = field(default=None, repr=False)
    unit_groups: dict[tuple[int, ...], Any] = field(default_factory=dict, repr=False)
    """Group of each set of pipeline ranks that share units of a stage, this one among them.
    Where there are any, there are links between all ranks of a pipeline."""
    allowed: list[float] = field(default_factory=lambda: [0.0], repr=False)
    """The largest timeout that was ever set, in seconds."""

    @property
    def sharing_ranks(self) -> range:
        """The global ranks that share this one's batches."""
        size = self.pp_size * self.sp_size
        return range(self.dp_rank * size, (self.dp_rank + 1) * size)

    @property
    def rank(self) -> int:
        """This global rank."""
        return self.world_rank(self.pp_rank)

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of its pipeline."""
        return self.pp_rank == 0

    def allow_seconds(self, seconds: float) -> None:
        """Raise the timeout of later operations in all groups but the storage group.

        It never sinks: several models of a launch have the same groups.
        """
        self.allowed[0] = seconds = max(seconds, self.allowed[0])
        # Public since PyTorch 2.15, which warns of the private one.
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        for group in (
            *(self.pp_group, self.control_group, self.replica_group, self.replica_control_group),
            *(self.embedding_group, self.sp_group, self.sp_control_group),
            *(*self.links.values(), *self.unit_groups.values()),
        ):
            if group is not None:
                set_timeout(timedelta(seconds=seconds), group)

    def world_rank(self, pp_rank: int) -> int:
        """Return the global rank of a rank of this pipeline."""
        return (self.dp_rank * self.pp_size + pp_rank) * self.sp_size + self.sp_rank


def check_world(config: SPPOConfig, world_size: int) -> None:
    """Refuse a number of processes that is no multiple of the ranks that share a batch.

    Raises:
        ConfigError: Naming both numbers.
    """
    sizes = {"pp_size": config.pp_size, "sp_size": config.sp_size}
    size = config.sharing_ranks
    if world_size % size:
        names = " x ".join(name for name, number in sizes.items() if number > 1)
        what = "share one sequence" if config.pp_size == 1 else "make one pipeline"
        fits = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ConfigError(
            f"{names}={size}, but {world_size} process{'es were' if world_size > 1 else ' was'} "
            f"started. Allowed: a multiple of {names} (each {size} {what}, the rest "
            "are data-parallel replicas). Remedy: accelerate launch --num_processes "
            f"{max(1, world_size // size) * size}, or {names} of {' or '.join(map(str, fits))}."
        )


def check_nodes(config: SPPOConfig) -> None:
    """Refuse launches in which ranks of this machine share sequences with ranks of another.

    All ranks of the machine refuse: otherwise those whose own sequence is within it would wait for
    the others. The launcher (torchrun, Accelerate) sets RANK, LOCAL_RANK and LOCAL_WORLD_SIZE;
    without them all ranks are assumed to be on this machine.

    Raises:
        ConfigError: They do, and `sp_across_nodes` does not allow it.
    """
    size = config.sp_size
    if size == 1 or config.sp_across_nodes or "LOCAL_WORLD_SIZE" not in os.environ:
        return
    rank, local_rank, here = (
        int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    first = rank - local_rank
    shared = (one // size * size for one in (rank, first, first + here - 1))
    apart = [start for start in shared if start < first or start + size > first + here]
    if not apart:
        return
    start = apart[0]
    seen = (
        f"sp_size={size} lets ranks {start} to {start + size - 1} share a sequence, but this "
        f"machine has ranks {first} to {first + here - 1}: every layer would exchange every "
        "chunk's tokens over the network. Allowed: "
    )
    fits = math.gcd(size, here)
    if fits == size:
        raise ConfigError(
            f"{seen}ranks that share a sequence on one machine, or sp_across_nodes=True. Remedy: "
            "number the ranks machine after machine, as torchrun and accelerate launch do on "
            f"machines with a multiple of {size} processes each, or sp_across_nodes=True."
        )
    within = [n for n in range(1, here + 1) if here % n == 0]
    raise ConfigError(
        f"{seen}sp_size={' or '.join(map(str, within))} (what divides the number of its "
        f"processes); others with sp_across_nodes=True. Remedy: sp_size={fits} with pp_size="
        f"{config.pp_size * size // fits}, for stages, which pass on hidden states alone, may be "
        "on several machines; or sp_across_nodes=True where nothing else fits."
    )


@contextlib.contextmanager
def unbound_launch() -> Iterator[None]:
    """Context in which groups are formed; see [Note: groups are formed one by one]."""
    launch: Any = dist.group.WORLD
    if launch is None:  # a single process
        yield
        return
    device, launch.bound_device_id = launch.bound_device_id, None
    try:
        yield
    finally:
        launch.bound_device_id = device


@unbound_launch()
def make_mesh(
    pp_size: int, device: torch.device, *, timeout_seconds: int, sp_size: int = 1
) -> PipelineMesh:
    """Form the groups; every process of the launch calls this, in the same order.

    Operations time out after `timeout_seconds`. The watchdog's timeout should be shorter: it knows
    which rank does not answer.

    Raises:
        ConfigError: Launches of kernels block.
    """
    if device.type == "cuda" and pp_size > 1:
        _check_launches()
    dp_size = dist.get_world_size() // (pp_size * sp_size)
    shape, timeout = (dp_size, pp_size, sp_size), timedelta(seconds=timeout_seconds)
    # No groups of one rank: each gloo group has threads that wake a hundred times a second.
    sizes = {name: size for name, size in zip(DIMS, shape, strict=True) if size > 1}
    # With a named backend every dim has groups of its own, apart from the launch's.
    fast = _backend_of(device)
    tensors, numbers = (
        init_device_mesh(
            kind,
            tuple(sizes.values()),
            mesh_dim_names=tuple(sizes),
            backend_override=dict.fromkeys(sizes, backend),
        )
        for kind, backend in ((device.type, fast), ("cpu", "gloo"))
    )
    stage, sp_rank = divmod(dist.get_rank(), sp_size)
    dp_rank, pp_rank = divmod(stage, pp_size)
    links, ends, storage = _make_other_groups(shape, (dp_rank, pp_rank, sp_rank), device, timeout)
    pipeline = _group(tensors, fast, "pp")
    mesh = PipelineMesh(
        pp_size=pp_size,
        dp_size=dp_size,
        sp_size=sp_size,
        pp_rank=pp_rank,
        dp_rank=dp_rank,
        sp_rank=sp_rank,
        device=device,
        pp_group=pipeline,
        control_group=_group(numbers, "gloo", "pp", "sp"),
        storage_group=storage,
        replica_group=_group(tensors, fast, "dp", "sp"),
        replica_control_group=_group(numbers, "gloo", "dp", "sp"),
        sp_group=_group(tensors, fast, "sp"),
        sp_control_group=_group(numbers, "gloo", "sp"),
        embedding_group=pipeline if pp_size == 2 else ends,
        links=links,
    )
    mesh.allow_seconds(timeout_seconds)
    _try_groups(mesh)
    return mesh


@unbound_launch()
def with_unit_groups(mesh: PipelineMesh, *, timeout_seconds: int) -> PipelineMesh:
    """Return the mesh (`sp_size` 1) with groups for shared units; all processes call this."""
    timeout, size = timedelta(seconds=timeout_seconds), mesh.pp_size
    backend = _backend_of(mesh.device)
    first = {tuple(range(stage + 1)) for stage in range(1, size)}
    last = {tuple(range(stage, size)) for stage in range(size - 1)}
    links, sets = {}, {}
    near = {pair for rank in range(size) for pair in _neighbours(rank, size)}
    far = [(a, b) for a in range(size) for b in range(size) if a != b and (a, b) not in near]
    for replica in range(mesh.dp_size):
        here = replica == mesh.dp_rank
        for ranks in sorted(first | last):
            members = [replica * size + rank for rank in ranks]
            group = dist.new_group(members, timeout=timeout, backend=backend)
            if here and mesh.pp_rank in ranks:
                sets[ranks] = group
        for source, target in far:
            pair = sorted((replica * size + source, replica * size + target))
            options = link_options(mesh.device, timeout)
            group = dist.new_group(pair, timeout=timeout, backend=backend, pg_options=options)
            if here and mesh.pp_rank in (source, target):
                links[source, target] = group
    more = replace(
        mesh, links=links, unit_groups=sets, pp_group=None, embedding_group=None, replica_group=None
    )
    _try_groups(more)
    made = replace(mesh, links={**mesh.links, **links}, unit_groups=sets)
    made.allow_seconds(timeout_seconds)
    return made


def _check_launches() -> None:
    """Check that messages between stages, which wait for other ranks, hold up nothing else.

    With `CUDA_LAUNCH_BLOCKING` a launch returns when its kernel has ended. A receive is posted a
    unit ahead, and two ranks that wait for each other's message before they compute its own wait
    forever. Streams that share a hardware queue begin what is in it in order: a message that waits
    for an earlier one of its stream holds up what others have behind it. With one queue 1f1b,
    interleaved and msp schedules wait for themselves, too.

    Raises:
        ConfigError: Launches block.
    """
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "") not in ("", "0"):
        raise ConfigError(
            "CUDA_LAUNCH_BLOCKING is set, with which a stage that starts a receive computes "
            "nothing until it has arrived, and stages wait for each other forever. Allowed: "
            "pp_size=1 with it, or a pipeline without it. Remedy: unset CUDA_LAUNCH_BLOCKING."
        )
    given = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # CUDA's default
    if given.isdecimal() and int(given) < MAX_CONNECTIONS:
        logger.warning(
            "CUDA_DEVICE_MAX_CONNECTIONS is %s, so that messages between stages and computation "
            "share hardware queues: messages that wait for another rank may delay computation, or "
            "stop the pipeline for good. Remedy: set it to %d before the process first uses CUDA.",
            given,
            MAX_CONNECTIONS,
        )


def _backend_of(device: torch.device) -> str:
    """Return the backend of groups for tensors of `device`.

    Without a name a group gets the launch's, which may be one for each type of device.
    """
    return "nccl" if device.type == "cuda" else "gloo"


def _neighbours(rank: int, size: int) -> list[tuple[int, int]]:
    """Return pairs of a rank and each that it sends to, where units are not shared."""
    return [(rank, to) for to in sorted({(rank + 1) % size, (rank - 1) % size})]


def _group(mesh: DeviceMesh, backend: str, *dims: str) -> Any:
    """Return this rank's group along those of `dims` that the mesh has; None if it has none."""
    long = tuple(dim for dim in mesh.mesh_dim_names or () if dim in dims)
    if len(long) < 2:
        return mesh[long[0]].get_group() if long else None
    return mesh[long]._flatten("_".join(long), backend_override=backend).get_group()


def _make_other_groups(
    shape: tuple[int, int, int],
    place: tuple[int, int, int],
    device: torch.device,
    timeout: timedelta,
) -> tuple[dict[tuple[int, int], Any], Any, Any]:
    """Form the groups that are no dim of a mesh: this rank's links, embedding and storage group."""
    dp_size, pp_size, sp_size = shape
    dp_rank, pp_rank, sp_rank = place
    fast = _backend_of(device)
    links: dict[tuple[int, int], Any] = {}
    own_ends, own_storage = None, None
    for replica in range(dp_size):
        first = replica * pp_size * sp_size
        for part in range(sp_size if pp_size > 1 else 0):
            ranks = range(first + part, first + pp_size * sp_size, sp_size)
            here = (replica, part) == (dp_rank, sp_rank)
            storage = dist.new_group(
                list(ranks), timeout=max(timeout, STORAGE_TIMEOUT), backend="gloo"
            )
            own_storage = storage if here else own_storage
            if pp_size > 2:
                ends = dist.new_group([ranks[0], ranks[-1]], timeout=timeout, backend=fast)
                if here and pp_rank in (0, pp_size - 1):
                    own_ends = ends
            for source in range(pp_size):
                for _, target in _neighbours(source, pp_size):
                    pair = sorted((ranks[source], ranks[target]))
                    options = link_options(device, timeout)
                    group = dist.new_group(pair, timeout=timeout, backend=fast, pg_options=options)
                    if here and pp_rank in (source, target):
                        links[source, target] = group
    return links, own_ends, own_storage


def link_options(device: torch.device, timeout: timedelta) -> Any:
    """Return options of a group whose messages go one way between two ranks; None without NCCL.

    NCCL's kernels of a send or a receive occupy whole multiprocessors from when they are posted
    until the other side is there, which in a pipeline may be several units later. With a few of
    them a message of tens of MB is as fast as with many, so a link is given no more. See
    [Note: streams of groups] for the priority.
    """
    if device.type != "cuda" or not dist.is_nccl_available():
        return None
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.is_high_priority_stream = True
    options.config.max_ctas = MAX_CTAS
    return options


def _try_groups(mesh: PipelineMesh) -> None:
    """Use every group and every link once, in the same order on all ranks.

    NCCL sets a group up when it is first used, and connects its ranks when each kind of collective,
    or the algorithm for large messages, is first used; the hosts of its ranks wait for each other
    then, and the buffers of the connections take memory. Within a schedule that would stall the
    first step, and take memory that its plan has given to others; and a group that does not work is
    found here.
    """
    sets = [mesh.unit_groups[ranks] for ranks in sorted(mesh.unit_groups)]

    def numbers(count: int) -> torch.Tensor:
        return torch.ones(count, device=mesh.device)

    for group in (mesh.pp_group, mesh.embedding_group, mesh.sp_group, mesh.replica_group, *sets):
        if group is not None:
            dist.all_reduce(numbers(1), group=group)
    for group in (mesh.embedding_group, mesh.replica_group):  # these sum gradients
        if group is not None and mesh.device.type == "cuda":
            dist.all_reduce(numbers(LARGE_NUMEL), group=group)
    for group in (mesh.sp_group, *sets):
        if group is not None:
            size = dist.get_world_size(group)
            dist.all_to_all_single(numbers(size), numbers(size), group=group)
    for ranks in sorted(mesh.unit_groups):
        first, group = mesh.world_rank(ranks[0]), mesh.unit_groups[ranks]
        dist.broadcast(numbers(1), first, group=group)
        dist.reduce(numbers(1), first, group=group)
    for source, target in sorted(mesh.links, key=lambda link: link_round(*link, mesh.pp_size)):
        group = mesh.links[source, target]
        if mesh.pp_rank == source:
            dist.send(numbers(1), mesh.world_rank(target), group=group)
        else:
            dist.recv(numbers(1), mesh.world_rank(source), group=group)


def link_round(source: int, target: int, size: int) -> tuple[int, ...]:
    """Return a key that sorts links of a pipeline so that most can be set up at the same time.

    Links whose ranks are equally far apart (on a ring) follow each other; of these, those that
    begin in every other run of so many ranks have no rank in common.
    """
    ahead, behind = (target - source) % size, (source - target) % size
    begin = source if ahead <= behind else target
    apart = min(ahead, behind)
    return apart, ahead, begin // apart % 2, begin
