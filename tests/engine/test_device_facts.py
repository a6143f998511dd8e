"""Facts about the machine and the model for the planner, and binding of processes to a device."""

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sppo_hf.config import SPPOConfig
from sppo_hf.engine import device_facts
from sppo_hf.engine.device_facts import model_shape
from sppo_hf.engine.model_parts import ModelParts, find_parts, suppress_peft_warnings
from sppo_hf.engine.trace_profile import trace_config
from sppo_hf.offload import disk
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.feasibility import request_for
from sppo_hf.planning.hardware import load_profile
from sppo_hf.planning.machine import has_expandable_segments
from sppo_hf.planning.model_profile import LoraShape
from sppo_hf.testing.tiny_models import add_lora, build_tiny_model, make_batch

pytestmark = pytest.mark.fake

CPU, GPU = torch.device("cpu"), torch.device("cuda", 3)


def test_a_processor_has_a_name_and_the_hosts_memory() -> None:
    found = device_facts.device_facts(CPU, SPPOConfig())
    assert found.kind == "cpu"
    assert found.name
    whole = device_facts.host_memory_bytes()
    assert found.memory_bytes == {"device": whole, "host": whole}


def test_versions_of_a_processor_count_its_threads() -> None:
    threads = torch.get_num_threads()
    assert device_facts.device_versions(CPU) == {
        "torch": torch.__version__,
        "threads": str(threads),
    }


def test_versions_of_cuda_name_toolkit_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(device_facts, "nvidia_driver_version", lambda: "580.95.05")
    assert device_facts.device_versions(GPU) == {
        "torch": torch.__version__,
        "cuda": "13.0",
        "cudnn": "91900",
        "driver": "580.95.05",
    }


def test_the_numa_node_is_asked_for_by_bus_address(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def node(address: str) -> int:
        asked.append(address)
        return 1

    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(device_facts, "pci_numa_node", node)
    assert device_facts.device_numa_node(GPU) == 1
    assert asked == ["0000:1b:00.0"]
    assert device_facts.device_numa_node(CPU) is None
    assert len(asked) == 1


def test_a_gpu_becomes_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(device))
    with device_facts.as_current_device(GPU) as entered:
        assert entered == GPU
    with device_facts.as_current_device(CPU) as entered:
        assert entered is None


def _gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A GPU in a machine of 128 GiB; returns what is pinned."""
    gib = 2**30
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="a GPU")
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
    pinned = {"allocated_bytes.current": 0}
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: pinned)
    # Of other tests, whose cycles have not been collected.
    monkeypatch.setattr(device_facts, "locked_bytes", lambda: 0)
    monkeypatch.setattr(device_facts, "host_memory_bytes", lambda: 128 * gib)
    monkeypatch.setattr(device_facts, "_profile", lambda *_: None)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return pinned


def test_a_gpu_may_use_the_host_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    pinned = _gpu(monkeypatch)

    def found(free_gib: int) -> float:
        monkeypatch.setattr(device_facts, "free_host_memory_bytes", lambda: free_gib * gib)
        size = device_facts.device_facts(GPU, SPPOConfig()).memory_bytes["host"]
        assert size is not None
        return size / gib

    assert found(120) == 120 - 16, "an eighth of the machine's is left alone"
    pinned["allocated_bytes.current"] = 64 * gib
    assert found(56) == 120 - 16, "what is pinned already is ours"
    pinned["allocated_bytes.current"] = 0
    with monkeypatch.context() as ours:
        ours.setattr(device_facts, "locked_bytes", lambda: 64 * gib)
        assert found(56) == 120 - 16, "by PyTorch or by slabs"
    assert found(10) == 0
    with monkeypatch.context() as by_srun:
        by_srun.setenv("SLURM_STEP_TASKS_PER_NODE", "4(x2)")
        assert found(116) == 25
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert found(116) == 25
    pinned["allocated_bytes.current"] = 25 * gib
    assert found(16) == 25, "the others have as much"


def test_host_resident_bytes_are_not_counted_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gib = 2**30
    _gpu(monkeypatch)
    monkeypatch.setattr(device_facts, "free_host_memory_bytes", lambda: 56 * gib)
    rests = device_facts.device_facts(GPU, SPPOConfig(), counted_bytes=30 * gib)
    assert rests.memory_bytes["host"] == (56 - 16 + 30) * gib


def test_processes_share_the_disk_and_what_a_plan_has_reserved_is_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(disk, "free_disk_bytes", lambda folder: 1000)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    config = SPPOConfig(offload_dir=str(tmp_path / "disk"))

    def found(own_bytes: int = 0) -> int | None:
        facts = device_facts.device_facts(CPU, config, own_bytes={"disk": own_bytes})
        return facts.memory_bytes["disk"]

    assert found() == 1000
    assert found(own_bytes=300) == 1300
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert found(own_bytes=300) == 550
    assert "disk" not in device_facts.device_facts(CPU, SPPOConfig()).memory_bytes


@pytest.mark.parametrize(
    "refusal", [None, RuntimeError("not on this platform"), ValueError("Unrecognized key")], ids=str
)
def test_the_allocator_is_asked_for_expandable_segments(
    monkeypatch: pytest.MonkeyPatch, refusal: Exception | None
) -> None:
    told: list[str] = []

    def tell(setting: str) -> None:
        told.append(setting)
        if refusal is not None:
            raise refusal

    environment: dict[str, str] = {}
    monkeypatch.setattr(device_facts.os, "environ", environment)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", tell)
    device_facts.use_expandable_segments(CPU)
    assert environment == {}
    device_facts.use_expandable_segments(GPU)
    assert told == ["expandable_segments:True"]
    assert has_expandable_segments(environment) is (refusal is None)


def test_allocator_settings_in_the_environment_are_respected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    monkeypatch.setattr(device_facts.os, "environ", environment)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", None)
    device_facts.use_expandable_segments(GPU)
    assert environment == {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}


class _Allocator:
    """How much of GPUs PyTorch may take; like PyTorch it keeps whole bytes and no fraction."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.allowed: dict[int, int] = {}
        monkeypatch.setattr(device_facts, "_own_fractions", {})
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", self.get)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.set)

    def get(self, index: int) -> float:
        return self.allowed.get(index, self.total_bytes) / self.total_bytes

    def set(self, fraction: float, index: int) -> None:
        self.allowed[index] = int(fraction * self.total_bytes)


