"""Kept tensors share slabs; free heap is returned before a step would exceed its plan."""

import gc
import itertools
import math
import mmap
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sppo_hf.config import SPPOConfig
from sppo_hf.engine import cpu_heap
from sppo_hf.engine.convert import convert
from sppo_hf.engine.cpu_heap import CpuChunkArena, HeapWatch, max_resident_bytes
from sppo_hf.planning.memory import Cause, Level, MemoryEstimate, Points
from sppo_hf.planning.tiers import TIERS, Tier
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch


def test_layers_share_a_slab_per_kind():
    arena = CpuChunkArena(3)
    sources = [torch.randn(2, 5, 4).transpose(1, 2) for _ in range(3)]
    kept = [arena.keep("inputs", source) for source in sources]
    other = arena.keep("outputs", sources[0])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(kept, sources, strict=True))
    assert all(mine.is_contiguous() for mine in kept)
    assert len({mine.untyped_storage().data_ptr() for mine in kept}) == 1
    assert other.untyped_storage().data_ptr() != kept[0].untyped_storage().data_ptr()


def test_more_tensors_than_layers_and_other_shapes_get_slabs_of_their_own():
    arena = CpuChunkArena(1)
    first, second = arena.keep("inputs", torch.ones(3)), arena.keep("inputs", torch.zeros(3))
    third = arena.keep("inputs", torch.ones(4))
    assert first.sum() == 3
    assert second.sum() == 0
    assert third.numel() == 4


def test_a_slab_is_freed_with_its_last_part():
    arena = CpuChunkArena(2)
    first, second = arena.keep("keys", torch.ones(8)), arena.keep("keys", torch.ones(8))
    slab = StorageWeakRef(first.untyped_storage())
    del arena, first
    gc.collect()
    assert not slab.expired()
    del second
    gc.collect()
    assert slab.expired()


@pytest.mark.skipif(not hasattr(mmap, "MAP_ANONYMOUS"), reason="no anonymous mappings")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_slab_returns_to_the_system_at_once(dtype: torch.dtype) -> None:
    arena, parts = CpuChunkArena(2), 4
    source = torch.ones(2**22, dtype=dtype)
    kept = [arena.keep("inputs", source) for _ in range(parts)]
    assert all(torch.equal(part, source) for part in kept)
    with_them = cpu_heap.resident_bytes()
    del arena, kept
    gc.collect()
    assert with_them - cpu_heap.resident_bytes() > 0.9 * parts * source.nbytes


def test_a_slab_is_allocated_without_a_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError("too many")

    monkeypatch.setattr(cpu_heap.mmap, "mmap", refuse)
    source = torch.ones(2**20)
    assert torch.equal(CpuChunkArena(2).keep("inputs", source), source)


def test_with_one_chunk_a_layers_kept_tensors_are_freed_after_its_backward() -> None:
    model: Any = build_tiny_model("llama", dtype=torch.float32)
    convert(model, SPPOConfig(num_chunks=1, order="by_layer", recompute="full"))
    slabs: list[StorageWeakRef] = []
    keep = CpuChunkArena.keep

    def noted(arena: CpuChunkArena, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = keep(arena, kind, tensor)
        slabs.append(StorageWeakRef(kept.untyped_storage()))
        return kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuChunkArena, "keep", noted)
        loss = model(**make_batch(tokens=24)).loss
    expired: list[list[bool]] = []
    model.model.layers[0].input_layernorm.weight.register_post_accumulate_grad_hook(
        lambda _: expired.append([slab.expired() for slab in slabs])
    )
    loss.backward()
    of_layer = len(slabs) // model.config.num_hidden_layers
    assert not all(expired[0])
    assert all(expired[0][of_layer:]), "those of the layers above have gone"


