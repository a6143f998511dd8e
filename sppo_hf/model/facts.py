"""Facts about this machine and this model, gathered with torch for the torch-free planner."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil
import torch

from sppo_hf.config import SPPOConfig, parse_bytes
from sppo_hf.model.structure import ModelParts
from sppo_hf.offload.engine import OffloadEngine, make_engine
from sppo_hf.planning.plan import DeviceFacts
from sppo_hf.planning.shape import ModelShape

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def device_facts(device: torch.device) -> DeviceFacts:
    """Name and memory of `device` and of the host."""
    host_bytes = host_memory_bytes()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return DeviceFacts(
            kind="cuda",
            name=properties.name,
            device_memory_bytes=properties.total_memory,
            host_memory_bytes=host_bytes,
        )
    return DeviceFacts(
        kind=device.type,
        name=platform.processor() or platform.machine(),
        device_memory_bytes=host_bytes,
        host_memory_bytes=host_bytes,
    )


def host_memory_bytes() -> int:
    """Host memory this process may use: the machine's, or its control group's limit if lower."""
    total = psutil.virtual_memory().total
    for path in _CGROUP_LIMITS:
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def model_shape(parts: ModelParts) -> ModelShape:
    """The model's shape, with the parameters that are really there and really trained."""
    parameters = list(parts.causal_lm.parameters())
    trained = [p for p in parameters if p.requires_grad]
    return ModelShape.from_config(
        parts.causal_lm.config,
        dtype_bytes=_compute_bytes(parts),
        total_parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in trained),
        weight_bytes=sum(p.numel() * p.element_size() for p in parameters),
        gradient_bytes=sum(p.numel() * p.element_size() for p in trained),
    )


def new_offload_engine(config: SPPOConfig, device: torch.device) -> OffloadEngine:
    """The offload engine for `device` under the settings of `config`."""
    budget = None
    if config.host_memory is not None:
        budget = parse_bytes(
            config.host_memory, field="host_memory", total_bytes=host_memory_bytes()
        )
    return make_engine(
        device,
        use_streams=config.use_streams,
        use_pin_memory=config.use_pin_memory,
        budget_bytes=budget,
        min_offload_elements=config.min_offload_size,
    )


def _compute_bytes(parts: ModelParts) -> int:
    device = next(parts.causal_lm.parameters()).device
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type).itemsize
    dtype = parts.causal_lm.dtype
    return dtype.itemsize if dtype.is_floating_point else 2