def test_pytorchs_cache_leaves_memory_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    total_bytes = 80 * gib + 12345
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * gib, total_bytes))
    allocator = _Allocator(monkeypatch, total_bytes)
    device_facts.reserve_driver_memory(torch.device("cpu"), 2 * gib)
    assert not allocator.allowed
    for device, index in ((GPU, 3), (torch.device("cuda"), 0)):
        for reserved in (2 * gib, 3 * gib, 2 * gib):
            device_facts.reserve_driver_memory(device, reserved)
            assert abs(total_bytes - allocator.allowed[index] - reserved) <= 1


def test_a_share_of_the_device_that_the_script_has_set_is_kept_and_planned_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process may have the rest; a budget that is set is the user's word."""
    gib = 2**30
    _gpu(monkeypatch)
    monkeypatch.setattr(device_facts, "free_host_memory_bytes", lambda: 120 * gib)
    allocator = _Allocator(monkeypatch, 80 * gib)

    def found(**settings: Any) -> int | None:
        return device_facts.device_facts(GPU, SPPOConfig(**settings)).memory_bytes["device"]

    everything = found()
    device_facts.reserve_driver_memory(GPU, 2 * gib)
    assert found() == everything, "what was left to the driver is not left twice"
    allocator.set(0.5, 3)
    device_facts.reserve_driver_memory(GPU, 2 * gib)
    assert allocator.allowed[3] == found() == 40 * gib
    assert found(device_memory="60GiB") == everything


class _System:
    """Allowed processors of this process, and the NUMA node of the device."""

    def __init__(self, allowed: set[int], node: int | None, on_node: set[int]) -> None:
        self.allowed = allowed
        self.node = node
        self.on_node = on_node
        self.bound: set[int] = set()

    def set(self, thread: int, processors: frozenset[int]) -> None:
        """Stands for os.sched_setaffinity."""
        self.allowed = set(processors)
        self.bound.add(thread)


def _system(
    monkeypatch: pytest.MonkeyPatch, *, allowed: set[int], node: int | None, on_node: set[int]
) -> _System:
    system = _System(allowed, node, on_node)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: system.allowed)
    monkeypatch.setattr(os, "sched_setaffinity", system.set)
    monkeypatch.setattr(device_facts, "device_numa_node", lambda device: system.node)
    monkeypatch.setattr(device_facts, "node_cpus", lambda node: frozenset(system.on_node))
    return system


