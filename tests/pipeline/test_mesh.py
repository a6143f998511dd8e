"""Allowed numbers of processes; the groups themselves are checked over gloo ranks.

See `assert_places` in test_pipeline_exactness.py for those.
"""

import logging
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.plan_cache import BatchShape
from sppo_hf.errors import ConfigError
from sppo_hf.pipeline import mesh as mesh_module
from sppo_hf.pipeline.convert import shared_mesh
from sppo_hf.pipeline.mesh import (
    PipelineMesh,
    check_nodes,
    check_world,
    link_options,
    link_round,
)
from sppo_hf.pipeline.pipeline_engine import PipelineEngine
from sppo_hf.pipeline.stage_plans import BatchPlans
from sppo_hf.planning.pipeline_choice import PipelineChoice
from tests.pipeline.fork_server import fork_server


@pytest.mark.parametrize(("pp_size", "world"), [(1, 1), (2, 2), (2, 8), (4, 4), (3, 9)])
def test_multiples_are_allowed(pp_size: int, world: int) -> None:
    check_world(SPPOConfig(pp_size=pp_size), world)


@pytest.mark.parametrize(
    ("pp_size", "world", "remedy"), [(2, 1, 2), (2, 3, 2), (4, 6, 4), (3, 8, 6), (8, 4, 8)]
)
def test_others_are_refused_with_the_nearest_number(pp_size: int, world: int, remedy: int) -> None:
    was = "process was" if world == 1 else "processes were"
    with pytest.raises(ConfigError) as caught:
        check_world(SPPOConfig(pp_size=pp_size), world)
    said = str(caught.value)
    assert f"pp_size={pp_size}, but {world} {was} started" in said
    assert f"--num_processes {remedy}," in said
    with pytest.raises(ConfigError, match=rf"sp_size={pp_size}, but .*--num_processes {remedy},"):
        check_world(SPPOConfig(sp_size=pp_size), world)


def test_sizes_that_fit_the_launch_are_named() -> None:
    with pytest.raises(ConfigError, match=r"or sp_size of 1 or 2 or 3 or 6\."):
        check_world(SPPOConfig(sp_size=4), 6)


