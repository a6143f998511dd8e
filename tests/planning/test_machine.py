"""Memory limits of control groups, NUMA nodes and names, read from made-up /proc and /sys trees."""

import os
import resource
from pathlib import Path

import psutil
import pytest

from sppo_hf.planning import machine

V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "36 31 0:33 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)
V1_GROUPS = "5:cpu:/other\n4:memory:{path}\n0::/\n"


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_version_2_takes_the_lowest_of_the_path(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/user.slice/job.scope/step\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/user.slice/memory.max": "max\n",
        "sys/fs/cgroup/user.slice/job.scope/memory.max": "5000000000\n",
        "sys/fs/cgroup/user.slice/job.scope/step/memory.max": "7000000000\n",
        "sys/fs/cgroup/other/memory.max": "1\n",
    }
    assert machine.control_group_limit_bytes(_tree(tmp_path, files)) == 5_000_000_000
    _tree(tmp_path, {"sys/fs/cgroup/user.slice/job.scope/step/memory.high": "4000000000\n"})
    assert machine.control_group_limit_bytes(tmp_path) == 4_000_000_000


def test_version_2_in_a_container_with_its_own_namespace(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/memory.max": "1000\n",
    }
    assert machine.control_group_limit_bytes(_tree(tmp_path, files)) == 1000


def test_a_path_outside_the_namespace_still_reads_the_mount(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/../elsewhere\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/memory.max": "1000\n",
        "sys/fs/elsewhere/memory.max": "1\n",
    }
    assert machine.control_group_limit_bytes(_tree(tmp_path, files)) == 1000


def test_version_1_follows_the_memory_hierarchy_only(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": V1_GROUPS.format(path="/jobs/a:b"),
        "proc/self/mountinfo": V1_MOUNTS.format(root="/"),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": "3000\n",
        "sys/fs/cgroup/memory/jobs/a:b/memory.limit_in_bytes": "4000\n",
        "sys/fs/cgroup/cpu/other/memory.limit_in_bytes": "1\n",
    }
    assert machine.control_group_limit_bytes(_tree(tmp_path, files)) == 3000


def test_version_1_in_a_container_that_sees_the_hosts_path(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": V1_GROUPS.format(path="/docker/abc/inner"),
        "proc/self/mountinfo": V1_MOUNTS.format(root="/docker/abc"),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "4000\n",
        "sys/fs/cgroup/memory/inner/memory.limit_in_bytes": "2000\n",
    }
    assert machine.control_group_limit_bytes(_tree(tmp_path, files)) == 2000


def test_no_limit_is_none(tmp_path: Path) -> None:
    assert machine.control_group_limit_bytes(tmp_path) is None
    files = {
        "proc/self/cgroup": V1_GROUPS.format(path="/"),
        "proc/self/mountinfo": V1_MOUNTS.format(root="/"),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert machine.control_group_limit_bytes(_tree(tmp_path, files)) is None
    assert machine.host_memory_bytes(tmp_path) == psutil.virtual_memory().total


def test_host_memory_is_the_lower_of_machine_and_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/memory.max": "1000\n",
    }
    assert machine.host_memory_bytes(_tree(tmp_path, files)) == 1000
    _tree(tmp_path, {"sys/fs/cgroup/memory.max": f"{2**60}\n"})
    assert machine.host_memory_bytes(tmp_path) == psutil.virtual_memory().total


def test_this_machine_answers() -> None:
    assert 0 < machine.host_memory_bytes() <= psutil.virtual_memory().total
    assert machine.processor_name()
    assert machine.nvidia_driver_version()


@pytest.mark.parametrize(("soft", "expected"), [(8192, 8192), (resource.RLIM_INFINITY, None)])
def test_lockable_bytes(monkeypatch: pytest.MonkeyPatch, soft: int, expected: int | None) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, resource.RLIM_INFINITY))
    assert machine.lockable_bytes() == expected


def test_free_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    free = machine.free_disk_bytes(tmp_path / "a" / "b")
    statistics = os.statvfs(tmp_path)
    assert free == pytest.approx(statistics.f_bavail * statistics.f_frsize, rel=0.05)