def test_all_threads_are_bound_to_allowed_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    system = _system(monkeypatch, allowed={0, 1, 2, 3}, node=1, on_node={2, 3, 4, 5})
    assert device_facts.bind_to_device(GPU) == {0, 1, 2, 3}
    assert system.allowed == {2, 3}
    assert os.getpid() in system.bound
    assert {int(name) for name in os.listdir("/proc/self/task")} <= system.bound


@pytest.mark.parametrize(
    ("node", "on_node"),
    [(None, {2, 3}), (1, set()), (1, {8, 9}), (1, {0, 1, 2, 3, 4})],
)
def test_affinity_is_not_changed_without_a_closer_node(
    monkeypatch: pytest.MonkeyPatch, node: int | None, on_node: set[int]
) -> None:
    system = _system(monkeypatch, allowed={0, 1, 2, 3}, node=node, on_node=on_node)
    assert device_facts.bind_to_device(GPU) is None
    assert not system.bound


def test_affinity_is_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    system = _system(monkeypatch, allowed={0, 1, 2, 3}, node=0, on_node={0, 1})

    def fail_while_bound() -> None:
        with device_facts.bound_to_device(GPU):
            assert system.allowed == {0, 1}
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_while_bound()
    assert system.allowed == {0, 1, 2, 3}


def test_a_thread_that_has_ended_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def gone(thread: int, processors: frozenset[int]) -> None:
        tried.append(thread)
        raise ProcessLookupError

    monkeypatch.setattr(os, "sched_setaffinity", gone)
    device_facts.set_thread_affinity(frozenset({0}))
    assert set(tried) >= {int(name) for name in os.listdir("/proc/self/task")}


def test_a_cpu_device_does_not_change_affinity() -> None:
    before = os.sched_getaffinity(0)
    with device_facts.bound_to_device(torch.device("cpu")):
        assert os.sched_getaffinity(0) == before


