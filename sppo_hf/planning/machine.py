"""What this machine holds: host memory, lockable memory, free disk, NUMA nodes, names.

Read from /proc and /sys, so that commands can ask without importing torch. Knows nothing of
devices' speeds, profiles or plans. Every function takes the folder that stands for `/`, for tests;
what a machine does not tell (no Linux, a sandbox) is None or left out, never guessed.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

_ROOT = Path("/")

# Version 1 says "no limit" with the largest multiple of a page below 2**63.
_NO_LIMIT_BYTES = 2**62
# memory.high slows a process down to a crawl where memory.max would end it: both are limits.
_LIMIT_FILES = ("memory.max", "memory.high", "memory.limit_in_bytes")


def host_memory_bytes(root: Path = _ROOT) -> int:
    """Host memory this process may use: the machine's, or its control group's limit if lower."""
    limit = control_group_limit_bytes(root)
    total: int = psutil.virtual_memory().total
    return total if limit is None else min(total, limit)


def control_group_limit_bytes(root: Path = _ROOT) -> int | None:
    """Lowest memory limit of this process' control groups and of all groups above them.

    Follows the process' own path in `/proc/self/cgroup` for version 1 (the memory controller's
    hierarchy) and version 2 alike. In a container that path may be the host's: then the part below
    the mount's root counts, and at least the mount point itself is read.

    Returns:
        Bytes, or None where no group sets a limit.
    """
    limits = [
        int(text)
        for mount, group in _memory_groups(root)
        for folder in _upwards(mount, group)
        for name in _LIMIT_FILES
        if (text := _read(folder / name)) is not None and text.isdigit()
    ]
    return min((limit for limit in limits if limit < _NO_LIMIT_BYTES), default=None)


def lockable_bytes() -> int | None:
    """Host memory this process may lock (RLIMIT_MEMLOCK); None where there is no limit.

    It bounds `mlock`. NVIDIA's driver pins memory without charging it here, so a CUDA process can
    often pin more; `sppo calibrate` finds out.
    """
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def free_disk_bytes(folder: str | os.PathLike[str]) -> int:
    """Free bytes on the disk that `folder`, or its nearest parent that exists, is on."""
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
    """NUMA node that a PCI device hangs on.

    Args:
        address: such as "0000:1b:00.0".
        root: stands for `/`.

    Returns:
        The node; None where the machine has only one or does not say.
    """
    if len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) < 2:
        return None
    text = _read(root / "sys/bus/pci/devices" / address / "numa_node")
    return int(text) if text is not None and text.isdigit() else None


def node_cpus(node: int, root: Path = _ROOT) -> frozenset[int]:
    """Logical processors of a NUMA node; empty where it is not known."""
    text = _read(root / f"sys/devices/system/node/node{node}/cpulist") or ""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _memory_groups(root: Path) -> Iterator[tuple[Path, PurePosixPath]]:
    """(mount point, group relative to it) of every hierarchy that can limit memory."""
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
    """(file system, its options, root within it, mount point) of each mount; see proc(5)."""
    for line in mountinfo.splitlines():
        fields = line.split()
        separator = fields.index("-")
        yield fields[separator + 1], fields[-1].split(","), fields[3], fields[4]


def _relative(group: str, mount_root: str) -> PurePosixPath:
    """`group` below the mount's root; the mount itself where it is not below."""
    path = PurePosixPath(group)
    if ".." in path.parts or not path.is_relative_to(mount_root):
        return PurePosixPath()
    return path.relative_to(mount_root)


def _upwards(mount: Path, group: PurePosixPath) -> Iterator[Path]:
    """The group's folder and every one above it, the mount point last."""
    for inner in (group, *group.parents):
        yield mount / inner


def _read(path: Path) -> str | None:
    """A small text file, stripped; None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
