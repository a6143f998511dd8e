"""Which worlds are allowed; the groups themselves are checked over gloo ranks.

See `assert_places` in test_pipeline_exactness.py for those.
"""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

from sppo_hf.errors import ConfigError
from sppo_hf.runtime.mesh import PipelineMesh, check_world, link_options
from sppo_hf.runtime.pipeline import shared_mesh


@pytest.mark.parametrize(("pp_size", "world"), [(1, 1), (2, 2), (2, 8), (4, 4), (3, 9)])
def test_multiples_are_allowed(pp_size: int, world: int) -> None:
    check_world(pp_size, world)


@pytest.mark.parametrize(
    ("pp_size", "world", "remedy"), [(2, 1, 2), (2, 3, 2), (4, 6, 4), (3, 8, 6), (8, 4, 8)]
)
def test_others_are_refused_with_the_nearest_number(pp_size: int, world: int, remedy: int) -> None:
    was = "process was" if world == 1 else "processes were"
    with pytest.raises(ConfigError) as caught:
        check_world(pp_size, world)
    said = str(caught.value)
    assert f"pp_size={pp_size}, but {world} {was} started" in said
    assert f"--num_processes {remedy}," in said


def test_one_process_without_a_launch_is_told_how_to_start() -> None:
    with pytest.raises(ConfigError, match=r"pp_size=2 needs 2 processes.*--num_processes 2"):
        shared_mesh(2, torch.device("cpu"), 600)


def test_ranks_of_a_pipeline_are_neighbours() -> None:
    names = ("pipeline", "control", "storage", "replicas", "replicas_control", "ends")
    groups = dict.fromkeys(names)
    cpu = torch.device("cpu")
    mesh = PipelineMesh(pp_size=3, dp_size=2, pp_rank=1, dp_rank=1, device=cpu, links={}, **groups)
    assert [mesh.world_rank(rank) for rank in range(3)] == [3, 4, 5]
    assert not mesh.is_first


def test_a_link_may_occupy_few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, timeout = torch.device("cuda", 0), timedelta(seconds=90)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert link_options(gpu, timeout) is None

    class Options:
        """NCCL's, as far as they are set; a build for CPUs has none."""

        def __init__(self) -> None:
            self.config = SimpleNamespace(max_ctas=-(2**31))
            self._timeout = timedelta(minutes=10)

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    options = link_options(gpu, timeout)
    assert options.config.max_ctas == 4
    assert options._timeout == timeout, "torch warns of two that differ"
    assert link_options(gpu, timeout) is not options, "each group writes into its own"
    assert link_options(torch.device("cpu"), timeout) is None