def adapted(dtype: torch.dtype, **settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    model = build_tiny_model("llama", dtype=dtype)
    with suppress_peft_warnings():
        return peft.get_peft_model(model, peft.LoraConfig(**settings))


def test_without_adapters_all_is_trained() -> None:
    shape = model_shape(find_parts(build_tiny_model("llama", dtype=torch.bfloat16)))
    assert shape.lora is None
    assert shape.trainable_fraction == 1
    assert (shape.dtype_bytes, shape.parameter_bytes) == (2, 2)


def test_adapters_are_found_with_rank_targets_dtype_and_dropout() -> None:
    model = adapted(torch.bfloat16, r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
    shape = model_shape(find_parts(model))
    targets = ("down_proj", "q_proj")
    assert shape.lora == LoraShape(rank=4, targets=targets, dtype_bytes=4, dropout=0.1)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert shape.trainable_parameters == sum(p.numel() for p in trained)
    assert shape.gradient_bytes == sum(p.numel() * 4 for p in trained)


def test_adapters_that_do_not_train_are_none() -> None:
    model = adapted(torch.float32, r=4, target_modules=["q_proj"])
    model.requires_grad_(False)
    assert model_shape(find_parts(model)).lora is None


def test_under_autocast_products_are_narrower_than_weights() -> None:
    parts = find_parts(build_tiny_model("llama", dtype=torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        shape = model_shape(parts)
    assert (shape.dtype_bytes, shape.parameter_bytes) == (2, 4)
    assert shape.kv_bytes_per_token(0) * 2 == model_shape(parts).kv_bytes_per_token(0)
    doubles = find_parts(build_tiny_model("llama", dtype=torch.float64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        shape = model_shape(doubles)
    assert (shape.dtype_bytes, shape.parameter_bytes) == (8, 8), "autocast leaves them alone"


@pytest.mark.parametrize("adapters", [False, True])
def test_autocast_keeps_as_many_bytes_of_casts_as_are_counted(adapters: bool) -> None:
    model: Any = build_tiny_model("llama", dtype=torch.float32)
    model = add_lora(model) if adapters else model

    weights: list[tuple[StorageWeakRef, int]] = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and isinstance(args[0], torch.nn.Parameter):
                weights.append((StorageWeakRef(result.untyped_storage()), result.nbytes))
            return result

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        shape = model_shape(find_parts(model))
        with Casts():
            model(**make_batch(tokens=7))
        kept = sum(size for reference, size in weights if not reference.expired())
    kept -= 0 if shape.lora is None else shape.lora_bytes // 2  # too small to be counted
    assert kept == pytest.approx(shape.cached_cast_bytes, rel=0.01), "norms are counted, not cast"


def _shard(monkeypatch: pytest.MonkeyPatch, parts: ModelParts) -> None:
    """Let a model look as if FSDP2 sharded it over four ranks and gathered it in bfloat16."""
    for name, value in (("is_sharded", True), ("gathered_dtype", torch.bfloat16)):
        monkeypatch.setattr(type(parts), name, lambda self, value=value: value)
    for parameter in parts.causal_lm.parameters():
        parameter.device_mesh = SimpleNamespace(ndim=1, size=lambda dim: 4)


def test_what_fsdp2_shards_is_counted_as_this_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the dtype of compute, whatever that of the shards is, and without autocast."""
    parts = find_parts(build_tiny_model("llama", dtype=torch.float32))
    whole = model_shape(parts)
    _shard(monkeypatch, parts)
    shape = model_shape(parts)
    assert (shape.shards, shape.dtype_bytes, shape.parameter_bytes) == (4, 2, 2)
    assert shape.gradient_bytes == whole.gradient_bytes // 4
    assert shape.states_bytes == whole.states_bytes // 4
    # What is gathered is counted with the weights.
    assert whole.weight_bytes // 4 < shape.weight_bytes
    assert device_facts.dtype_name(parts) == "bfloat16"


@pytest.mark.parametrize("autocast", [False, True])
def test_adapters_are_counted_in_the_dtype_in_which_fsdp2_gathers_them(
    monkeypatch: pytest.MonkeyPatch, autocast: bool
) -> None:
    """And so `sppo plan --gpus` plans for FSDP2, and what layers save is the same to both."""
    parts = find_parts(adapted(torch.bfloat16, r=4, target_modules="all-linear"))
    wide = model_shape(parts)
    assert wide.lora is not None
    assert wide.lora.dtype_bytes == 4
    _shard(monkeypatch, parts)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        shape = model_shape(parts)
    asked = request_for(
        parts.causal_lm.config,
        SPPOConfig(),
        profile=load_profile("h100"),
        total_tokens=512,
        lora_rank=4,
        cast_by="fsdp2",
        trace=trace_config,
    )
    planned = ModelCost(shape=asked.shape, profile=load_profile("h100"), dtype_name="bfloat16")
    assert planned.with_shards(4, 1e9).shape.layers == shape.layers
    assert planned.with_shards(4, 1e9).shape.weight_bytes == shape.weight_bytes
    assert shape.activation_bytes_per_token(1) < 0.6 * wide.activation_bytes_per_token(1)
    assert shape.gradient_bytes == 4 * shape.trainable_parameters // 4


def test_weights_that_fsdp2_leaves_out_are_counted_whole() -> None:
    """As Accelerate leaves out 4-bit weights that are stored as integers."""
    model: Any = build_tiny_model("llama", dtype=torch.float32)
    parts = find_parts(model)
    whole = model_shape(parts)
    mesh = SimpleNamespace(ndim=1, size=lambda dim: 4)
    out = [p for name, p in model.named_parameters() if "down_proj" in name]
    for parameter in model.parameters():
        if all(parameter is not other for other in out):
            parameter.device_mesh = mesh
    assert parts.whole_bytes() == sum(p.nbytes for p in out) > 0
    shape, sharded = model_shape(parts), whole.with_shards(4)
    # The layer in use, the next one and its buffer are gathered without them.
    gathered = sharded.gathered_bytes(0) - shape.gathered_bytes(0)
    assert gathered == out[0].nbytes
    more = shape.weight_bytes - sharded.weight_bytes
    assert more == parts.whole_bytes() * 3 // 4 - 3 * gathered


def test_packed_weights_are_gathered_as_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four 4-bit weights in each element of a 16-bit dtype."""
    model: Any = build_tiny_model("llama", dtype=torch.bfloat16)
    parts = find_parts(model)
    wide = model_shape(parts).with_shards(4)
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            parameter.data = parameter.detach().flatten()[::4, None].contiguous()
    _shard(monkeypatch, parts)
    norms = 2 * 2 * parts.decoder.norm.weight.numel()
    for layer, held in enumerate(parts.layers):
        packed = model_shape(parts).gathered_bytes(layer)
        assert packed == sum(p.nbytes for p in held.parameters())
        assert packed - norms == (wide.gathered_bytes(layer) - norms) / 4
