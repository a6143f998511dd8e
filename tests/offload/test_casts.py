"""Autocast's casts of weights: neither kept nor moved, and the same when they are made again."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sppo_hf import SPPOConfig
from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.errors import OffloadError
from sppo_hf.offload.layer_offload import LayerOffload, PrefetchOrder, WeightCasts
from sppo_hf.planning.activation_modes import mode_of
from sppo_hf.testing.tiny_models import add_lora, build_tiny_model, make_batch
from tests.engine.forced_plans import force_modes
from tests.offload.small_stack import cpu_engine

CHUNKS = (9, 1, 13)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _run(
    monkeypatch: pytest.MonkeyPatch, family: str, tier: Any, *, lora: bool, casts: bool
) -> tuple[dict[str, Tensor | None], int]:
    """Gradients of a float32 model under autocast, and the bytes that went to the host."""
    with monkeypatch.context() as inner:
        inner.setattr(
            "sppo_hf.engine.chunk_runner.WeightCasts.of", WeightCasts.of if casts else _none
        )
        force_modes(inner, lambda chunk, layer: mode_of("whole", tier))
        model: nn.Module = build_tiny_model(family, dtype=torch.float32)
        model = add_lora(model) if lora else model  # type: ignore[arg-type]
        config = SPPOConfig(chunk_lengths=CHUNKS, min_offload_size=1, show_plan=False)
        model = convert(model, config)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**make_batch(tokens=sum(CHUNKS))).loss
        loss.backward()
        engine = get_engine(model)
        assert engine is not None
        moved_bytes = engine.offload.stats().d2h_bytes
        engine.offload.assert_drained()
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}, moved_bytes


def _none(*_: object) -> None:
    return None


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("lora", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_gradients_are_those_of_casts_that_were_saved(
    monkeypatch: pytest.MonkeyPatch, family: str, lora: bool, tier: str
) -> None:
    theirs, _ = _run(monkeypatch, family, tier, lora=lora, casts=False)
    ours, _ = _run(monkeypatch, family, tier, lora=lora, casts=True)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert gradient is None or torch.equal(ours[name], gradient), name


@pytest.mark.parametrize("lora", [False, True], ids=["trained", "frozen"])
def test_no_cast_of_a_weight_is_moved(monkeypatch: pytest.MonkeyPatch, lora: bool) -> None:
    _, with_casts = _run(monkeypatch, "llama", "host", lora=lora, casts=False)
    _, without = _run(monkeypatch, "llama", "host", lora=lora, casts=True)
    sizes = [
        2 * p.numel()
        for name, p in build_tiny_model("llama").named_parameters()
        if name.rpartition(".")[0].endswith(PROJECTIONS)
    ]
    # Frozen ones were cast and moved for every chunk, trained ones once. Adapters are cast too, and
    # the first layer saves no frozen weight that its input meets.
    about = sum(sizes) * (len(CHUNKS) if lora else 1)
    assert 0.8 * about <= with_casts - without <= 1.2 * about


def _frame(weight: nn.Parameter, x: Tensor, body: Any) -> Tensor:
    engine = cpu_engine()
    with (
        torch.autocast("cpu", torch.bfloat16),
        LayerOffload(engine, PrefetchOrder(engine), casts=WeightCasts(watch=True, label="layer 3")),
    ):
        return body(x, weight)


def test_a_weight_that_changed_is_noticed() -> None:
    weight = nn.Parameter(torch.rand(16, 16), requires_grad=False)
    y = _frame(weight, torch.rand(8, 16, requires_grad=True), nn.functional.linear)
    with torch.no_grad():
        weight += 1
    with pytest.raises(OffloadError, match=r"weight of layer 3.*modified in place"):
        y.sum().backward()


def test_a_cast_that_was_written_into_is_an_activation() -> None:
    weight = nn.Parameter(torch.rand(16, 16), requires_grad=False)
    x = torch.rand(8, 16, requires_grad=True)

    def scaled(x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.linear(x, weight.to(torch.bfloat16).mul_(3))

    _frame(weight, x, scaled).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.autograd.grad(scaled(x, weight).sum(), x)
    assert torch.equal(x.grad, expected[0])


def test_a_freed_cast_gives_its_place_to_no_activation() -> None:
    weight = nn.Parameter(torch.rand(16, 16), requires_grad=False)
    x = torch.rand(16, 16, requires_grad=True)

    def many(x: Tensor, weight: Tensor) -> Tensor:
        total = x
        for _ in range(20):
            weight.to(torch.bfloat16)  # freed at once
            half = (2 * total).to(torch.bfloat16)
            total = (half * half).float()
        return total

    _frame(weight, x, many).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.autograd.grad(many(x, weight).sum(), x)
    assert torch.equal(x.grad, expected[0])
