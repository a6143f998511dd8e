"""Prefetches before backward, strides of recomputed inputs, and the final norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import convert, get_engine, revert
from sppo_hf.engine.family_guard import family_check_disabled
from sppo_hf.engine.loss import ChunkedLoss
from sppo_hf.engine.model_parts import auto_class_of, find_parts
from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.offload.layer_offload import PrefetchOrder
from sppo_hf.planning.activation_modes import mode_of
from sppo_hf.testing.tiny_families import FAMILIES
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch, tiny_config
from tests.engine.forced_plans import force_modes
from tests.sweeps import KINDS, sample

TOKENS = 192


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The events of a step in order; all saved activations are offloaded."""
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


def test_prefetching_has_begun_when_forward_returns(log: list[str]) -> None:
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
    monkeypatch.setattr("sppo_hf.engine.engine.are_sharded", lambda modules: True)
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


def saved_by_autograd(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """Tensors that autograd itself saves in a forward, without parameters and recomputed layers."""
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return list(found.values())


@pytest.mark.parametrize("trains", [True, False])
def test_autograd_saves_nothing_wide_of_the_final_norm(trains: bool) -> None:
    """The norm computes in float32: what it saves would be the widest tensors of all."""
    model = build_tiny_model("llama").to(torch.bfloat16)
    norm = find_parts(model).final_norm()
    assert norm is not None
    norm.requires_grad_(trains)
    ids = torch.randint(model.config.vocab_size, (1, 64))
    convert(model, SPPOConfig(num_chunks=4, recompute="full", offload="none"))
    wide = [x for x in saved_by_autograd(model, ids) if x.dtype == torch.float32 and x.dim() == 3]
    assert not wide, [(x.shape, x.dtype) for x in wide]
    revert(model)
    assert any(x.dtype == torch.float32 for x in saved_by_autograd(model, ids)), "the model has"


@pytest.mark.skipif("dory" not in CONFIG_MAPPING, reason="this Transformers has no Dory")
@pytest.mark.parametrize("order", ["by_chunk", "by_layer"])
def test_models_that_run_a_layer_again_are_refused(order: Any) -> None:
    """Looped transformers; one whose list names a layer twice is refused when it is converted."""
    model = build_tiny_model("dory", dtype=torch.float32)
    with family_check_disabled():
        convert(model, SPPOConfig(num_chunks=2, order=order, show_plan=False))
    with pytest.raises(
        UnsupportedModelError, match=r"layer \d .*DoryDecoderLayer.* more than once"
    ):
        model(**make_batch())


def test_the_final_norm_is_found_by_its_place() -> None:
    found = 0
    kinds = [name for name in FAMILIES if name in KINDS]
    for name in [*kinds, *sample([name for name in FAMILIES if name not in KINDS], 12)]:
        try:
            config = tiny_config(name)
            with torch.device("meta"):
                model = auto_class_of(config).from_config(config)
            norm = find_parts(model).final_norm()
        except (UnsupportedModelError, ConfigError):  # families that are refused
            continue
        found += 1
        assert norm is not None, name
        assert "norm" in type(norm).__name__.lower()
        inside = {id(m) for layer in find_parts(model).layers for m in layer.modules()}
        assert id(norm) not in inside
    assert found > 10
