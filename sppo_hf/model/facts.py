"""Facts about this machine and this model, gathered with torch for the torch-free planner."""

from __future__ import annotations

from typing import Any

import torch

from sppo_hf.config import SPPOConfig, parse_bytes
from sppo_hf.model.structure import ModelParts
from sppo_hf.offload.engine import OffloadEngine, make_engine
from sppo_hf.planning.machine import (
    host_memory_bytes,
    nvidia_driver_version,
    pci_numa_node,
    processor_name,
)
from sppo_hf.planning.plan import DeviceFacts
from sppo_hf.planning.shape import ModelShape


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
        name=processor_name(),
        device_memory_bytes=host_bytes,
        host_memory_bytes=host_bytes,
    )


def device_versions(device: torch.device) -> dict[str, str]:
    """What a measured speed of `device` hangs on besides the device: versions, and threads.

    A hardware profile is reused only where all of it agrees; see `profile_for`.
    """
    versions = {"torch": torch.__version__}
    if device.type == "cuda":
        toolkit = torch.version.cuda or getattr(torch.version, "hip", None)
        return {**versions, "cuda": toolkit or "unknown", "driver": nvidia_driver_version()}
    return {**versions, "threads": str(torch.get_num_threads())}


def device_numa_node(device: torch.device) -> int | None:
    """NUMA node that a CUDA device hangs on; None for others, and where it is not known."""
    if device.type != "cuda":
        return None
    # By the bus, because the numbers of devices change with CUDA_VISIBLE_DEVICES.
    properties: Any = torch.cuda.get_device_properties(device)
    domain, bus = properties.pci_domain_id, properties.pci_bus_id
    return pci_numa_node(f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0")


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
