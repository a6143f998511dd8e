"""Kept tensors lie side by side, and their slab goes when the last of them does."""

import gc

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sppo_hf.engine.cpu_heap import CpuChunkArena


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


def test_the_slab_goes_with_its_last_part():
    arena = CpuChunkArena(2)
    first, second = arena.keep("keys", torch.ones(8)), arena.keep("keys", torch.ones(8))
    slab = StorageWeakRef(first.untyped_storage())
    del arena, first
    gc.collect()
    assert not slab.expired()
    del second
    gc.collect()
    assert slab.expired()
