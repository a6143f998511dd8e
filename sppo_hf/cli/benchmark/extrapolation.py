"""What a model would take that does not fit: from one layer and two, or from shorter lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sppo_hf.cli.benchmark.job import Job
from sppo_hf.cli.benchmark.results import Numbers, Row
from sppo_hf.planning.flops import peak_flops

PARTS = (1, 2)
"""Layers of the models that are measured instead."""

SHORTEST_TOKENS = 4096
"""Lengths below say little of long ones: their kernels are not full."""


def uniform_layers(fields: dict[str, Any]) -> bool:
    """Whether all decoder layers cost the same, by the `layer_types` of a `config.json`."""
    return len(set(fields.get("layer_types") or ())) <= 1


def extrapolate(one: Row, two: Row, *, num_layers: int, model_flops: float) -> Row:
    """Extrapolates to the whole model: what two layers add to one, a layer takes.

    Embedding, head, loss and what a step costs whatever the model are in the first figure once.

    Args:
        one: measured, with one layer.
        two: measured, with two.
        num_layers: layers of the whole model.
        model_flops: FLOPs of its step.

    Returns:
        A row with status "extrapolated"; its peaks are what it would need, more than the device
        has. With several steps measured, it is the medians that are extrapolated.
    """

    def whole(of: Callable[[Numbers], float | None]) -> float | None:
        first, second = of(one.numbers), of(two.numbers)
        if first is None or second is None:
            return None
        return first + (num_layers - 1) * (second - first)

    def whole_bytes(of: Callable[[Numbers], int | None]) -> int | None:
        size = whole(of)
        return None if size is None else round(size)

    seconds = whole(lambda n: n.median_step_seconds)
    assert seconds is not None, "parts that were measured have seconds"
    if seconds <= 0:
        return Row(
            status="failed",
            job=one.job.replace(layers=None),
            reason=f"two layers were not slower than one ({one.numbers.median_step_seconds} s), so "
            "nothing can be extrapolated; measure more steps",
            environment=two.environment,
        )
    reason = f"extrapolated to {num_layers} layers from 1 and 2"
    return _extrapolated(
        two, one.job.replace(layers=None), reason, seconds, model_flops, whole_bytes
    )


def extrapolate_length(shorter: Row, longer: Row, *, total_tokens: int, model_flops: float) -> Row:
    """Extrapolates a model to a length at which not even two of its layers fit.

    Seconds are b S + c S^2 of the length S, for a layer's linear part and its causal attention;
    bytes are linear in S. Both lengths must lie where kernels are full.

    Args:
        shorter: the model at one length, measured or extrapolated from layers.
        longer: the same at a greater length.
        total_tokens: the length asked for, in tokens.
        model_flops: FLOPs of a step at that length.

    Returns:
        A row with status "extrapolated"; "failed" where the two do not fit such a curve.
    """
    first, second = shorter.job.total_tokens, longer.job.total_tokens
    times = shorter.numbers.median_step_seconds, longer.numbers.median_step_seconds
    assert times[0] is not None, "rows that trained have seconds"
    assert times[1] is not None, "rows that trained have seconds"
    job = longer.job.replace(total_tokens=total_tokens, layers=None)
    per_token = times[0] / first, times[1] / second
    square = (per_token[1] - per_token[0]) / (second - first)
    linear = per_token[0] - square * first
    if square < 0 or linear < 0:
        return Row(
            status="failed",
            job=job,
            reason=f"{times[0]:.3g} s at {first:,} and {times[1]:.3g} s at {second:,} tokens are on"
            " no curve b S + c S^2, so nothing can be extrapolated; measure more steps",
            environment=longer.environment,
        )
    seconds = linear * total_tokens + square * total_tokens**2

    def whole_bytes(of: Callable[[Numbers], int | None]) -> int | None:
        low, high = of(shorter.numbers), of(longer.numbers)
        if low is None or high is None:
            return None
        return round(low + (high - low) / (second - first) * (total_tokens - first))

    reason = f"extrapolated to {total_tokens:,} tokens from {first:,} and {second:,}"
    return _extrapolated(longer, job, reason, seconds, model_flops, whole_bytes)


def _extrapolated(
    largest: Row,
    job: Job,
    reason: str,
    seconds: float,
    model_flops: float,
    whole_bytes: Callable[[Callable[[Numbers], int | None]], int | None],
) -> Row:
    """The row of a job that was not run.

    Args:
        largest: the largest row that was: it has the kernel and the environment.
        job: what was asked for.
        reason: from what it was extrapolated.
        seconds: of a step.
        model_flops: FLOPs of a step.
        whole_bytes: extrapolates a number of bytes that rows have.
    """
    peak = peak_flops(str(largest.environment.get("device_name", "")))
    return Row(
        status="extrapolated",
        job=job,
        reason=reason,
        numbers=Numbers(
            median_step_seconds=seconds,
            tokens_per_second=job.total_tokens / seconds,
            model_flops=model_flops,
            model_tflops=model_flops / seconds / 1e12,
            mfu=None if peak is None else model_flops / seconds / peak,
            device_allocated_bytes=whole_bytes(lambda n: n.device_allocated_bytes),
            host_peak_bytes=whole_bytes(lambda n: n.host_peak_bytes),
            kernel=largest.numbers.kernel,
        ),
        environment=largest.environment,
    )
