"""A rank that throws, hangs, leaves or refuses ends all that share its batches, with its reason.

Ranks that are killed or stopped, in every phase of training: tests/attacks/ranks.py.
"""

import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.fork_server import Ended, fork_server, short_path
from tests.sweeps import sample

pytestmark = [pytest.mark.process, pytest.mark.slow]

TIMEOUT_SECONDS = 6


MODULE = "tests.pipeline.failing_ranks"


def job_of(how: str, rank: int, **sizes: Any) -> dict[str, Any]:
    # What was refused is run, and the rank fails in a later batch; others fail in their second.
    sizes = {"forwards": 2 if how in ("throw", "leave", "hang") else 3, **sizes}
    return {"pp_size": 1, "rank": rank, "how": how, "timeout": TIMEOUT_SECONDS, **sizes}


def run(how: str, rank: int, folder: Path, *, ranks: int, **sizes: int) -> Ended:
    ended = fork_server().launch(MODULE, job_of(how, rank, **sizes), ranks=ranks, folder=folder)
    assert_all_ended(ended, rank)
    return ended


def assert_all_ended(ended: Ended, rank: int) -> None:
    assert all(code not in (None, 0) for r, code in enumerate(ended.codes) if r != rank), ended


def test_a_socket_is_found_in_a_folder_with_a_long_name(tmp_path):
    folder = tmp_path / ("long" * 50)
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as channel:
        with short_path(folder) as short:
            listener.bind(f"{short}/here")
        listener.listen()
        assert (folder / "here").is_socket()
        with short_path(folder) as short:
            channel.connect(f"{short}/here")


def test_a_rank_that_throws_ends_all_with_its_error_step_and_action(tmp_path):
    ended = run("throw", 1, tmp_path, pp_size=3, ranks=3, finalized=1)
    assert ended.seconds < TIMEOUT_SECONDS
    for rank, log in enumerate(ended.logs):
        assert "rank 1 failed in forward pass 2, action " in log
        assert "(1B1: backward of stage 1, micro-batch 0, chunk 1): ValueError: sabotage" in log
        assert ("RankLostError" in log) == (rank != 1)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_of_two_replicas_that_leaves_without_a_word_is_lost(tmp_path, rank):
    ended = run("leave", rank, tmp_path, pp_size=2, ranks=4)
    assert ended.seconds < TIMEOUT_SECONDS
    for log in ended.logs[:rank] + ended.logs[rank + 1 :]:
        assert f"RankLostError: lost rank {rank}, last seen " in log
        assert all(f"lost rank {r}" not in log for r in range(4) if r != rank)
        assert not re.search(r"rank \d failed", log)


def test_a_rank_that_hangs_ends_all_within_the_timeout(tmp_path):
    """In a pipeline, in a unit that ranks share, and where ranks share a sequence."""
    # It still shows signs of life, so its neighbours' messages are what times out. All three at a
    # time, since most of it is waiting.
    jobs = [
        job_of("hang", 1, pp_size=3),
        job_of("hang", 1, pp_size=2, shared=1, unit=3, forwards=3),
        job_of("hang", 1, sp_size=2),
    ]
    found = fork_server().launch_all(MODULE, jobs, ranks=[3, 2, 2], folder=tmp_path)
    for ended in found:
        assert_all_ended(ended, 1)
        assert ended.seconds < TIMEOUT_SECONDS + 20
    pipeline, unit, sequence = (ended.logs for ended in found)
    assert "sppo_hf: rank 1 ends because" in pipeline[1]
    for log in pipeline:
        assert "no rank has reported an error" in log
        assert "rank 1 is in forward pass 2, action" in log or log is pipeline[1]
    assert "no rank has reported an error" in unit[0]
    assert "rank 1 is in forward pass 2, action" in unit[0]
    assert "no rank has reported an error" in sequence[0]
    assert "rank 1 is in backward pass 2" in sequence[0]


def test_a_rank_that_leaves_a_shared_unit_is_lost(tmp_path):
    # In the backward of the first row's last chunk, whose tokens both ranks share.
    ended = run("leave", 1, tmp_path, pp_size=2, ranks=2, shared=1, unit=3)
    assert ended.seconds < TIMEOUT_SECONDS
    assert "RankLostError: lost rank 1, last seen " in ended.logs[0]
    assert "(1B3#0: backward of stage 1, micro-batch 0, chunk 3)" in ended.logs[0]


