"""Exactness for batches that hypothesis draws.

Lengths, chunk bounds, padding, rows, label masks, modes and micro-steps are drawn together, on a
plain model, one with windows and one with windows and soft caps.
"""

import functools
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sppo_hf.config import SPPOConfig
from sppo_hf.testing.exactness import compare
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch
from tests.sweeps import examples

MAX_TOKENS = 20
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 3},
    "gemma2": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
}


@functools.lru_cache
def _model(family: str) -> torch.nn.Module:
    return build_tiny_model(family, num_hidden_layers=2, **FAMILIES[family])


class Draw(NamedTuple):
    """One example; printed as it is when it fails."""

    family: str
    tokens: int
    chunk_lengths: tuple[int, ...]
    padding: tuple[int, ...]
    rows: int
    masked_rate: float
    recompute: str
    offload: str
    accumulation: int
    seed: int


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    tokens = draw(st.integers(1, MAX_TOKENS))
    rows = draw(st.integers(1, 3))
    cuts = draw(st.sets(st.integers(1, tokens - 1))) if tokens > 1 else set()
    edges = [0, *sorted(cuts), tokens]
    padded = draw(st.booleans())
    return Draw(
        family=draw(st.sampled_from(sorted(FAMILIES))),
        tokens=tokens,
        chunk_lengths=tuple(stop - start for start, stop in itertools.pairwise(edges)),
        padding=tuple(draw(st.integers(0, tokens - 1)) for _ in range(rows)) if padded else (),
        rows=rows,
        masked_rate=draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        offload=draw(st.sampled_from(["none", "full"])),
        accumulation=draw(st.integers(1, rows)),
        seed=draw(st.integers(0, 2**16)),
    )


def _batch(drawn: Draw) -> dict[str, torch.Tensor]:
    batch = make_batch(rows=drawn.rows, tokens=drawn.tokens, padding=drawn.padding, seed=drawn.seed)
    generator = torch.Generator().manual_seed(drawn.seed + 1)
    masked = torch.rand(batch["labels"].shape, generator=generator) < drawn.masked_rate
    batch["labels"] = batch["labels"].masked_fill(masked, -100)
    return batch


@pytest.mark.slow
@pytest.mark.timeout(900)
@examples(10, whole=60)
@given(drawn=draws())
def test_any_batch_is_exact(drawn: Draw) -> None:
    config = SPPOConfig(
        chunk_lengths=drawn.chunk_lengths,
        recompute=drawn.recompute,  # type: ignore[arg-type]
        offload=drawn.offload,  # type: ignore[arg-type]
        min_offload_size=1,
    )
    report = compare(_model(drawn.family), _batch(drawn), config, accumulation=drawn.accumulation)
    assert report.exact, str(report)
