"""A rank that shares batches is killed in the middle of training: all end, and it goes on later."""

import contextlib
import inspect
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

from sppo_hf.pipeline.checkpoint_files import find_damage
from tests.integrations.launch import run_job
from tests.integrations.training import FSDP2, needs_fsdp2
from tests.pipeline.fork_server import Ended, fork_server
from tests.sweeps import ALL

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]

TIMEOUT_SECONDS = 15
COMMON = {"num_chunks": 3, "pp_timeout_seconds": TIMEOUT_SECONDS}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "stages": (2, {"pp_size": 2}, {}),
    "stages that share units": (2, {"pp_size": 2, "pp_msp": "on"}, {}),
    "a shared sequence": (2, {"sp_size": 2}, {}),
    "a shared sequence of a sharded model": (2, {"sp_size": 2}, FSDP2),
    "stages that share sequences": (4, {"pp_size": 2, "sp_size": 2}, {}),
}
"""Ranks, settings and the Trainer's arguments."""
# The learning rate must not depend on where training is to end.
ARGUMENTS = {"lr_scheduler_type": "constant", "eval_strategy": "no"}


def _kill_last_rank_in_training(job: dict[str, Any], folder: Path, ranks: int) -> Ended:
    """Train without end on some ranks, and kill the last when the second step is saved."""
    folder.mkdir()
    endless = {"max_steps": 100_000, "save_strategy": "steps", "save_steps": 2}
    job = {**job, "arguments": {**job["arguments"], **endless}, "slow_save": True}
    job |= {"rank": ranks - 1, "out": str(folder / "never.json")}

    def kill_later(numbers: list[int]) -> None:
        saved, deadline = folder / "checkpoint-2", time.monotonic() + 90
        while time.monotonic() < deadline:
            if (saved / "trainer_state.json").exists() and find_damage(saved) is None:
                break
            time.sleep(0.02)
        (folder / "reached").touch()
        with contextlib.suppress(ProcessLookupError):  # what it ended by is in its log
            os.kill(numbers[-1], signal.SIGKILL)

    module = "tests.integrations.two_ranks"
    return fork_server().launch(module, job, ranks=ranks, folder=folder, started=kill_later)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[needs_fsdp2] * (FSDP2 in layout))
        for name, layout in LAYOUTS.items()
        # Of two stages; test_failures.py has a rank leave a shared unit.
        if ALL or name != "stages that share units"
    ],
)
def test_a_killed_rank_ends_all_and_the_last_checkpoint_continues_the_curve(tmp_path, layout):
    ranks, sizes, sharding = LAYOUTS[layout]
    loading = inspect.getsource(Trainer._load_optimizer_and_scheduler)
    if layout == "a shared sequence" and "self.args.device if self.args.world_size > 1" in loading:
        pytest.skip("this Transformers loads optimizers of several ranks onto GPUs alone")
    job = {"kind": "ddp", "rows": 2, "arguments": {**ARGUMENTS, **sharding}}
    job["settings"] = {**COMMON, **sizes}
    ended = _kill_last_rank_in_training(job, tmp_path / "run", ranks)
    assert ended.codes[-1] == -signal.SIGKILL
    assert ended.seconds < TIMEOUT_SECONDS
    for rank, log in enumerate(ended.logs[:-1]):
        assert ended.codes[rank] not in (None, 0), log[-2000:]
        assert f"lost rank {ranks - 1}, last seen " in log
        assert "its process ended without an error" in log
        assert not any(f"lost rank {other}" in log for other in range(ranks - 1))
        assert "rank 0 failed" not in log

    last = max(
        int(path.name.partition("-")[2])
        for path in (tmp_path / "run").glob("checkpoint-*")
        if find_damage(path) is None
    )
    job["arguments"] |= {"max_steps": last + 3}
    resumed = run_job({**job, "resume": True}, ranks, tmp_path / "run")
    plain = {"kind": "ddp", "rows": 2, "arguments": {**ARGUMENTS, "max_steps": last + 3}}
    plain = run_job(plain, 1, tmp_path / "plain")
    for name in ("loss", "grad_norm"):
        ours, theirs = (
            {entry["step"]: entry[name] for entry in seen["history"] if name in entry}
            for seen in (resumed, plain)
        )
        assert set(ours) == set(theirs) == set(range(1, last + 4))
        assert ours == pytest.approx(theirs, abs=1e-4)
