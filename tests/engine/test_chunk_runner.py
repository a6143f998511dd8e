"""When what backward needs first is asked for: after the last loss, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.engine.loss import ChunkedLoss
from sppo_hf.engine.structure import ModelParts
from sppo_hf.offload.layer_offload import PrefetchOrder
from sppo_hf.planning.activation_modes import mode_of
from sppo_hf.testing.tiny_models import build_tiny_model
from tests.engine.forced_plans import force_modes

TOKENS = 192


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, in order; all frames go to the host."""
    seen: list[str] = []
    start, add = PrefetchOrder.start_backward, ChunkedLoss.add

    def noted_start(self: PrefetchOrder, *numbers: int) -> None:
        seen.append("start of backward")
        start(self, *numbers)

    def noted_add(self: ChunkedLoss, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append("loss")
        return add(self, *args, **kwargs)

    monkeypatch.setattr(PrefetchOrder, "start_backward", noted_start)
    monkeypatch.setattr(ChunkedLoss, "add", noted_add)
    force_modes(monkeypatch, lambda chunk, layer: mode_of("whole", "host"))
    return seen


def _forward(rows: int = 1, **settings: Any) -> tuple[Any, Any]:
    settings = {"num_chunks": 3, "show_plan": False, **settings}
    model = build_tiny_model("llama").train()
    convert(model, SPPOConfig(**settings))
    ids = torch.arange(rows * TOKENS).view(rows, TOKENS) % 90
    return model, {"input_ids": ids, "labels": ids}


def test_the_last_frame_is_on_its_way_when_forward_returns(log: list[str]) -> None:
    model, batch = _forward()
    loss = model(**batch).loss
    assert log == ["loss"] * 3 + ["start of backward"]
    engine = get_engine(model)
    assert engine is not None
    ahead_bytes = engine.offload.stats().h2d_bytes
    assert ahead_bytes > 0
    loss.backward()
    stats = engine.offload.stats()
    assert stats.h2d_bytes == stats.d2h_bytes, "all came back, and once"
    assert ahead_bytes < stats.h2d_bytes / 2
    engine.offload.assert_drained()


def test_of_several_groups_of_rows_only_the_last_is_next(log: list[str]) -> None:
    model, batch = _forward(rows=3, micro_batch_size=1)
    model(**batch).loss.backward()
    assert log == ["loss"] * 9 + ["start of backward"]


def test_a_head_over_the_whole_sequence_comes_first(log: list[str]) -> None:
    model, batch = _forward()
    model.loss_function = lambda *, logits, **kwargs: logits.mean()
    with pytest.warns(UserWarning, match="whole logits|logits of the whole"):
        model(**batch).loss.backward()
    assert log == []


def test_a_head_that_runs_again_in_backward_comes_first(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelParts, "is_sharded", lambda self: True)
    model, batch = _forward()
    model(**batch).loss.backward()
    assert log == ["loss"] * 3


def test_layers_are_recomputed_from_hidden_states_with_the_strides_of_forward() -> None:
    """Compiled code asks for them in backward; a slice of embeddings of several rows had others."""
    model = build_tiny_model("llama").train()
    strides: list[tuple[int, ...]] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        strides.append((args[0] if args else kwargs["hidden_states"]).stride())

    settings = {"chunk_lengths": (5, 8), "recompute": "full", "order": "by_chunk"}
    convert(model, SPPOConfig(**settings, show_plan=False))
    model.model.layers[0].input_layernorm.register_forward_pre_hook(note, with_kwargs=True)
    ids = torch.arange(26).view(2, 13)
    model(input_ids=ids, labels=ids).loss.backward()
    forward, again = strides[:2], strides[2:]
    assert forward == again[::-1] == [(5 * 32, 32, 1), (8 * 32, 32, 1)]