def test_ranks_that_disagree_say_so(tmp_path):
    ended = run("config", 1, tmp_path, pp_size=3, ranks=3)
    assert all("about to run different steps" in log for log in ended.logs)


@pytest.mark.parametrize("rank", sample([3, 0], 2))
def test_what_one_rank_refuses_all_do_and_it_leaves_no_trace(tmp_path, rank):
    ended = run("refuse", rank, tmp_path, pp_size=2, ranks=4)
    assert ended.codes.count(1) + ended.codes.count(-signal.SIGTERM) == 4
    for log in ended.logs:
        assert f"rank {rank} failed in forward pass 4, action " in log
        assert "ValueError: sabotage" in log
        assert "no room" not in log


def test_nobody_waits_for_the_plan_of_a_rank_that_makes_none(tmp_path):
    """Ranks that share units need each other's plans, and all need what the first one chose.

    Where ranks share sequences, too, they plan a stage together; and of each stage all hear how
    long it takes.
    """
    on_embeddings = ("dropout", 0)
    where = [
        # The last when all have the others' plans.
        ({"shared": 1}, [("make_plan", 0), ("device_facts", 1), ("on_plan", 1)]),
        ({"hardware": "h100"}, [("choose_pipeline", 0), on_embeddings, ("stage_seconds", 1)]),
        ({"sp_size": 2}, [("device_facts", 1)]),
    ]
    jobs = [job_of("refuse", 1, pp_size=2, raises=raises, **sizes) for sizes, raises in where]
    found = fork_server().launch_all(MODULE, jobs, ranks=[2, 2, 4], folder=tmp_path)
    for ended, (_, raises) in zip(found, where, strict=True):
        for log in ended.logs:
            # In the first or second that runs behind, by the chunks that the rank has a part in.
            behind = len(raises) + 2
            assert re.search(rf"rank 1 failed in forward pass [{behind}{behind + 1}], action ", log)
            assert "ValueError: sabotage" in log
            assert "no room" not in log


def test_ranks_that_train_different_parameters_say_so_and_go_on(tmp_path):
    """They would sum different gradients: of a sequence, both ends of tied weights, replicas."""
    where = [
        ({"sp_size": 2, "frozen": ["layers.0.mlp.up_proj.weight"]}, 4),
        ({"family": "llama-bias-tied", "frozen": ["embed_tokens.weight"]}, 2),
        ({"pp_size": 1, "sp_size": 2, "frozen": ["embed_tokens.weight"]}, 2),
        ({"frozen": ["layers.1.mlp.up_proj.weight", "layers.1.mlp.down_proj.weight"]}, 4),
    ]
    jobs = [job_of("freeze", 1, **{"pp_size": 2, **sizes}) for sizes, _ in where]
    ranks = [count for _, count in where]
    found = fork_server().launch_all(MODULE, jobs, ranks=ranks, folder=tmp_path)
    for ended in found:
        for log in ended.logs:
            assert "ValueError: sabotage" in log
            assert "unfreeze" not in log


def test_ranks_that_share_a_sequence_go_on_where_one_of_them_cannot_plan_anew(tmp_path):
    """It refused the batch, while the others ran it and waited."""
    ended = run("correct", 1, tmp_path, sp_size=2, ranks=2)
    for log in ended.logs:
        assert "ValueError: sabotage" in log
        assert "no such device" not in log


def test_a_rank_that_throws_ends_all_that_share_its_sequence(tmp_path):
    ended = run("throw", 1, tmp_path, sp_size=2, ranks=2)
    assert ended.seconds < TIMEOUT_SECONDS
    words = "RankLostError: rank 1 failed in backward pass 2: ValueError: sabotage"
    assert words in ended.logs[0]
    assert "ValueError: sabotage" in ended.logs[1]


def test_a_rank_that_shares_a_sequence_and_leaves_is_lost(tmp_path):
    ended = run("leave", 1, tmp_path, sp_size=2, ranks=4)
    # The other replica, which needs nobody here, is told by its watchdog.
    assert ended.seconds < 2 * TIMEOUT_SECONDS
    # Last heard of a moment before, by whichever rank was the first to notice.
    assert "RankLostError: lost rank 1, last seen " in ended.logs[0]


def test_ranks_that_share_a_sequence_and_disagree_say_so(tmp_path):
    ended = run("config", 1, tmp_path, sp_size=2, ranks=2)
    assert all("about to run different steps" in log for log in ended.logs)
