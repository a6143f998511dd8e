"""A process is bound to its device's node, only ever narrowed, and let go again."""

import os

import pytest
import torch

from sppo_hf.engine import device_facts

GPU = torch.device("cuda", 0)


class _System:
    """Allowed processors of this process, and the NUMA node of the device."""

    def __init__(self, allowed: set[int], node: int | None, on_node: set[int]) -> None:
        self.allowed = allowed
        self.node = node
        self.on_node = on_node
        self.bound: set[int] = set()

    def set(self, thread: int, processors: frozenset[int]) -> None:
        """Stands for os.sched_setaffinity."""
        self.allowed = set(processors)
        self.bound.add(thread)


def _system(
    monkeypatch: pytest.MonkeyPatch, *, allowed: set[int], node: int | None, on_node: set[int]
) -> _System:
    system = _System(allowed, node, on_node)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: system.allowed)
    monkeypatch.setattr(os, "sched_setaffinity", system.set)
    monkeypatch.setattr(device_facts, "device_numa_node", lambda device: system.node)
    monkeypatch.setattr(device_facts, "node_cpus", lambda node: frozenset(system.on_node))
    return system


def test_binds_all_threads_within_what_was_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    system = _system(monkeypatch, allowed={0, 1, 2, 3}, node=1, on_node={2, 3, 4, 5})
    assert device_facts.bind_to_device(GPU) == {0, 1, 2, 3}
    assert system.allowed == {2, 3}
    assert os.getpid() in system.bound
    assert {int(name) for name in os.listdir("/proc/self/task")} <= system.bound


@pytest.mark.parametrize(
    ("node", "on_node"),
    [(None, {2, 3}), (1, set()), (1, {8, 9}), (1, {0, 1, 2, 3, 4})],
)
def test_changes_nothing_where_there_is_nothing_to_gain(
    monkeypatch: pytest.MonkeyPatch, node: int | None, on_node: set[int]
) -> None:
    system = _system(monkeypatch, allowed={0, 1, 2, 3}, node=node, on_node=on_node)
    assert device_facts.bind_to_device(GPU) is None
    assert not system.bound


def test_is_let_go_again_even_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    system = _system(monkeypatch, allowed={0, 1, 2, 3}, node=0, on_node={0, 1})

    def fail_while_bound() -> None:
        with device_facts.bound_to_device(GPU):
            assert system.allowed == {0, 1}
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_while_bound()
    assert system.allowed == {0, 1, 2, 3}


def test_a_thread_that_has_just_ended_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def gone(thread: int, processors: frozenset[int]) -> None:
        tried.append(thread)
        raise ProcessLookupError

    monkeypatch.setattr(os, "sched_setaffinity", gone)
    device_facts.run_on(frozenset({0}))
    assert set(tried) >= {int(name) for name in os.listdir("/proc/self/task")}


def test_a_processor_as_device_is_left_alone() -> None:
    before = os.sched_getaffinity(0)
    with device_facts.bound_to_device(torch.device("cpu")):
        assert os.sched_getaffinity(0) == before
