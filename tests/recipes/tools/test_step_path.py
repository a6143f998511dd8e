"""The files of one step: those that run it, and none of those that plan."""

from __future__ import annotations

from recipes.tools.step_path import trace_step


def test_a_steady_step_runs_and_does_not_plan() -> None:
    entered = trace_step(order="by_chunk", offload="none")
    files = {file for file, _ in entered}
    assert {"engine/chunk_runner.py", "attention/chunk_attention.py", "engine/loss.py"} <= files
    assert not {"planning/feasibility.py", "planning/solve.py", "engine/trace_profile.py"} & files
    # Attention runs forward once in each layer and chunk.
    layers = entered["engine/chunk_runner.py", "ChunkRunner.before_layer"]
    assert entered["attention/chunk_attention.py", "_attend"] == layers > 0
