"""The fused kernel of head and loss: used where it is exact, asked once, called seldom."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sppo_hf.engine import loss as loss_module
from sppo_hf.engine.loss import ChunkedLoss, ModelHead, liger_tile
from sppo_hf.engine.structure import ModelParts, find_parts
from sppo_hf.testing.tiny_models import build_tiny_model

CUDA = torch.device("cuda")
KERNEL = "liger_kernel.ops.fused_linear_cross_entropy"


class _Kernel(torch.autograd.Function):
    """What Liger's function computes, on any device."""

    calls: list[int] = []  # noqa: RUF012
    """Tokens of each call."""

    counts_by: list[Any] = []  # noqa: RUF012
    """What the kernel was told of the number of labels that count."""
    scaled_by_count = False
    """Whether a sum depends on that number, as none of Liger's does."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
    ) -> Tensor:
        assert accum_dtype == torch.float32
        _Kernel.calls.append(_input.shape[0])
        count = (target != ignore_index).sum().item()
        _Kernel.counts_by.append(count)
        leaves = [x.detach().requires_grad_() for x in (_input, weight)]
        with torch.enable_grad():
            logits = F.linear(leaves[0], leaves[1], bias)
            loss = F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)
            loss = loss * count if _Kernel.scaled_by_count else loss
        ctx.save_for_backward(*torch.autograd.grad(loss, leaves))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        dhidden, dweight = ctx.saved_tensors
        return grads[0] * dhidden, grads[0] * dweight, *[None] * 10


class _OldKernel(_Kernel):
    """Liger's function before it could sum in another dtype."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
    ) -> Tensor:
        rest = (ce_weight, ignore_index, 0.0, 0.0, reduction, None, False, torch.float32)
        return _Kernel.forward(ctx, _input, weight, target, bias, *rest)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return _Kernel.backward(ctx, *grads)[:9]


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Stand-ins for Liger, for a model on the CPU; the list grows with each probe of a head."""
    module = SimpleNamespace(LigerFusedLinearCrossEntropyFunction=_Kernel)
    monkeypatch.setitem(sys.modules, KERNEL, module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    _Kernel.calls.clear()
    _Kernel.counts_by.clear()
    seen: list[None] = []
    probe = loss_module.is_plain_head

    def noted(linear: nn.Linear, head: ModelHead) -> bool:
        seen.append(None)
        return probe(linear, head)

    monkeypatch.setattr(loss_module, "is_plain_head", noted)
    return seen


def _model(family: str = "llama", **changes: Any) -> tuple[ModelParts, ModelHead]:
    model = build_tiny_model(family, **changes).float().train()
    return find_parts(model), ModelHead(find_parts(model), model.forward)


def test_a_head_is_tried_once_and_draws_no_random_numbers(probes: list[None]) -> None:
    parts, head = _model()
    before = torch.get_rng_state()
    assert liger_tile(parts, head, CUDA) is not None
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        parts.causal_lm.get_output_embeddings().weight.mul_(2.0)  # as an optimizer does
    assert liger_tile(parts, head, CUDA) is not None
    assert len(probes) == 1
    assert liger_tile(parts, head, torch.device("cpu")) is None


def test_a_head_that_caps_its_logits_is_not_plain_and_not_asked_again(probes: list[None]) -> None:
    parts, head = _model("gemma2")
    assert liger_tile(parts, head, CUDA) is None
    assert liger_tile(parts, head, CUDA) is None
    assert len(probes) == 1


def test_another_head_is_tried_anew(probes: list[None]) -> None:
    parts, head = _model()
    model: Any = parts.causal_lm
    assert liger_tile(parts, head, CUDA) is not None
    model.lm_head = copy.deepcopy(model.lm_head)
    assert liger_tile(parts, head, CUDA) is not None
    assert len(probes) == 2
    hook = model.lm_head.register_forward_hook(lambda module, args, logits: 2 * logits)
    assert liger_tile(parts, head, CUDA) is None, "the kernel would not run the hook"
    hook.remove()
    assert liger_tile(parts, head, CUDA) is not None
    assert len(probes) == 4
    model.eval()
    assert liger_tile(parts, head, CUDA) is not None
    assert len(probes) == 5, "a dropout before the head shows in training alone"


def test_a_head_with_other_parameters_keeps_its_code(probes: list[None]) -> None:
    """They may be neutral at first, and the kernel gives them no gradient."""
    parts, head = _model()
    parts.causal_lm.register_parameter("logit_scale", nn.Parameter(torch.ones(())))
    assert liger_tile(parts, head, CUDA) is None
    assert not probes


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_dtypes_that_the_kernel_cannot_do_exactly_are_left_to_the_head(
    probes: list[None], dtype: torch.dtype
) -> None:
    parts, head = _model()
    parts.causal_lm.to(dtype)
    assert liger_tile(parts, head, CUDA) is None
    assert not probes


def test_a_kernel_that_needs_the_number_of_labels_is_not_used(
    probes: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Kernel, "scaled_by_count", True)
    assert liger_tile(*_model(), CUDA) is None


def test_a_kernel_that_sums_in_16_bits_is_for_frozen_heads(
    probes: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[KERNEL], "LigerFusedLinearCrossEntropyFunction", _OldKernel)
    parts, head = _model()
    assert liger_tile(parts, head, CUDA) is None
    parts.causal_lm.get_output_embeddings().weight.requires_grad_(False)
    assert liger_tile(parts, head, CUDA) is not None


def test_calls_are_few_and_take_no_more_memory_than_a_tile(probes: list[None]) -> None:
    parts, head = _model(vocab_size=1000)
    linear: Any = parts.causal_lm.get_output_embeddings()
    vocab, width = linear.weight.shape
    kernel = liger_tile(parts, head, CUDA)
    assert kernel is not None
    assert _Kernel.counts_by == [3, 1], "the probe: with the number, and without"
    _Kernel.calls.clear()
    for tile_tokens in (1, 7, 64, 100, 512):
        tokens = kernel.max_tokens(tile_tokens)
        assert tokens >= tile_tokens
        parts_of_a_call = -(-vocab // width)
        part_tokens = -(-tokens // parts_of_a_call)
        assert 1 << (part_tokens - 1).bit_length() <= tile_tokens, "as the kernel rounds it up"
    hidden = torch.randn(1, 100, width, requires_grad=True)
    labels = torch.randint(0, vocab, (1, 100))
    labels[0, 3:9] = -100
    losses = []
    for used in (kernel, None):
        loss = ChunkedLoss(head.logits, [linear.weight], tile_tokens=8, liger=used)
        chunks = ((0, 60), (60, 100))
        for start, end in chunks:
            part = loss.add(hidden[:, start:end], labels[:, start:end], last=end == 100)
            losses.append(part)
        grads = torch.autograd.grad(losses[-2] + losses[-1], [hidden, linear.weight])
        losses += grads
    assert _Kernel.calls == [60, 40], "one call a chunk"
    assert _Kernel.counts_by[2:] == [1, 1], "no number is read off the device"
    half = len(losses) // 2
    for ours, plain in zip(losses[:half], losses[half:], strict=True):
        torch.testing.assert_close(ours, plain)


def test_without_gradients_or_with_logits_kept_the_models_head_runs(probes: list[None]) -> None:
    parts, head = _model()
    weight: Any = parts.causal_lm.get_output_embeddings().weight
    kernel = liger_tile(parts, head, CUDA)
    _Kernel.calls.clear()
    hidden, labels = torch.randn(1, 9, weight.shape[1]), torch.zeros(1, 9, dtype=torch.int64)
    with torch.no_grad():
        ChunkedLoss(head.logits, [weight], tile_tokens=4, liger=kernel).add(
            hidden, labels, last=True
        )
    seen: list[torch.Size] = []
    asked = ChunkedLoss(
        head.logits,
        [weight],
        tile_tokens=4,
        liger=kernel,
        on_logits=lambda logits, tile: seen.append(logits.shape),
    )
    asked.add(hidden, labels, last=True)
    assert [tuple(shape) for shape in seen] == [(tokens, weight.shape[0]) for tokens in (4, 4, 1)]
    assert not _Kernel.calls


_IN_THE_INTERPRETER = """
import torch
from torch.nn import functional as F
from sppo_hf.engine.loss import LigerTile

torch.manual_seed(0)
linear = torch.nn.Linear(32, 97, bias=False)
tile = LigerTile(linear)
assert tile.sums_wide and tile.ignores_label_count()
hidden, labels = torch.randn(20, 32), torch.randint(0, 97, (20,))
labels[3:7] = -100
loss, dhidden, (dweight,) = tile(hidden, labels, [linear.weight], -100)
leaf = hidden.clone().requires_grad_()
plain = F.cross_entropy(F.linear(leaf, linear.weight), labels, reduction="sum")
expected = (plain.detach(), *torch.autograd.grad(plain, [leaf, linear.weight]))
for ours, theirs in zip((loss, dhidden, dweight), expected):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("liger_kernel", "triton")),
    reason="liger-kernel and triton are not installed",
)
def test_ligers_own_kernel_in_tritons_interpreter() -> None:
    """The real function, on a CPU: what it takes, and what it returns."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", _IN_THE_INTERPRETER],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
