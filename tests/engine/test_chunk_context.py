"""The running layer and chunk is known where it must be, and nowhere else."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from sppo_hf import SPPOConfig
from sppo_hf.engine.chunk_context import current
from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.engine.family_guard import family_check_disabled
from sppo_hf.planning.activation_modes import mode_of
from sppo_hf.testing.tiny_models import build_tiny_model
from tests.engine.forced_plans import force_modes, trace_short_scans
from tests.sweeps import pairs

IDS = (torch.arange(46) * 7 % 90).view(2, 23)


def _model(family: str = "llama", **settings: Any) -> Any:
    model = build_tiny_model(family).train()
    with family_check_disabled():
        return convert(model, SPPOConfig(**{"num_chunks": 3, "show_plan": False, **settings}))


def _gradients(model: Any) -> list[Tensor]:
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return gradients


def _step(model: Any) -> list[Tensor]:
    model(input_ids=IDS, labels=IDS).loss.backward()
    return _gradients(model)


def _assert_equal(ours: list[Tensor], expected: list[Tensor]) -> None:
    assert len(ours) == len(expected) > 0
    for one, other in zip(ours, expected, strict=True):
        assert torch.equal(one, other)


# phi3's rotary module is shown the last position of the sequence; bamba has states, too.
@pytest.mark.parametrize("family", ["llama", "phi3-longrope", "bamba"])
def test_a_backward_on_another_thread_finds_its_context(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    trace_short_scans(monkeypatch)
    force_modes(monkeypatch, lambda chunk, layer: mode_of("inputs", "device"))
    model = _model(family)
    expected = _step(model)
    losses = [model(input_ids=IDS, labels=IDS).loss for _ in range(2)]
    seen: list[object] = []

    def backward() -> None:
        for loss in reversed(losses):
            loss.backward()
        seen.append(current())

    thread = threading.Thread(target=backward)  # as autograd does for CUDA
    thread.start()
    thread.join()
    assert seen == [None]
    _assert_equal([gradient / 2 for gradient in _gradients(model)], expected)


def test_a_model_is_evaluated_inside_another_ones_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    force_modes(monkeypatch, lambda chunk, layer: mode_of("inputs", "device"))
    student, teacher = _model("llama"), _model("qwen3").eval()

    def evaluate() -> Tensor:
        with torch.no_grad():
            return teacher(input_ids=IDS, labels=IDS).loss

    expected, teachers = _step(student), evaluate()
    seen: list[Tensor] = []

    def teach(*_: Any) -> None:
        context = current()
        assert context is not None
        assert context.model.causal_lm is student
        seen.append(evaluate())
        assert current() is context

    handle = student.model.layers[1].mlp.register_forward_pre_hook(teach)
    ours = _step(student)
    handle.remove()
    assert seen == [teachers] * 6, "in three chunks, forward and again in backward"
    _assert_equal(ours, expected)


@pytest.mark.parametrize(
    ("order", "where", "error"),
    pairs(["by_chunk", "by_layer"], ["forward", "backward"], [RuntimeError, KeyboardInterrupt]),
)
def test_an_exception_leaves_no_context_behind(
    monkeypatch: pytest.MonkeyPatch, order: Any, error: type[BaseException], where: str
) -> None:
    force_modes(monkeypatch, lambda chunk, layer: mode_of("inputs", "device"))
    model = _model(order=order)
    expected = _step(model)
    attention = model.config._attn_implementation
    calls: list[object] = []
    # Three chunks forward, then a second time in backward.
    failing_call = 2 if where == "forward" else 4

    def fail(*_: Any) -> None:
        calls.append(current())
        if len(calls) == failing_call:
            raise error("in a layer")

    handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(error, match="in a layer"):
        _step(model)
    handle.remove()
    assert len(calls) == failing_call
    assert None not in calls
    assert current() is None
    assert get_engine(model).running is None  # type: ignore[union-attr]
    assert model.config._attn_implementation == attention
    model.zero_grad()
    _assert_equal(_step(model), expected)
