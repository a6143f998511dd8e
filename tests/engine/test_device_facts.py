"""Facts of this machine and of devices, as the planner gets them."""

from types import SimpleNamespace

import pytest
import torch

from sppo_hf.config import SPPOConfig
from sppo_hf.engine import device_facts as facts
from sppo_hf.planning.machine import has_expandable_segments

CPU, GPU = torch.device("cpu"), torch.device("cuda", 3)


def test_a_processor_has_a_name_and_the_hosts_memory() -> None:
    found = facts.device_facts(CPU, SPPOConfig())
    assert found.kind == "cpu"
    assert found.name
    assert found.device_memory_bytes == found.host_memory_bytes == facts.host_memory_bytes()


def test_versions_of_a_processor_count_its_threads() -> None:
    threads = torch.get_num_threads()
    assert facts.device_versions(CPU) == {"torch": torch.__version__, "threads": str(threads)}


def test_versions_of_cuda_name_toolkit_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(facts, "nvidia_driver_version", lambda: "580.95.05")
    assert facts.device_versions(GPU) == {
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
    monkeypatch.setattr(facts, "pci_numa_node", node)
    assert facts.device_numa_node(GPU) == 1
    assert asked == ["0000:1b:00.0"]
    assert facts.device_numa_node(CPU) is None
    assert len(asked) == 1


def _gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A GPU in a machine of 128 GiB; returns what is pinned."""
    gib = 2**30
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="a GPU")
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    pinned = {"allocated_bytes.current": 0}
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: pinned)
    # Of other tests, whose cycles have not been collected.
    monkeypatch.setattr(facts, "locked_bytes", lambda: 0)
    monkeypatch.setattr(facts, "host_memory_bytes", lambda: 128 * gib)
    monkeypatch.setattr(facts, "_profile", lambda *_: None)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return pinned


def test_a_gpu_may_use_the_host_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    pinned = _gpu(monkeypatch)

    def found(free_gib: int) -> float:
        monkeypatch.setattr(facts, "free_host_memory_bytes", lambda: free_gib * gib)
        size = facts.device_facts(GPU, SPPOConfig()).host_memory_bytes
        assert size is not None
        return size / gib

    assert found(120) == 120 - 16, "an eighth of the machine's is left alone"
    pinned["allocated_bytes.current"] = 64 * gib
    assert found(56) == 120 - 16, "what is pinned already is ours"
    pinned["allocated_bytes.current"] = 0
    with monkeypatch.context() as ours:
        ours.setattr(facts, "locked_bytes", lambda: 64 * gib)
        assert found(56) == 120 - 16, "by PyTorch or by slabs"
    assert found(10) == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert found(116) == 25
    pinned["allocated_bytes.current"] = 25 * gib
    assert found(16) == 25, "the others have as much"


def test_what_rests_on_the_host_already_is_not_counted_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gib = 2**30
    _gpu(monkeypatch)
    monkeypatch.setattr(facts, "free_host_memory_bytes", lambda: 56 * gib)
    rests = facts.device_facts(GPU, SPPOConfig(), counted_bytes=30 * gib)
    assert rests.host_memory_bytes == (56 - 16 + 30) * gib


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
    monkeypatch.setattr(facts.os, "environ", environment)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", tell)
    facts.use_expandable_segments(CPU)
    assert environment == {}
    facts.use_expandable_segments(GPU)
    assert told == ["expandable_segments:True"]
    assert has_expandable_segments(environment) is (refusal is None)


def test_what_the_environment_says_of_the_allocator_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    monkeypatch.setattr(facts.os, "environ", environment)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", None)
    facts.use_expandable_segments(GPU)
    assert environment == {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}


def test_the_cache_leaves_a_part_of_a_gpu_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[float, object]] = []
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * gib, 80 * gib))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *args: said.append(args)
    )
    facts.reserve_driver_memory(torch.device("cpu"), 2 * gib)
    assert not said
    gpu = torch.device("cuda", 0)
    facts.reserve_driver_memory(gpu, 2 * gib)
    assert said == [(78 / 80, gpu)]