def test_numa_nodes(tmp_path: Path) -> None:
    address = "0000:1b:00.0"
    device = f"sys/bus/pci/devices/{address}/numa_node"
    nodes = "sys/devices/system/node"
    _tree(tmp_path, {device: "1\n", f"{nodes}/node0/cpulist": "0-1,4\n"})
    assert machine.pci_numa_node(address, tmp_path) is None, "one node"
    _tree(tmp_path, {f"{nodes}/node1/cpulist": "2-3,8-9,12\n"})
    assert machine.pci_numa_node(address, tmp_path) == 1
    assert machine.pci_numa_node("0000:ff:00.0", tmp_path) is None
    _tree(tmp_path, {device: "-1\n"})
    assert machine.pci_numa_node(address, tmp_path) is None, "the firmware does not say"
    assert machine.node_cpus(0, tmp_path) == {0, 1, 4}
    assert machine.node_cpus(1, tmp_path) == {2, 3, 8, 9, 12}
    assert machine.node_cpus(7, tmp_path) == frozenset()


def test_names(tmp_path: Path) -> None:
    files = {
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 9654 \nprocessor\t: 1\n",
        "sys/module/nvidia/version": "580.95.05\n",
    }
    _tree(tmp_path, files)
    assert machine.processor_name(tmp_path) == "AMD EPYC 9654"
    assert machine.nvidia_driver_version(tmp_path) == "580.95.05"
    assert machine.nvidia_driver_version(tmp_path / "proc") == "unknown"


def test_free_memory_is_what_a_group_has_left(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/job/step\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/job/memory.max": "9000\n",
        "sys/fs/cgroup/job/memory.current": "5000\n",
        "sys/fs/cgroup/job/memory.stat": (
            "anon 3000\ninactive_file 1500\nactive_file 300\nactive_anon 9\n"
        ),
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/step/memory.current": "4000\n",
    }
    assert machine.free_host_memory_bytes(_tree(tmp_path, files)) == 9000 - (5000 - 1500 - 300)
    _tree(tmp_path, {"sys/fs/cgroup/job/step/memory.high": "3000\n"})
    assert machine.free_host_memory_bytes(tmp_path) == 0, "more is held than the limit"


def test_free_memory_of_version_1_counts_the_groups_below(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": V1_GROUPS.format(path="/job"),
        "proc/self/mountinfo": V1_MOUNTS.format(root="/"),
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9000\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "5000\n",
        "sys/fs/cgroup/memory/job/memory.stat": (
            "inactive_file 10\nactive_file 20\ntotal_inactive_file 500\ntotal_active_file 70\n"
        ),
    }
    assert machine.free_host_memory_bytes(_tree(tmp_path, files)) == 9000 - (5000 - 500 - 70)


def test_free_memory_without_groups_is_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = psutil.virtual_memory()._replace(available=12345)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: found)
    assert machine.free_host_memory_bytes(tmp_path) == 12345


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 8),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"LOCAL_WORLD_SIZE": "many", "MPI_LOCALNRANKS": "2"}, 2),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "8"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "1"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "3"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "node-a"}, 1),
        # srun starts one launcher on each machine, which starts the processes.
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "LOCAL_WORLD_SIZE": "8"}, 8),
        # Of the whole allocation, which one process in it does not share with others.
        ({"SLURM_TASKS_PER_NODE": "8", "SLURM_NTASKS": "8"}, 1),
    ],
)
def test_processes_that_share_the_machine(variables: dict[str, str], expected: int) -> None:
    assert machine.local_processes(variables) == expected


def test_a_reserve_is_neither_tiny_nor_huge() -> None:
    gib = 2**30
    sizes = [8, 64, 128, 256, 2048]
    assert [machine.host_reserve_bytes(n * gib) // gib for n in sizes] == [2, 8, 16, 32, 32]


@pytest.mark.parametrize(
    ("variables", "expands", "left_alone"),
    [
        ({}, False, False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1, expandable_segments : true"}, True, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, False, True),
    ],
)
def test_the_allocator_is_told_what_nobody_told_it(
    variables: dict[str, str], expands: bool, left_alone: bool
) -> None:
    assert machine.has_expandable_segments(variables) is expands
    before = dict(variables)
    machine.request_expandable_segments(variables)
    assert (variables == before) is left_alone
    assert machine.has_expandable_segments(variables) is (expands or not left_alone)
