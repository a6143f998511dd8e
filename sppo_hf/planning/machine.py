"""Facts about this machine: host memory, lockable memory, free disk space, NUMA nodes, names.

They are read from /proc and /sys, so commands need not import torch. Functions take the folder that
stands for `/`, for tests. What a machine does not report (no Linux, a sandbox) is None or left out,
never guessed.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from itertools import product
from pathlib import Path, PurePosixPath

import psutil

_ROOT = Path("/")

# Control groups of version 1 express "no limit" as the largest multiple of a page below 2**63.
_NO_LIMIT_BYTES = 2**62
# Above memory.high a process is slowed down to a crawl, above memory.max it is killed; so both are
# limits.
_LIMIT_FILES = ("memory.max", "memory.high", "memory.limit_in_bytes")
_USAGE_FILES = ("memory.current", "memory.usage_in_bytes")
_GIB = 2**30


def host_memory_bytes(root: Path = _ROOT) -> int:
    """Bytes of host memory that this process may use: the machine's, or a lower group limit."""
    limit = control_group_limit_bytes(root)
    total: int = psutil.virtual_memory().total
    return total if limit is None else min(total, limit)


def free_host_memory_bytes(root: Path = _ROOT) -> int:
    """Bytes of host memory that are free now, including file cache that can be dropped.

    They are the machine's free bytes, or those left below a control group's limit if fewer.
    """
    free: int = psutil.virtual_memory().available
    left = [limit - _held_bytes(folder) for folder, limit in _limits(root)]
    return max(0, min([free, *left]))


