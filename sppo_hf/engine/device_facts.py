"""Facts about this machine and this model, gathered with torch for the torch-free planner.

Also settings of the machine before the first plan: CUDA's allocator, and processor affinity.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.layer_kernels import builds_with_liger, saves_like_kernels
from sppo_hf.engine.model_parts import ModelParts
from sppo_hf.engine.trace_profile import trace_model
from sppo_hf.errors import SPPOError, UnsupportedModelError, first_line
from sppo_hf.offload.host_memory import locked_bytes
from sppo_hf.planning.choices import DeviceFacts
from sppo_hf.planning.hardware import HardwareProfile, load_profile, profile_for
from sppo_hf.planning.machine import (
    EXPANDABLE_SEGMENTS,
    free_host_memory_bytes,
    has_expandable_segments,
    host_memory_bytes,
    host_reserve_bytes,
    local_processes,
    node_cpus,
    nvidia_driver_version,
    pci_numa_node,
    processor_name,
    request_expandable_segments,
    withdraw_expandable_segments,
)
from sppo_hf.planning.model_profile import (
    LoraShape,
    ModelProfile,
    Training,
    config_digest,
    find_profile,
)
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.tiers import DEVICE, HOST, TIERS, Tier, allowed_behind_host

logger = logging.getLogger(__name__)

_FRESH_CONTEXT_BYTES = 600 * 2**20
"""Size of a CUDA context before any kernel's code is loaded."""


def use_expandable_segments(device: torch.device) -> None:
    """Let PyTorch's CUDA allocator use expandable segments, which do not fragment.

    Settings of the allocator in the environment are respected. Called before the first plan, when
    only weights are allocated.
    """
    if device.type != "cuda" or not request_expandable_segments(os.environ):
        return
    set_allocator: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    try:
        # PyTorch has read the environment already; child processes will read it.
        set_allocator(EXPANDABLE_SEGMENTS)
    except (TypeError, ValueError, RuntimeError) as error:
        withdraw_expandable_segments(os.environ)
        logger.info("PyTorch's allocator keeps its segments as they are: %s", error)


