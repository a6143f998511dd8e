"""Rows that were never measured: what tables, pictures and files are tested with."""

from __future__ import annotations

from typing import Any

from sppo_hf.cli.benchmark.results import Job, Numbers, Row

ENVIRONMENT: dict[str, Any] = {
    "device_name": "Pretended GPU",
    "device_memory_bytes": 80 * 2**30,
    "host_memory_bytes": 256 * 2**30,
    "date": "2026-01-02T03:04:05+00:00",
    "versions": {"torch": "0.0"},
    "command": "sppo bench pretended",
}
JOB = Job(
    model="llama-3.1-8b",
    contender="plain",
    total_tokens=8192,
    device="cuda",
    lora_rank=16,
)


def speed_row(contender: str, total_tokens: int, seconds: float, **numbers: Any) -> Row:
    """A measured row."""
    speed = Numbers(
        step_seconds=(seconds,),
        median_step_seconds=seconds,
        tokens_per_second=total_tokens / seconds,
        model_tflops=321.0,
        mfu=0.325,
    )
    return Row(
        status=numbers.pop("status", "measured"),
        kind=numbers.pop("kind", "speed"),
        reason=numbers.pop("reason", ""),
        job=JOB.replace(contender=contender, total_tokens=total_tokens, **numbers.pop("job", {})),
        numbers=Numbers.from_dict({**{n: getattr(speed, n) for n in speed.__slots__}, **numbers}),
        environment=ENVIRONMENT,
        wall_seconds=12.0,
    )


def ended_row(contender: str, total_tokens: int, status: Any, reason: str) -> Row:
    """A row that was not measured."""
    return Row(
        status=status,
        job=JOB.replace(contender=contender, total_tokens=total_tokens),
        reason=reason,
        environment=ENVIRONMENT,
    )


def many_rows() -> list[Row]:
    """Five contenders at four lengths, with every way a row can end."""
    gib = 2**30
    rows = []
    for index, tokens in enumerate((8192, 32_768, 65_536, 131_072)):
        linear, square = tokens / 9000, tokens**2 / 6e9
        if index == 0:
            size = 60 * gib
            seconds = linear + square
            rows.append(speed_row("plain", tokens, seconds, device_allocated_bytes=size))
        else:
            rows.append(ended_row("plain", tokens, "out of memory", "device: CUDA out of memory"))
        checkpointing = 1.25 * linear + 1.3 * square
        size = 17 * gib + tokens * 280_000
        if index < 3:
            numbers = {"device_allocated_bytes": size, "device_reserved_bytes": size + gib}
            rows.append(speed_row("checkpointing", tokens, checkpointing, **numbers))
        else:
            reason = "killed by SIGKILL, which is usually the host running out of memory"
            rows.append(ended_row("checkpointing", tokens, "killed", reason))
        reason = "liger-kernel is not installed"
        rows.append(ended_row("checkpointing+liger", tokens, "not available", reason))
        ours = {"device_allocated_bytes": 17 * gib + tokens * 90_000, "pinned_bytes": tokens * 9999}
        seconds = 1.05 * linear + 1.02 * square
        rows.append(speed_row("sppo-auto", tokens, seconds, stall_seconds=0.01, **ours))
        status = "measured" if index == 0 else "extrapolated"
        size = 16 * gib + tokens * 5_000_000
        seconds = linear + square
        bound = speed_row("ideal", tokens, seconds, status=status, device_allocated_bytes=size)
        rows.append(bound)
    return rows
