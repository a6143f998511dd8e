"""The arithmetic of the numbers in the log."""

from dataclasses import fields
from typing import Any

import pytest

from sppo_hf.engine.step_observer import StepRecord
from sppo_hf.integrations.callback import StepMeter, summary
from sppo_hf.offload.engine import OffloadStats

_OFFLOAD = {field.name for field in fields(OffloadStats)}
TRANSIENT_CAUSES = {
    "stall_seconds": 0.5,
    "d2h_bytes": 10,
    "h2d_bytes": 20,
    "pinned_bytes": 7,
    "fragmentation": 0.25,
}


def _record(**changes: Any) -> StepRecord:
    offload = {name: changes.pop(name) for name in _OFFLOAD & changes.keys()}
    values = {
        "tokens": 100,
        "batch_rows": 1,
        "total_tokens": 100,
        "model_flops": 3e12,
        "forward_seconds": 1.0,
        "backward_seconds": 2.0,
        "planned_seconds": None,
        "num_chunks": 4,
        "training": True,
        "offload": OffloadStats(**TRANSIENT_CAUSES | offload),
    }
    return StepRecord(**{**values, **changes})


def _meter() -> StepMeter:
    meter = StepMeter()
    meter.listening = True
    return meter


def test_two_steps_of_two_records_each():
    meter = _meter()
    for _ in range(2):
        meter.on_record(_record())
        meter.on_record(_record(pinned_bytes=9))
        meter.add_step(5.0)
    numbers = meter.drain(world_tokens=800, peak_flops_per_second=12e12)
    # 4 records of 100 tokens and 3 TFLOP in 10 seconds; half of what two equal ranks did together.
    assert numbers == pytest.approx(
        {
            "sppo/tokens_per_second": 80.0,
            "sppo/tokens_per_second_per_device": 40.0,
            "sppo/tflops_per_device": 1.2,
            "sppo/mfu": 0.1,
            "sppo/stall_seconds": 1.0,
            "sppo/d2h_bytes": 20,
            "sppo/h2d_bytes": 40,
            "sppo/pinned_bytes": 9,
            "sppo/host_fragmentation": 0.25,
            "sppo/step_seconds": 5.0,
        }
    )


def test_planned_seconds_lie_beside_those_of_the_step():
    meter = _meter()
    for _ in range(2):
        meter.on_record(_record(planned_seconds=1.5))
        meter.on_record(_record(planned_seconds=2.0))
        meter.add_step(4.0)
    numbers = meter.drain(world_tokens=None, peak_flops_per_second=None)
    assert numbers["sppo/planned_seconds"] == pytest.approx(3.5)
    assert numbers["sppo/step_seconds"] == pytest.approx(4.0)
    meter.on_record(_record(planned_seconds=1.5))
    meter.on_record(_record())
    meter.add_step(4.0)
    numbers = meter.drain(world_tokens=None, peak_flops_per_second=None)
    assert "sppo/planned_seconds" not in numbers, "half of a step is no prediction of it"


def test_the_disk_is_logged_where_it_is_used():
    meter = _meter()
    meter.on_record(_record(disk_write_bytes=30, disk_read_bytes=20, spilled_bytes=10))
    meter.add_step(1.0)
    meter.add_step(1.0)
    numbers = meter.drain(world_tokens=None, peak_flops_per_second=None)
    assert numbers["sppo/disk_write_bytes"] == 15
    assert numbers["sppo/disk_read_bytes"] == 10
    assert numbers["sppo/spilled_bytes"] == 5


def test_a_drain_starts_anew():
    meter = _meter()
    meter.on_record(_record())
    meter.add_step(1.0)
    assert meter.drain(world_tokens=100, peak_flops_per_second=None)
    assert meter.drain(world_tokens=100, peak_flops_per_second=None) == {}


def test_unknown_numbers_are_left_out():
    meter = _meter()
    meter.on_record(_record())
    meter.add_step(1.0)
    numbers = meter.drain(world_tokens=None, peak_flops_per_second=None)
    assert "sppo/mfu" not in numbers
    assert "sppo/tokens_per_second" not in numbers
    assert numbers["sppo/tokens_per_second_per_device"] == 100.0


def test_evaluation_and_other_trainers_are_not_counted():
    meter = _meter()
    meter.on_record(_record(training=False))
    meter.listening = False
    meter.on_record(_record())
    assert meter.tokens == 0


GIB = 2**30
NUMBERS = {
    "sppo/tokens_per_second": 1912.4,
    "sppo/tokens_per_second_per_device": 956.2,
    "sppo/tflops_per_device": 1.2,
    "sppo/stall_seconds": 0.31,
    "sppo/d2h_bytes": 1.2 * GIB,
    "sppo/h2d_bytes": 1.2 * GIB,
    "sppo/pinned_bytes": GIB,
    "sppo/step_seconds": 5.0,
    "sppo/host_rss_bytes": 9 * GIB,
    "sppo/device_peak_bytes": 3.1 * GIB,
}


def test_a_summary_is_one_short_line():
    expected = "1,912 tokens/s, peak 3.10 GiB of 8.00 GiB, offloaded 1.20 GiB, stalled 0.3 s"
    assert summary(NUMBERS, device_bytes=8 * GIB) == expected
    with_disk = {**NUMBERS, "sppo/mfu": 0.41, "sppo/disk_write_bytes": 700 * GIB}
    assert summary(with_disk, device_bytes=8 * GIB) == (
        "1,912 tokens/s, MFU 41%, peak 3.10 GiB of 8.00 GiB, offloaded 1.20 GiB, to disk 700 GiB"
    ), "the rear is cut off at 100 characters"


def test_zeros_are_left_out_of_a_summary():
    quiet = {
        **NUMBERS,
        "sppo/stall_seconds": 0.04,
        "sppo/d2h_bytes": 0,
        "sppo/disk_write_bytes": 0,
        "sppo/mfu": 0.0,
    }
    del quiet["sppo/device_peak_bytes"], quiet["sppo/tokens_per_second"]
    assert summary(quiet) == "956 tokens/s, host 9.00 GiB"
    assert summary({}) == ""