def as_current_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a CUDA device the current one, for whatever has no tensor to tell it the device.

    Kernels of Triton and CuTe run on the current device, wherever their tensors are; events,
    streams and checks of attention backends are made for it.
    """
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def reserve_driver_memory(device: torch.device, num_bytes: int) -> None:
    """Keep `num_bytes` of a CUDA device out of PyTorch's cache.

    The driver needs them for kernel code, cuBLAS workspaces and cuDNN plans, and cannot reclaim
    memory that the cache holds. A lower limit that the script has set is left as it is.
    """
    if device.type != "cuda":
        return
    index = _cuda_index(device)
    fraction = 1 - num_bytes / torch.cuda.mem_get_info(index)[1]
    if fraction < _script_fraction(device):
        torch.cuda.set_per_process_memory_fraction(fraction, index)
        _own_fractions[index] = torch.cuda.get_per_process_memory_fraction(index)


_own_fractions: dict[int, float] = {}
"""Share of each CUDA device's memory to which `reserve_driver_memory` has limited the cache, as
PyTorch gives it back."""


def _script_fraction(device: torch.device) -> float:
    """Share of a CUDA device's memory to which the script has limited PyTorch; 1 without a limit.

    With `set_per_process_memory_fraction`, as where several processes share the device.
    """
    index = _cuda_index(device)
    fraction = torch.cuda.get_per_process_memory_fraction(index)
    return 1.0 if fraction == _own_fractions.get(index) else fraction


def _cuda_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def device_facts(
    device: torch.device,
    config: SPPOConfig,
    *,
    counted_bytes: int = 0,
    own_bytes: Mapping[Tier, int] = MappingProxyType({}),
) -> DeviceFacts:
    """Name, memory and speed of `device` and the host, as far as this process may use them.

    `counted_bytes` is pageable host memory in use that plans count, so it is added to the free
    memory; it is negative for page-locked memory that they do not count. `own_bytes` are the
    bytes that this process has taken of each tier behind the host, which are available to it.

    Raises:
        ConfigError: `config.hardware` names no profile, or `config.offload_dir` cannot be used.
    """
    processes = local_processes(os.environ)
    host_bytes = host_memory_bytes() // processes
    if device.type == "cuda":
        # Pinned memory of this process is available to it; others have about as much.
        pinned_bytes = int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
        pinned_bytes += locked_bytes()
        free_bytes = free_host_memory_bytes() - host_reserve_bytes(host_memory_bytes())
        free_bytes = free_bytes // processes + pinned_bytes + counted_bytes
        host_bytes = min(host_bytes, max(0, free_bytes))
        name = torch.cuda.get_device_properties(device).name
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        reserved_bytes = torch.cuda.memory_reserved(device) + _FRESH_CONTEXT_BYTES
        device_bytes = min(total_bytes, free_bytes + reserved_bytes)
        if config.device_memory is None:
            device_bytes = min(device_bytes, int(_script_fraction(device) * total_bytes))
    else:
        name, device_bytes = processor_name(), host_bytes
    behind_host_bytes = {
        tier: TIERS[tier].measure(config, processes=processes, own_bytes=own_bytes.get(tier, 0))
        for tier in allowed_behind_host(config, device.type)
    }
    return DeviceFacts(
        kind=device.type,
        name=name,
        memory_bytes={DEVICE: device_bytes, HOST: host_bytes, **behind_host_bytes},
        expandable_segments=has_expandable_segments(os.environ),
        profile=_profile(device, name, config),
    )


def _profile(device: torch.device, name: str, config: SPPOConfig) -> HardwareProfile | None:
    """Speeds of the device; None for a CPU that was not calibrated.

    CPUs differ too much for generic speeds to be useful, unless `device_memory` makes the planner
    choose between modes.
    """
    if config.hardware is not None:
        return load_profile(config.hardware)
    profile = profile_for(name, device.type, device_versions(device))
    if device.type == "cpu" and profile.estimated and config.device_memory is None:
        return None
    return profile


def device_versions(device: torch.device) -> dict[str, str]:
    """Versions of libraries, and CPU threads, on which measured speeds of `device` depend.

    A hardware profile is reused only if all of these are equal; see `profile_for`.
    """
    versions = {"torch": torch.__version__}
    if device.type == "cuda":
        toolkit = torch.version.cuda or getattr(torch.version, "hip", None)
        return {
            **versions,
            "cuda": toolkit or "unknown",
            "cudnn": str(torch.backends.cudnn.version()),
            "driver": nvidia_driver_version(),
        }
    return {**versions, "threads": str(torch.get_num_threads())}


def device_numa_node(device: torch.device) -> int | None:
    """NUMA node of a CUDA device; None if unknown and for other devices."""
    if device.type != "cuda":
        return None
    # By bus address, because device numbers change with CUDA_VISIBLE_DEVICES.
    properties: Any = torch.cuda.get_device_properties(device)
    # Some builds of PyTorch do not have these properties.
    domain, bus, slot = (
        getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")
    )
    if domain is None or bus is None or slot is None:
        return None
    return pci_numa_node(f"{domain:04x}:{bus:02x}:{slot:02x}.0")


def model_shape(parts: ModelParts, device: torch.device | None = None) -> ModelShape:
    """The model's shape, with the parameters that exist on this rank and train now.

    `device` is where the model computes, whose autocast dtype counts; None for where its weights
    are. LoRA is recognised by its adapters; if their ranks differ, the largest counts.
    """
    parameters = list(parts.causal_lm.parameters())
    trained = [p for p in parameters if p.requires_grad]
    shape = ModelShape.from_profile(
        model_profile(parts, device),
        total_parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in trained),
        weight_bytes=sum(p.nbytes for p in parameters),
        gradient_bytes=sum(p.nbytes for p in trained),
    )
    head_width = parts.head_width() if parts.is_classifier else None
    shape = replace(shape, cpu_threads=torch.get_num_threads(), head_width=head_width)
    # Sharded parameters tell of the elements of all ranks.
    return shape.with_shards(
        parts.num_shards(),
        whole_bytes=parts.whole_bytes(),
        gathered_elements=parts.gathered_elements(),
    )


def whole_shape(parts: ModelParts) -> ModelShape:
    """The shape of the whole model that `parts` may be a stage of, by its configuration."""
    return ModelShape.from_profile(model_profile(parts))


def model_profile(parts: ModelParts, device: torch.device | None = None) -> ModelProfile:
    """Costs of the model's layers as it is trained now; traced once for each configuration.

    With kernels in the layers once they have got them, which is before the first plan of a step.
    """
    device = device or next(parts.causal_lm.parameters()).device
    dtype, own_dtype = _compute_dtype(parts, device), parts.causal_lm.dtype
    if parts.is_sharded():
        own_dtype = dtype  # weights are gathered in the dtype of compute
    training = Training(
        dtype_bytes=dtype.itemsize,
        parameter_bytes=(own_dtype if own_dtype.is_floating_point else dtype).itemsize,
        lora=_find_lora(parts, device),
        layer_kernels=saves_like_kernels(parts),
    )
    own_class = parts.model_class
    config = parts.causal_lm.config
    patched = builds_with_liger(own_class)
    key = (own_class, config_digest(config), training, patched)
    if key not in _profiles:
        make = partial(_trace, parts)
        # Profiles of custom code are not stored, since it may change under the same settings; nor
        # are those of code that Liger has replaced, which saves less under the same name, and of
        # classifiers, which have another head under the same settings.
        stock = own_class.__module__.startswith("transformers.") and not patched
        stock = stock and not parts.is_classifier
        _profiles[key] = find_profile(config, training, make) if stock else make(config, training)
    return _profiles[key]


_profiles: dict[tuple[type, str, Training, bool], ModelProfile] = {}


def _trace(parts: ModelParts, config: Any, training: Training) -> ModelProfile:
    try:
        return trace_model(config, training, parts.model_class._from_config)
    except SPPOError:
        raise
    except Exception as error:  # kernels raise errors of their own
        raise UnsupportedModelError(
            f"{parts.name}: what its layers cost is traced without a GPU, and "
            f"{_failed_module(error)} failed there ({first_line(error)}). Allowed: modules that "
            "run torch code on CPU tensors. Remedy: put back the model's own module, or its torch "
            "code where tensors are on the CPU; with TrainingArguments(use_liger_kernel=True), "
            "set it to False: layer_kernels='auto' uses Liger's kernels as well."
        ) from error


def _failed_module(error: Exception) -> str:
    """Class of the innermost module that ran when the error was raised."""
    found, step = "the model", error.__traceback__
    while step is not None:
        owner = step.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            found = f"{type(owner).__module__}.{type(owner).__qualname__}"
        step = step.tb_next
    return found


def _find_lora(parts: ModelParts, device: torch.device) -> LoraShape | None:
    """Find trained LoRA adapters of the decoder layers, by PEFT's attributes."""
    targets: set[str] = set()
    gathered = parts.gathered_dtype()
    rank = dtype_bytes = 0
    dropout = 0.0
    for layer in parts.layers:
        for name, module in layer.named_modules():
            adapters = getattr(module, "lora_A", None)
            if not isinstance(adapters, nn.ModuleDict) or not hasattr(module, "lora_B"):
                continue
            for adapter, linear in adapters.items():
                weight: Any = linear.weight
                if not weight.requires_grad:
                    continue
                targets.add(name.rpartition(".")[2])
                rank = max(rank, weight.shape[0])
                dtype_bytes = max(dtype_bytes, (gathered or weight.dtype).itemsize)
                dropout = max(dropout, _dropout_rate(module, adapter))
    if not targets:
        return None
    return LoraShape(
        rank=rank,
        targets=tuple(sorted(targets)),
        dtype_bytes=dtype_bytes,
        # What is gathered in the dtype of compute is not cast.
        autocast=gathered is None and _is_autocast(parts, device),
        dropout=dropout,
    )


