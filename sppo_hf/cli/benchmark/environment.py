"""Where a row was measured: device, memory, versions and date."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import sppo_hf
from sppo_hf.planning.machine import host_memory_bytes, nvidia_driver_version, processor_name

_PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "liger-kernel", "flash-attn")
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS")


def describe(device: torch.device) -> dict[str, Any]:
    """Returns what a reader must know to judge a number, in plain JSON types."""
    versions = {"python": platform.python_version(), "sppo-hf": sppo_hf.__version__}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    found: dict[str, Any] = {
        "device_name": processor_name(),
        "device_memory_bytes": None,
        "host_memory_bytes": host_memory_bytes(),
        "host_threads": torch.get_num_threads(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device_name": properties.name,
            "device_memory_bytes": properties.total_memory,
            "processor": processor_name(),
        }
        versions |= {"cuda": torch.version.cuda or "unknown", "driver": nvidia_driver_version()}
    return {**found, "versions": versions}
