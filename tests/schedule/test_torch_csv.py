"""CSV of torch.distributed.pipelining: torch's own loader, validator and simulator take ours."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sppo_hf.errors import ScheduleError
from sppo_hf.schedule.generate import GENERATORS, Size, generate
from sppo_hf.schedule.lower import add_reductions, add_transfers, lower
from sppo_hf.schedule.schedule import Schedule
from sppo_hf.schedule.torch_csv import TorchFormat, from_torch_csv, to_torch_csv
from sppo_hf.schedule.validate import validate
from tests.schedule.sizes import FEW


def torch_waits() -> bool:
    """Whether the installed torch wants sends and reductions to be waited for."""
    from torch.distributed.pipelining import schedules

    return hasattr(schedules, "WAIT_REDUCE_GRAD")


def is_send(action: str) -> bool:
    return "SEND" in action and "WAIT" not in action


def load_with_torch(schedule: Schedule, format: TorchFormat, path: Path) -> Any:
    """Let torch read a schedule as it reads its own, without processes."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    path.write_text(to_torch_csv(schedule, format, waits=torch_waits()))
    # Real stages take a process group; these are what making a schedule and loading look at.
    stage = SimpleNamespace(
        num_stages=schedule.num_stages,
        group_size=schedule.num_ranks,
        group_rank=0,
        stage_index=0,
        is_first=True,
        is_last=False,
        has_backward=True,
    )
    stages: Any = [stage]
    torchs = _PipelineScheduleRuntime(stages, schedule.num_units)
    torchs._stages = []
    torchs._load_csv(path, format=format)
    return torchs


@pytest.mark.fake
@pytest.mark.parametrize("name", GENERATORS)
def test_torch_validates_and_lowers_exported_compute(name: str, tmp_path: Path) -> None:
    for found, size in FEW[::4]:
        if found != name:
            continue
        schedule = generate(name, size)
        torchs = load_with_torch(schedule, "compute_only", tmp_path / "schedule.csv")
        read = [[str(a) for a in torchs.pipeline_order[rank]] for rank in range(size.num_ranks)]
        assert read == schedule.texts()
        # Torch has put its own sends in.
        sends = [str(a) for rank in torchs.pipeline_order_with_comms.values() for a in rank]
        ours = [str(a) for rank in add_transfers(schedule).ranks for a in rank]
        assert sum(map(is_send, sends)) == sum(map(is_send, ours))


@pytest.mark.fake
@pytest.mark.parametrize("name", GENERATORS)
def test_torch_runs_exported_sends_and_receives_without_deadlock(name: str, tmp_path: Path) -> None:
    for found, size in FEW[::4]:
        if found == name:
            # Torch's simulator waits at each receive, which ours only starts.
            schedule = add_transfers(generate(name, size), receives_ahead=0)
            path = tmp_path / "schedule.csv"
            torchs = load_with_torch(schedule, "compute_comms", path)
            assert torchs._simulate()
            # Torch's simulator knows no reductions, its loader does.
            reduced = add_reductions(schedule)
            load_with_torch(reduced, "compute_comms", path)
            assert from_torch_csv(path.read_text(), num_chunks=schedule.num_chunks) == reduced


@pytest.mark.fake
def test_torchs_own_schedules_can_be_read() -> None:
    from torch.distributed.pipelining.schedules import (
        _add_reduce_grad,
        _add_send_recv,
        _add_unshard_reshard,
        _get_1f1b_rank_ops,
    )

    # Torch's interleaved 1F1B: 2 ranks with 2 stages each, 4 micro-batches in rounds of 2.
    def order_of(rank: int) -> list[Any]:
        warm_up = 2 * (2 - rank)
        return _get_1f1b_rank_ops(
            2,
            2,
            warm_up,
            8 - warm_up,
            warm_up,
            rank,
            lambda step: step // 2 % 2 * 2 + rank,
            lambda step: (1 - (step - warm_up) // 2 % 2) * 2 + rank,
        )

    orders = {rank: order_of(rank) for rank in range(2)}
    compute = {rank: [a for a in order if a is not None] for rank, order in orders.items()}
    lowered = _add_send_recv(
        {r: _add_reduce_grad(_add_unshard_reshard(order), 4) for r, order in compute.items()},
        lambda stage: stage % 2,
        4,
    )
    for order in (orders, compute, lowered):
        rows = (",".join("" if a is None else str(a) for a in order[rank]) for rank in range(2))
        schedule = from_torch_csv("\n".join(rows) + "\n")
        assert (schedule.num_stages, schedule.num_units) == (4, 4)
        kept = schedule.keep(lambda action: action.kind in ("F", "B"))
        assert kept.texts() == [[str(a) for a in compute[rank]] for rank in range(2)]
    reductions = [a for rank in schedule.ranks for a in rank if a.kind == "REDUCE_GRAD"]
    assert sorted(map(str, reductions)) == [f"{stage}REDUCE_GRAD3" for stage in range(4)]


@pytest.mark.parametrize("name", GENERATORS)
def test_what_is_written_reads_back(name: str) -> None:
    schedule = generate(name, Size(2, 2, 2, 2 if "interleaved" in name else 1))
    assert from_torch_csv(to_torch_csv(schedule), num_chunks=2) == schedule
    sent = add_transfers(add_reductions(schedule))
    assert from_torch_csv(to_torch_csv(sent, "compute_comms"), num_chunks=2) == sent
    assert from_torch_csv(to_torch_csv(sent), num_chunks=2) == schedule
    validate(from_torch_csv(to_torch_csv(sent, "compute_comms"), num_chunks=2))


def test_the_csv_of_a_small_schedule() -> None:
    schedule = lower(generate("1f1b", Size(2, 1)), offloaded=lambda stage, unit: True, reduce=True)
    assert to_torch_csv(schedule) == "0F0,0B0\n1F0,1B0\n"
    assert to_torch_csv(schedule, "compute_comms") == (
        "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD\n"
    )


def test_newer_torch_is_told_where_sends_and_reductions_end() -> None:
    schedule = lower(generate("1f1b", Size(2, 1)), offloaded=lambda stage, unit: False, reduce=True)
    written = to_torch_csv(schedule, "compute_comms", waits=True)
    assert written == (
        "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0WAIT_SEND_F0\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1WAIT_SEND_B0\n"
    )
    without = to_torch_csv(schedule, "compute_comms")
    assert from_torch_csv(written) == from_torch_csv(without)
    assert to_torch_csv(schedule, waits=True) == to_torch_csv(schedule)


def test_what_torch_has_no_word_for_is_refused() -> None:
    with pytest.raises(ScheduleError, match="no sends, and 'compute_comms' is a format with them"):
        to_torch_csv(generate("1f1b", Size(2, 2)), "compute_comms")
    # One rank sends nothing.
    assert to_torch_csv(generate("1f1b", Size(1, 1)), "compute_comms") == "0F0,0B0\n"
    layered = Schedule.parse("chunks 1\nstep  rank 0\n0     0F0.3\n")
    with pytest.raises(ScheduleError, match=r"0F0\.3 is one layer's"):
        to_torch_csv(layered)
    with pytest.raises(ScheduleError, match=r"Rank 1, step 2 of the CSV: '\(1F0;2B1\)OVERLAP_F_B'"):
        from_torch_csv("0F0\n1F0,1F1,(1F0;2B1)OVERLAP_F_B\n")