def host_reserve_bytes(total_bytes: int) -> int:
    """Bytes of host memory that plans leave free: an eighth, but 2 GiB at least and 32 GiB at most.

    Pinned memory cannot be swapped out, and data loading, checkpoints and other processes need some
    too. A process that takes all of it is killed without a message.
    """
    return min(max(2 * _GIB, total_bytes // 8), 32 * _GIB)


def control_group_limit_bytes(root: Path = _ROOT) -> int | None:
    """Lowest memory limit of this process' control groups and of all groups above them, in bytes.

    Follows the process' path in `/proc/self/cgroup`, for version 1 (the memory controller's
    hierarchy) and version 2. In a container that path may be the host's: then the part below the
    mount's root is used, and at least the mount point itself is read.

    Returns:
        Bytes; None if no group sets a limit.
    """
    return min((limit for _, limit in _limits(root) if limit < _NO_LIMIT_BYTES), default=None)


_LOCAL_PROCESSES = (
    *("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    "MV2_COMM_WORLD_LOCAL_SIZE",
)


def local_processes(variables: Mapping[str, str]) -> int:
    """Number of processes of this launch on this machine, which share its memory.

    torchrun, Accelerate and MPI set an environment variable to this number; Slurm's srun lists the
    numbers of all nodes, as "4(x2),3".
    """
    for name in _LOCAL_PROCESSES:
        if re.fullmatch("[0-9]{1,9}", variables.get(name, "")):
            return max(1, int(variables[name]))
    tasks: list[int] = []
    listed = variables.get("SLURM_STEP_TASKS_PER_NODE", "")
    for count, nodes in re.findall(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?", listed):
        tasks += [int(count)] * int(nodes or 1)
    node = variables.get("SLURM_NODEID", "0")
    known = re.fullmatch("[0-9]{1,9}", node) is not None and int(node) < len(tasks)
    return max(1, tasks[int(node)]) if known else 1


_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


EXPANDABLE_SEGMENTS = "expandable_segments:True"
"""Setting with which PyTorch's CUDA allocator maps memory page by page."""


def request_expandable_segments(variables: MutableMapping[str, str]) -> bool:
    """Turns on expandable segments of PyTorch's CUDA allocator, unless it is already configured.

    PyTorch reads the environment variables when CUDA is first used. Returns whether it was set.
    """
    if any(name in variables for name in _ALLOCATOR_VARIABLES):
        return False
    variables[_ALLOCATOR_VARIABLES[0]] = EXPANDABLE_SEGMENTS
    return True


MAX_CONNECTIONS = 32
"""Hardware work queues of a CUDA device."""


def set_max_connections(variables: MutableMapping[str, str]) -> None:
    """Sets CUDA's number of hardware work queues to the maximum, unless it is already set.

    The default of 8 makes compute, two copy streams and NCCL's streams of a pipeline share queues:
    work that waits in a queue then delays work of another stream behind it. CUDA reads the
    environment variables when a process first uses it.
    """
    variables.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(MAX_CONNECTIONS))


def withdraw_expandable_segments(variables: MutableMapping[str, str]) -> None:
    """Undoes `request_expandable_segments` if the allocator turned out not to support it."""
    del variables[_ALLOCATOR_VARIABLES[0]]


def has_expandable_segments(variables: Mapping[str, str]) -> bool:
    """Whether the environment turns on expandable segments of PyTorch's CUDA allocator."""
    said = (variables.get(name, "") for name in _ALLOCATOR_VARIABLES)
    return any(re.search(r"expandable_segments\s*:\s*true", text, re.IGNORECASE) for text in said)


def lockable_bytes() -> int | None:
    """Bytes of host memory that this process may lock (RLIMIT_MEMLOCK); None for no limit.

    The limit applies to `mlock`. NVIDIA's driver pins memory without counting it here, so a CUDA
    process can often pin more; `sppo calibrate` finds out how much.
    """
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def free_disk_bytes(folder: str | os.PathLike[str]) -> int:
    """Free bytes on the disk of `folder` or, if it does not exist, of its nearest parent."""
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def processor_name(root: Path = _ROOT) -> str:
    """The processor's name, such as "AMD EPYC 9654 96-Core Processor"."""
    text = _read(root / "proc/cpuinfo") or ""
    found = re.search(r"^model name\s*:\s*(\S.*)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def nvidia_driver_version(root: Path = _ROOT) -> str:
    """Version of NVIDIA's kernel driver, or "unknown"."""
    return _read(root / "sys/module/nvidia/version") or "unknown"


def pci_numa_node(address: str, root: Path = _ROOT) -> int | None:
    """NUMA node of a PCI device ("0000:1b:00.0").

    None if the machine has only one node or does not report it.
    """
    if len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) < 2:
        return None
    text = _read(root / "sys/bus/pci/devices" / address / "numa_node")
    return int(text) if text is not None and text.isdigit() else None


def node_cpus(node: int, root: Path = _ROOT) -> frozenset[int]:
    """Logical processors of a NUMA node; empty if unknown."""
    text = _read(root / f"sys/devices/system/node/node{node}/cpulist") or ""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _limits(root: Path) -> Iterator[tuple[Path, int]]:
    """Yields (folder, limit in bytes) of this process' memory control groups and all above them."""
    for mount, group in _memory_groups(root):
        for folder, name in product((group, *group.parents), _LIMIT_FILES):
            text = _read(mount / folder / name)
            if text is not None and text.isdigit():
                yield mount / folder, int(text)


def _held_bytes(folder: Path) -> int:
    """Returns the bytes that a control group holds and cannot drop.

    Cached files are subtracted: the kernel drops them before it refuses memory. Both the active and
    the inactive list are, as in the machine's `MemAvailable`: pages that were read twice move from
    the active to the inactive list first. Shared memory is in neither list.
    """
    used = next((text for name in _USAGE_FILES if (text := _read(folder / name)) is not None), "0")
    cached: dict[str, int] = {}
    for name, size in re.findall(
        r"^(?:total_)?((?:in)?active_file) (\d+)$", _read(folder / "memory.stat") or "", re.M
    ):
        # In version 1 only the counters with the prefix total_ include the groups below.
        cached[name] = max(cached.get(name, 0), int(size))
    return max(0, int(used) - sum(cached.values()))


def _memory_groups(root: Path) -> Iterator[tuple[Path, PurePosixPath]]:
    """Yields (mount point, group relative to it) of every hierarchy that can limit memory."""
    mounts = list(_mounts(_read(root / "proc/self/mountinfo") or ""))
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, group = line.split(":", 2)
        unified = controllers == ""
        if not unified and "memory" not in controllers.split(","):
            continue
        for kind, options, mount_root, mount_point in mounts:
            if kind == "cgroup2" if unified else kind == "cgroup" and "memory" in options:
                yield root / mount_point.lstrip("/"), _relative(group, mount_root)


def _mounts(mountinfo: str) -> Iterator[tuple[str, list[str], str, str]]:
    """Yields (file system, its options, root within it, mount point) of each mount; see proc(5)."""
    for line in mountinfo.splitlines():
        fields = line.split()
        separator = fields.index("-")
        yield fields[separator + 1], fields[-1].split(","), fields[3], fields[4]


def _relative(group: str, mount_root: str) -> PurePosixPath:
    """Returns `group` relative to the mount's root; the mount itself if it is not below."""
    path = PurePosixPath(group)
    if ".." in path.parts or not path.is_relative_to(mount_root):
        return PurePosixPath()
    return path.relative_to(mount_root)


def _read(path: Path) -> str | None:
    """Returns the stripped text of a small file; None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