@pytest.fixture
def trims(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets an entry whenever free heap is returned."""
    made: list[int] = []
    monkeypatch.setattr(cpu_heap, "_malloc_trim", made.append)
    monkeypatch.setattr(cpu_heap, "_min_resident_bytes", 0.0)
    return made


def test_free_heap_is_returned_after_enough_growth(
    trims: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    mib = 2.0**20
    resident = [0.0]
    monkeypatch.setattr(cpu_heap, "resident_bytes", lambda: resident[0])

    def count(megabytes: float, *, always: bool = False) -> int:
        trims.clear()
        resident[0] = megabytes * mib
        cpu_heap.return_free_heap(always=always)
        return len(trims)

    assert count(100) == 1
    assert count(103.9) == 0
    assert count(103.9, always=True) == 1
    assert count(104.1) == 0
    assert count(107.9) == 1
    assert count(50) == 0
    assert count(54) == 1, "what has gone by itself was less than there was at the last time"


@pytest.mark.parametrize("unknown", [math.inf, math.nan])
def test_without_resident_bytes_free_heap_is_returned_each_time(
    unknown: float, trims: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_heap, "resident_bytes", lambda: unknown)
    for _ in range(3):
        cpu_heap.return_free_heap()
    assert len(trims) == 3


def test_free_heap_is_kept_while_little_is_resident(trims: list[int]) -> None:
    before = cpu_heap.resident_bytes()
    held = torch.ones(1 << 24)
    assert cpu_heap.resident_bytes() - before > 0.9 * held.nbytes
    HeapWatch(2 * before).between_layers()
    assert not trims
    HeapWatch(2 * before, workspace_bytes=before).between_layers()
    assert len(trims) == 1
    more = torch.ones(1 << 24)
    HeapWatch(None).between_layers()
    assert len(trims) == 2
    assert more.nbytes == held.nbytes


def test_free_heap_is_returned_before_the_same_growth_exceeds_the_limit(
    trims: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # After the third layer, returned down to 12 after the fourth, down to 5 after the fifth.
    resident = iter([10.0, 30.0, 45.0, 12.0, 12.0, 40.0, 5.0, 5.0, 20.0])
    monkeypatch.setattr(cpu_heap, "resident_bytes", lambda: next(resident))
    heap, counts = HeapWatch(55, workspace_bytes=1), list[int]()
    for _ in range(5):
        heap.between_layers()
        counts.append(len(trims))
    assert counts == [0, 0, 1, 2, 2]


def test_the_limit_of_a_step_is_its_planned_memory(
    trims: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak has 50 kept bytes and 30 of workspace; 16 bytes of gradients exist before it."""

    def level(*during: int) -> Level:
        return Level(0, np.array(during), np.zeros(3, dtype=np.int64))

    levels = {Cause.INPUTS: level(0, 50, 50), Cause.WORKSPACE: level(10, 0, 30)}
    nothing: dict[Tier, Any] = {tier: {} for tier in TIERS}
    estimate = MemoryEstimate(
        Points(1, 1, True),
        {**nothing, "device": {Cause.WEIGHTS: 100}, "host": {Cause.OPTIMIZER: 7}},
        {**nothing, "device": levels},
    )
    monkeypatch.setattr(cpu_heap, "resident_bytes", lambda: 1000)
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.grad = torch.zeros(4)
    assert max_resident_bytes(estimate, [weight]) == 1000 + 80 - 16
    assert len(trims) == 1, "holes of the step before are not the step's own"


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("order", ["by_layer", "by_chunk"])
def test_free_heap_is_returned_between_layers_if_the_plan_has_no_headroom(
    order: Literal["by_layer", "by_chunk"],
    rows: int,
    trims: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory kept by a step's first rows is in its plan, and leaves later rows no more headroom."""
    model, inputs = build_tiny_model("llama"), make_batch(rows=rows, tokens=24)
    monkeypatch.setattr(cpu_heap, "_MIN_GROWTH_BYTES", -math.inf)
    convert(model, SPPOConfig(chunk_tokens=8, order=order, micro_batch_size=1))

    def count(later: float) -> int:
        trims.clear()
        resident = itertools.chain([0.0, 0.0], itertools.repeat(later))
        monkeypatch.setattr(cpu_heap, "resident_bytes", lambda: next(resident))
        model(**inputs).loss.backward()
        return len(trims)

    counts = count(0.0), count(1e18)
    assert counts[1] - counts[0] == 2 * 3 * 3 * rows, "three layers of three chunks, both ways"
