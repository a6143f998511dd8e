"""A hardware profile for tests: round figures, every field set."""

import dataclasses
from typing import Any

from sppo_hf.planning.hardware import Curve, HardwareProfile

PROFILE = HardwareProfile(
    name="Test Device 80GB",
    kind="cuda",
    estimated=False,
    source="a test",
    matmul_flops={"bfloat16": Curve(((256, 1e14), (4096, 3e14)))},
    attention_forward_flops={"bfloat16": Curve(((256, 5e13),))},
    attention_backward_flops={"bfloat16": Curve(((256, 4e13),))},
    memory_bytes_per_second=2e12,
    launch_seconds=1e-3,
    d2h_bytes_per_second=25e9,
    h2d_bytes_per_second=26e9,
    both_d2h_bytes_per_second=20e9,
    both_h2d_bytes_per_second=21e9,
    disk_write_bytes_per_second=3e9,
    disk_read_bytes_per_second=5.5e9,
    device_bytes=80 * 2**30,
    host_bytes=256 * 2**30,
    pinned_bytes=None,
    disk_bytes=10**12,
    offload_dir="/scratch",
    numa_node=1,
    versions={"torch": "2.13.0", "cuda": "13.0"},
)


def changed(**changes: Any) -> HardwareProfile:
    """`PROFILE` with other fields."""
    return dataclasses.replace(PROFILE, **changes)