def launched(monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: int, here: int) -> None:
    """Let the environment be that of a rank, of so many on its machine."""
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", here)):
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    ("sp_size", "pp_size", "rank", "ranks", "remedy"),
    [
        (16, 1, 9, "0 to 15", "sp_size=8 with pp_size=2,"),
        (16, 2, 9, "0 to 15", "sp_size=8 with pp_size=4,"),
        (12, 1, 14, "12 to 23", "sp_size=4 with pp_size=3,"),
        (3, 1, 8, "6 to 8", "sp_size=1 with pp_size=3,"),
        # Its own sequence stays on the machine, others do not.
        (3, 1, 10, "6 to 8", "sp_size=1 with pp_size=3,"),
        (6, 1, 14, "12 to 17", "sp_size=2 with pp_size=3,"),
    ],
)
def test_sequences_shared_between_machines_are_refused(
    sp_size: int,
    pp_size: int,
    rank: int,
    ranks: str,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched(monkeypatch, rank, rank - 8, 8)
    with pytest.raises(ConfigError) as caught:
        check_nodes(SPPOConfig(sp_size=sp_size, pp_size=pp_size))
    said = str(caught.value)
    assert f"sp_size={sp_size} lets ranks {ranks} share a sequence, but this machine has" in said
    assert "ranks 8 to 15" in said
    assert "Allowed: sp_size=1 or 2 or 4 or 8 (what" in said
    assert f"Remedy: {remedy}" in said
    check_nodes(SPPOConfig(sp_size=sp_size, pp_size=pp_size, sp_across_nodes=True))


@pytest.mark.parametrize(("rank", "local_rank"), [(1, 0), (5, 0)])
def test_ranks_numbered_across_machines_are_refused(
    rank: int, local_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every other rank is on this machine; or one before it has an odd number of them.
    launched(monkeypatch, rank, local_rank, 8)
    with pytest.raises(ConfigError, match="Remedy: number the ranks machine after machine"):
        check_nodes(SPPOConfig(sp_size=4))


@pytest.mark.parametrize(
    ("sp_size", "rank", "here"), [(1, 9, 8), (4, 9, 8), (8, 15, 8), (3, 2, 3), (6, 5, 6)]
)
def test_sequences_within_a_machine_are_not(
    sp_size: int, rank: int, here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, rank, rank % here, here)
    check_nodes(SPPOConfig(sp_size=sp_size))
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    check_nodes(SPPOConfig(sp_size=16))


def test_one_process_without_a_launch_is_told_how_to_start() -> None:
    with pytest.raises(ConfigError, match=r"pp_size=2, but 1 process was .*--num_processes 2"):
        shared_mesh(SPPOConfig(pp_size=2), torch.device("cpu"))
    both = r"pp_size x sp_size=6, but 1 process was .*--num_processes 6"
    with pytest.raises(ConfigError, match=both):
        shared_mesh(SPPOConfig(pp_size=2, sp_size=3), torch.device("cpu"))


def test_ranks_of_a_pipeline_are_neighbours() -> None:
    mesh = PipelineMesh(pp_size=3, dp_size=2, pp_rank=1, dp_rank=1, device=torch.device("cpu"))
    assert [mesh.world_rank(rank) for rank in range(3)] == [3, 4, 5]
    assert not mesh.is_first


def test_ranks_that_share_a_sequence_are_neighbours() -> None:
    place = {"pp_rank": 0, "dp_rank": 1, "sp_rank": 1}
    sizes = {"pp_size": 2, "dp_size": 2, "sp_size": 3}
    mesh = PipelineMesh(**sizes, **place, device=torch.device("cpu"))
    assert (mesh.rank, list(mesh.sharing_ranks)) == (7, [6, 7, 8, 9, 10, 11])
    assert [mesh.world_rank(rank) for rank in range(2)] == [7, 10]


def test_messages_may_wait_for_a_step_that_takes_longer_than_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, float] = {}

    def note(timeout: timedelta, group: str) -> None:
        given[group] = timeout.total_seconds()

    # The name since PyTorch 2.15 where there is one, else the former.
    where: Any = dist
    name = "set_timeout"
    if not hasattr(dist, name):
        where, name = dist.distributed_c10d, "_set_pg_timeout"
    monkeypatch.setattr(where, name, note)
    groups = {"pp_group": "p", "control_group": "c", "storage_group": "s"}
    cpu = torch.device("cpu")
    mesh = PipelineMesh(
        pp_size=2, dp_size=1, pp_rank=0, dp_rank=0, device=cpu, links={(0, 1): "l"}, **groups
    )
    step = SimpleNamespace(step_seconds=100.0)
    plans = [SimpleNamespace(prediction=prediction) for prediction in (step, step, None)]

    def allow(engine: Any, stages: int, micro_batches: int) -> None:
        by_stage: Any = dict(enumerate(plans[:stages]))
        shape = BatchShape(1, 1, True, cpu, (), micro_batches=micro_batches)
        choice = PipelineChoice(schedule="gpipe", bounds=((0, 1),), reason="set by the user")
        batch = BatchPlans(shape, choice, torch.float32, by_stage)
        PipelineEngine._allow_step(engine, batch)

    engine = SimpleNamespace(mesh=mesh, _allowed_seconds=615.0)
    allow(engine, 1, 1)
    assert not given, "two ranks that each need 100 seconds are done within the setting"
    allow(engine, 3, 2)
    assert given == dict.fromkeys(("p", "c", "l"), 2 * 2 * 2 * 200.0)
    allow(engine, 1, 2)
    assert given["p"] == 1600, "a limit that was allowed is not taken back"
    allow(SimpleNamespace(mesh=mesh, _allowed_seconds=615.0), 2, 1)
    assert given["p"] == 1600, "nor by another model, of the same groups"
    replace(mesh, links={}).allow_seconds(700)
    assert given["p"] == 1600, "nor when more groups are formed"


def test_a_link_has_few_multiprocessors_and_streams_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, timeout = torch.device("cuda", 0), timedelta(seconds=90)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert link_options(gpu, timeout) is None

    class Options:
        """NCCL's, as far as they are set; a build for CPUs has none."""

        def __init__(self) -> None:
            self.config = SimpleNamespace(max_ctas=-(2**31))
            self._timeout = timedelta(minutes=10)
            self.is_high_priority_stream = False

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    options = link_options(gpu, timeout)
    assert options.config.max_ctas == 4
    assert options._timeout == timeout, "torch warns of two that differ"
    assert options.is_high_priority_stream, "apart from the streams of other groups and of copies"
    assert link_options(gpu, timeout) is not options, "each group writes into its own"
    assert link_options(torch.device("cpu"), timeout) is None


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_every_group_names_its_backend(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The launch's may be one for each type of device, of which a group would get both."""
    made: list[dict[str, Any]] = []
    given: list[float] = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: made.append(options))
    monkeypatch.setattr(mesh_module, "link_options", lambda *_: None)
    monkeypatch.setattr(mesh_module, "_try_groups", lambda _: None)
    device, timeout = torch.device(kind), timedelta(seconds=9)
    mesh_module._make_other_groups((1, 3, 1), (0, 0, 0), device, timeout)
    fast = "nccl" if kind == "cuda" else "gloo"
    assert [one.get("backend") for one in made] == ["gloo", *[fast] * 7], "files, ends and links"
    made.clear()
    mesh = SimpleNamespace(device=device, pp_size=4, dp_size=1, pp_rank=0, dp_rank=0, links={})
    mesh.allow_seconds = given.append
    monkeypatch.setattr(mesh_module, "replace", lambda mesh, **_: mesh)
    mesh_module.with_unit_groups(mesh, timeout_seconds=9)
    assert len(made) > 4
    assert {one.get("backend") for one in made} == {fast}
    assert given == [9], "they wait as long as the others, which may wait longer already"


@pytest.mark.process
def test_groups_are_formed_in_a_launch_that_is_bound_to_a_device(tmp_path: Path) -> None:
    """Each of them has been used in all ways, so that NCCL connects nobody within a schedule."""
    ended = fork_server().launch("tests.pipeline.mesh_ranks", {}, ranks=4, folder=tmp_path)
    assert ended.codes == [0] * 4, "\n".join(ended.logs)


def rounds(size: int, links: list[tuple[int, int]], key: Any) -> int:
    """Return how long links are set up, one at a time on each rank, in units of one link's time."""
    free = [0] * size
    for source, target in sorted(links, key=key):
        free[source] = free[target] = max(free[source], free[target]) + 1
    return max(free)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 12, 16])
def test_many_links_are_set_up_at_the_same_time(size: int) -> None:
    def key(link: tuple[int, int]) -> tuple[int, ...]:
        return link_round(*link, size)

    every = [(a, b) for a in range(size) for b in range(size) if a != b]
    near = sorted({pair for rank in range(size) for pair in mesh_module._neighbours(rank, size)})
    assert len({key(link) for link in every}) == len(every), "the order is the same on all ranks"
    assert rounds(size, every, key) <= 2.5 * (size - 1) + (size == 3)
    assert rounds(size, near, key) <= 6
    assert size < 16 or rounds(size, every, None) > 180


@pytest.mark.parametrize(
    ("given", "warned"), [("1", True), (None, True), ("8", True), ("32", False)]
)
def test_few_hardware_queues_are_warned_of(
    given: str | None,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"):
        monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    with caplog.at_level(logging.WARNING):
        mesh_module._check_launches()
    expected = f"CUDA_DEVICE_MAX_CONNECTIONS is {given or 8}, "
    assert any(text.startswith(expected) for text in caplog.messages) == warned


def test_blocking_launches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match="Remedy: unset CUDA_LAUNCH_BLOCKING"):
        mesh_module.make_mesh(2, torch.device("cuda", 0), timeout_seconds=9)