def _dropout_rate(module: nn.Module, adapter: str) -> float:
    layers: Any = getattr(module, "lora_dropout", {})
    return float(getattr(layers[adapter], "p", 0.0)) if adapter in layers else 0.0


def dtype_name(parts: ModelParts, device: torch.device | None = None) -> str:
    """Name of the compute dtype, such as "bfloat16"; `device` as in `model_shape`."""
    device = device or next(parts.causal_lm.parameters()).device
    return str(_compute_dtype(parts, device)).removeprefix("torch.")


def _compute_dtype(parts: ModelParts, device: torch.device) -> torch.dtype:
    dtype = parts.causal_lm.dtype
    if _is_autocast(parts, device):
        dtype = torch.get_autocast_dtype(device.type)
    dtype = parts.gathered_dtype() or dtype
    return dtype if dtype.is_floating_point else torch.bfloat16


def _is_autocast(parts: ModelParts, device: torch.device) -> bool:
    """Whether autocast casts a model's products; it leaves float64 as it is."""
    if device.type == "meta" or parts.causal_lm.dtype == torch.float64:
        return False  # autocast does not support the meta device
    return torch.is_autocast_enabled(device.type)


_THREADS = Path("/proc/self/task")


def bind_to_device(device: torch.device) -> frozenset[int] | None:
    """Restrict all threads of this process to the processors of the device's NUMA node.

    A page is allocated on the NUMA node of the processor that first touches it, and a copy across
    sockets is slower by a third or more, so processes are bound before they pin memory.
    Accelerate's `set_numa_affinity` does the same through NVML, but needs a package that may be
    absent, ignores CUDA_VISIBLE_DEVICES, and widens an affinity that a launcher or batch system has
    set. This function finds the node by the device's bus address and only narrows the affinity;
    after Accelerate's it changes nothing. Not covered: memory that other nodes' threads touch.

    Returns:
        The processors that were allowed before, for `set_thread_affinity`. None if nothing was
        changed: the node is unknown, or all of the allowed processors are on it, or none is.
    """
    node = device_numa_node(device)
    if node is None or not hasattr(os, "sched_setaffinity"):
        return None
    allowed = frozenset(os.sched_getaffinity(0))
    near = allowed & node_cpus(node)
    if not near or near == allowed:
        return None
    set_thread_affinity(near)
    return allowed


def set_thread_affinity(processors: frozenset[int]) -> None:
    """Restrict all threads of this process, and those they will start, to `processors`."""
    for entry in list(_THREADS.iterdir()):
        # A thread may end between the listing and the call.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(entry.name), processors)


@contextlib.contextmanager
def bound_to_device(device: torch.device) -> Iterator[None]:
    """Context in which this process is bound to the device's node; see `bind_to_device`."""
    before = bind_to_device(device)
    try:
        yield
    finally:
        if before is not None:
            set_thread_affinity(before)
