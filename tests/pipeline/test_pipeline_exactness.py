"""Pipelines over gloo ranks are exact: losses, every gradient by name, the norm of all.

Invariant 1 of the design. All cases of one size run in one launch, since starting ranks costs more
than running them; a case's reference is the unmodified model in rank 0's process, in float64.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.launch import run_ranks
from tests.pipeline.pipeline_cases import (
    FAST,
    Case,
    all_cases,
    every_family,
    fast_cases,
    merge_cases,
)
from tests.sweeps import ALL

pytestmark = pytest.mark.process

TOLERANCE = 1e-9


def launch(cases: list[Case], folder: Path, *, ranks: int, **job: Any) -> dict[str, Any]:
    """Run cases in `sequence_ranks` (`pipeline_ranks`, given `pp_size`); all must be exact."""
    out = folder / "result.json"
    module = "pipeline_ranks" if "pp_size" in job else "sequence_ranks"
    job |= {"cases": cases, "out": str(out)}
    run_ranks(f"tests.pipeline.{module}", job, ranks, folder, timeout_seconds=400)
    result: dict[str, Any] = json.loads(out.read_text())
    assert_exact(result["cases"], cases)
    return result


def assert_exact(found: list[dict[str, Any]], cases: list[Case]) -> None:
    assert [one["name"] for one in found] == [case["name"] for case in cases]
    wrong = [
        one
        for one, case in zip(found, cases, strict=True)
        if max(one["loss_error"], one["gradient_error"], one["norm_error"]) > TOLERANCE
        or one["wrong_names"]
        or one["hooks_miscounted"]
        # Kernels that plan each shape would have met all before the steps.
        or one["unplanned"]
        # The first stage has the embedding and the last one the head.
        or one["held_twice"] != (one["tied"] if one["stages"] > 1 else [])
    ]
    assert not wrong, "\n".join(map(str, wrong))
    for one, case in zip(found, cases, strict=True):
        # That nothing is compared with nothing: gradients are there unless none were asked for.
        backward = [
            s.get("backward", True) and not s.get("evaluate") for s in case.get("steps", [{}])
        ]
        assert (one["gradients"] > 5) == any(backward), one
        trained = not case.get("lora") and not case.get("frozen")
        if trained and case["family"] in ("llama-bias-tied", "gemma2", "gpt2"):
            assert one["tied"], one


def assert_order(result: dict[str, Any]) -> None:
    """Engine and profiler see what the schedule lists, in its order."""
    for rank in result["order"]:
        assert rank["executed"] == rank["listed"]
        assert rank.get("profiled", rank["listed"]) == rank["listed"]
        assert len(rank["listed"]) >= 5 * 2 * 2


def assert_places(result: dict[str, Any], *, pp_size: int, replicas: int) -> None:
    """Ranks of one pipeline are neighbours, each direction has a group of its own, no rank has."""
    for rank, seen in enumerate(result["places"]):
        replica, stage = divmod(rank, pp_size)
        first = replica * pp_size
        mine = list(range(first, first + pp_size))
        assert (seen["pp_rank"], seen["dp_rank"], seen["dp_size"]) == (stage, replica, replicas)
        assert seen["is_first"] == (stage == 0)
        assert seen["pipeline"] == seen["control"] == seen["world_ranks"] == mine
        same = list(range(stage, pp_size * replicas, pp_size))
        assert seen["replicas"] == (same if replicas > 1 else None)
        at_end = stage in (0, pp_size - 1)
        assert seen["ends"] == ([mine[0], mine[-1]] if at_end else None)
        neighbours = {
            f"{a}>{b}": sorted((mine[a], mine[b]))
            for a in range(pp_size)
            for b in ((a + 1) % pp_size, (a - 1) % pp_size)
            if stage in (a, b)
        }
        assert seen["links"] == neighbours
        assert seen["distinct_links"] == len(neighbours)
        assert seen["smallest"] > 1


def assert_all(cases: list[Case], folder: Path, *, pp_size: int, replicas: int) -> None:
    # The profiler takes a second to read what it has seen.
    job = {"pp_size": pp_size, "profiled": (pp_size, replicas) == (2, 1)}
    result = launch(merge_cases(cases), folder, ranks=pp_size * replicas, **job)
    assert_order(result)
    assert all("profiled" in rank for rank in result["order"]) == job["profiled"]
    for said in result["changed"]:
        assert "pipeline's loss" in said, said
        assert "was changed in place between forward and backward" in said, said
    assert set(result["written"]) == {"nothing"}, result["written"]
    assert_places(result, pp_size=pp_size, replicas=replicas)


@pytest.mark.parametrize(("pp_size", "replicas"), [(2, 1), (2, 2)])
def test_a_cross_through_all_is_exact(pp_size: int, replicas: int, tmp_path: Path) -> None:
    assert_all(fast_cases(pp_size, replicas), tmp_path, pp_size=pp_size, replicas=replicas)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("pp_size", "replicas"), [(2, 1), (3, 1), (4, 1), (2, 2)])
def test_all_are_exact(pp_size: int, replicas: int, tmp_path: Path) -> None:
    if (pp_size, replicas) not in FAST:
        assert_all(all_cases(pp_size, replicas), tmp_path, pp_size=pp_size, replicas=replicas)
        return
    # The others have run in the cross.
    fast = fast_cases(pp_size, replicas)
    cases = [case for case in all_cases(pp_size, replicas) if case not in fast]
    launch(merge_cases(cases), tmp_path, ranks=pp_size * replicas, pp_size=pp_size, sp_size=1)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_every_family_is_exact(tmp_path: Path) -> None:
    cases = every_family()
    assert len(cases) > (60 if ALL else 8)
    launch(cases, tmp_path, ranks=2, pp_size=2, sp_size=1)
