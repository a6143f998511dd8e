"""The loss: in tiles, by Liger's kernel, and of routers; each against the unmodified model's."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from sppo_hf import SPPOConfig, UnsupportedModelError
from sppo_hf.engine import family_guard as guard
from sppo_hf.engine import loss as loss_module
from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.engine.loss import ChunkedLoss, ModelHead, RouterLoss, divide_loss, liger_tile
from sppo_hf.engine.model_parts import CAPTURES, ModelParts, captures, find_parts
from sppo_hf.engine.sliced_calls import _TiledCall, token_wise
from sppo_hf.planning.memory import Cause
from sppo_hf.testing.exactness import compare, float64_everywhere
from sppo_hf.testing.tiny_models import add_lora, build_tiny_model, make_batch
from tests.engine.measuring import OperationNames
from tests.sweeps import turn

D, V = 6, 11


def _problem(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    head = nn.Linear(D, V).to(dtype)
    hidden = torch.randn(2, 9, D).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (2, 9))
    labels[0, 3:6] = -100
    return head, hidden, labels


def _chunked(head, hidden, labels, *, tile, bounds=((0, 4), (4, 9)), divisor=None, **kwargs):
    loss = ChunkedLoss(
        lambda h: torch.tanh(head(h)), list(head.parameters()), tile_tokens=tile, **kwargs
    )
    parts = [
        loss.add(hidden[:, start:end], labels[:, start:end], last=end == bounds[-1][1])
        for start, end in bounds
    ]
    count = (labels != -100).sum()
    total = torch.stack(parts).sum()
    return divide_loss(total, count, count if divisor is None else divisor), loss


def _whole(head, hidden, labels):
    logits = torch.tanh(head(hidden))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


@pytest.mark.parametrize("tile", [1, 3, 64])
@pytest.mark.parametrize("frozen", [(), ("weight",), ("weight", "bias")])
def test_equals_cross_entropy_on_whole_logits(tile, frozen):
    head, hidden, labels = _problem()
    for name in frozen:
        getattr(head, name).requires_grad_(False)
    leaves = [hidden, *(p for p in head.parameters() if p.requires_grad)]
    expected, _ = _whole(head, hidden, labels)
    ours, _ = _chunked(head, hidden, labels, tile=tile)
    torch.testing.assert_close(ours, expected)
    mine, theirs = (torch.autograd.grad(3 * loss, leaves) for loss in (ours, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_no_label_at_all_is_nan_with_zero_gradients_as_in_pytorch():
    head, hidden, labels = _problem()
    labels.fill_(-100)
    expected, _ = _whole(head, hidden, labels)
    ours, _ = _chunked(head, hidden, labels, tile=4)
    assert expected.isnan()
    assert ours.isnan()
    for gradient in torch.autograd.grad(ours, [hidden, head.weight]):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_frozen_everything_but_the_head_still_trains_the_head():
    head, hidden, labels = _problem()
    hidden = hidden.detach()
    expected = torch.autograd.grad(_whole(head, hidden, labels)[0], head.weight)[0]
    ours = torch.autograd.grad(_chunked(head, hidden, labels, tile=4)[0], head.weight)[0]
    torch.testing.assert_close(ours, expected)


def test_every_tile_of_logits_is_handed_out_once():
    head, hidden, labels = _problem()
    seen = []
    _chunked(head, hidden, labels, tile=3, on_logits=lambda logits, tile: seen.append(logits))
    assert [len(logits) for logits in seen] == [3, 3, 2, 3, 3, 3, 1]
    assert not any(logits.requires_grad for logits in seen)
    expected = _whole(head, hidden, labels)[1]
    by_chunk = [expected[:, :4].flatten(0, 1), expected[:, 4:].flatten(0, 1)]
    torch.testing.assert_close(torch.cat(seen), torch.cat(by_chunk))


def test_small_float16_probabilities_keep_their_gradient():
    # p = 3e-8 for every wrong label: below float16's smallest number, so its gradient is lost
    # unless the loss is scaled while the gradient is in float16.
    head = nn.Linear(2, 3, bias=False, dtype=torch.float16)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[17.0, 0.0], [0.0, 1.0], [0.0, 1.0]]))
    hidden = torch.tensor([[[1.0, 0.0]]], dtype=torch.float16, requires_grad=True)
    loss = ChunkedLoss(head, list(head.parameters()), tile_tokens=8)
    total = loss.add(hidden, torch.tensor([[0]]), last=True)
    assert loss.scale == 1024.0
    (gradient,) = torch.autograd.grad(total * 65536.0, hidden)
    expected = 65536 * 2.0 * torch.exp(torch.tensor(-17.0))
    torch.testing.assert_close(gradient.float()[0, 0, 1], expected, rtol=0.05, atol=0)


@pytest.mark.parametrize("grad", [True, False])
def test_one_tile_of_logits_lives_at_a_time(grad):
    head, hidden, labels = _problem(torch.bfloat16)
    tiles = []

    def watched(x):
        assert all(tile.expired() for tile in tiles), "an earlier tile's logits live"
        logits = head(x)
        # Of the memory: a view keeps that alive without the tensor.
        tiles.append(StorageWeakRef(logits.untyped_storage()))
        return logits

    loss = ChunkedLoss(watched, list(head.parameters()), tile_tokens=2)
    with torch.set_grad_enabled(grad):
        loss.add(hidden, labels, last=True)
    assert len(tiles) == 9


class _Made(TorchDispatchMode):
    """Notes operations that make a new tensor of so many elements."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.calls = numel, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.data_ptr() for x in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(x)}
        if torch.is_tensor(out) and out.numel() == self.numel and out.data_ptr() not in given:
            self.calls.append(func.overloadpacket.__name__)
        return out


@pytest.mark.parametrize("cap", [False, True])
def test_what_is_as_large_as_the_head_or_a_tiles_logits_is_made_once(cap):
    head, hidden, labels = _problem(torch.float32)
    run = (lambda h: torch.tanh(head(h))) if cap else head
    loss = ChunkedLoss(run, list(head.parameters()), tile_tokens=2)
    with _Made(head.weight.numel()) as gradients:
        loss.add(hidden, labels, last=True)
    assert gradients.calls == ["mm"], "a tile has a gradient of the head beside the sum"
    loss = ChunkedLoss(run, list(head.parameters()), tile_tokens=64)
    with _Made(18 * V) as tiles:
        loss.add(hidden, labels, last=True)
    made = ["addmm", "_log_softmax"]
    assert tiles.calls == (["addmm", "tanh", "_log_softmax", "tanh_backward"] if cap else made)


@pytest.mark.parametrize("reads_twice", [False, True])
def test_a_weight_that_is_read_in_other_ways_too_gets_all_of_its_gradient(reads_twice):
    head, hidden, labels = _problem()

    def run(h):
        logits = head(h) * head.weight.square().mean()
        return logits + head(2 * h) if reads_twice else logits

    loss = ChunkedLoss(run, list(head.parameters()), tile_tokens=4)
    ours = torch.autograd.grad(loss.add(hidden, labels, last=True), [hidden, *head.parameters()])
    expected = F.cross_entropy(run(hidden).flatten(0, 1), labels.flatten(), reduction="sum")
    theirs = torch.autograd.grad(expected, [hidden, *head.parameters()])
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def _in_place(head, h):
    logits = head(h).mul_(2.0)
    logits[..., 3] = -1.0
    return logits


@pytest.mark.parametrize(
    "run",
    [
        _in_place,
        lambda head, h: torch.stack([head(row) for row in h[0]])[None],
        lambda head, h: head(h) + F.linear(h, head.extra)[..., None],
    ],
    ids=["writes into its logits", "token by token", "one weight a vector"],
)
def test_a_head_may_use_its_products_as_it_likes(run):
    head, hidden, labels = _problem()
    head.extra = nn.Parameter(torch.randn(D, dtype=torch.float64))
    loss = ChunkedLoss(lambda h: run(head, h), list(head.parameters()), tile_tokens=4)
    wanted = [hidden, *head.parameters()]
    ours = torch.autograd.grad(loss.add(hidden, labels, last=True), wanted, allow_unused=True)
    logits = run(head, hidden.flatten(0, 1)[None])
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    theirs = torch.autograd.grad(expected, wanted, allow_unused=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_a_label_that_is_no_token_is_named():
    head, hidden, labels = _problem()
    labels[0, 1] = V
    loss = ChunkedLoss(head, list(head.parameters()), tile_tokens=4)
    with pytest.raises(IndexError, match=f"Target {V} is out of bounds"):
        loss.add(hidden, labels, last=True)


@pytest.mark.parametrize("autocast", [False, True])
def test_labels_that_do_not_count_may_stand_at_infinite_logits(autocast):
    head, hidden, labels = _problem(torch.float32)
    forbidden = torch.zeros(V)
    forbidden[0] = float("-inf")
    labels = labels.clamp(max=V - 1).where(labels != 0, 1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = ChunkedLoss(lambda h: head(h) + forbidden, list(head.parameters()), tile_tokens=4)
        total = loss.add(hidden, labels, last=True)
        logits = head(hidden) + forbidden
    expected = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    torch.testing.assert_close(total, expected)
    ours = torch.autograd.grad(total, [hidden, head.weight])
    theirs = torch.autograd.grad(expected, [hidden, head.weight])
    rounding = 2e-2 if autocast else 1e-5
    torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding)


def _run_hooks(head, hidden, labels, run):
    """Gradients of the head under hooks that are not linear, and how often each hook ran."""
    calls = {"tensor": 0, "after": 0, "together": 0}

    def clamp(grad):
        calls["tensor"] += 1
        return grad.clamp(-1e-3, 1e-3)

    def count(name):
        def called(*_):
            calls[name] += 1

        return called

    head = copy.deepcopy(head)
    head.weight.register_hook(clamp)
    head.bias.register_post_accumulate_grad_hook(count("after"))
    register_multi_grad_hook((head.weight, head.bias), count("together"))
    loss = run(head, hidden, labels)
    assert calls == {"tensor": 0, "after": 0, "together": 0}, "a hook ran before backward"
    loss.backward()
    return calls, head.weight.grad, head.bias.grad


@pytest.mark.parametrize("in_backward", [False, True])
def test_hooks_on_the_heads_parameters_run_once_on_the_whole_gradient(in_backward):
    problem = _problem()
    plain = _run_hooks(*problem, lambda *given: _whole(*given)[0])
    ours = _run_hooks(
        *problem, lambda *given: _chunked(*given, tile=2, head_in_backward=in_backward)[0]
    )
    assert ours[0] == plain[0] == {"tensor": 1, "after": 1, "together": 1}
    assert plain[1].abs().max() == 1e-3
    torch.testing.assert_close(ours[1:], plain[1:])
    assert len(problem[0].weight._backward_hooks or ()) == 0


def test_hooks_of_parameters_that_the_head_does_not_use_do_not_run():
    head, hidden, labels = _problem()
    head.spare = nn.Parameter(torch.ones(3))
    head.spare.register_hook(lambda _: pytest.fail("nothing has a gradient for it"))
    value, _ = _chunked(head, hidden, labels, tile=4)
    value.backward()
    assert head.spare.grad is None
    assert head.weight.grad is not None


# -- Liger's kernel for head and loss --------------------------------------------------------------

CUDA = torch.device("cuda")
KERNEL = "liger_kernel.ops.fused_linear_cross_entropy"


class _Kernel(torch.autograd.Function):
    """A stand-in for Liger's function that runs on any device."""

    calls: list[int] = []  # noqa: RUF012
    """Tokens of each call."""

    counts_by: list[Any] = []  # noqa: RUF012
    """What `Tensor.item` returned for the number of labels, in each call."""
    equal_by: list[bool] = []  # noqa: RUF012
    """What `torch.equal` returned for 1 and 2, in each backward."""
    scaled_by_count = False
    """Whether sums depend on that number; those of Liger's kernel do not."""

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
        _Kernel.equal_by.append(torch.equal(torch.ones(1), torch.full((1,), 2.0)))
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
    _Kernel.equal_by.clear()
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


@pytest.mark.parametrize("family", ["qwen3_moe", "llava", "qwen3_vl", "qwen3_5"])
def test_a_head_that_passes_on_more_than_logits_is_tried_before_the_first_forward(
    probes: list[None], family: str
) -> None:
    """Router logits, or images, which its own base model returns; no other has run yet."""
    parts, head = _model(family)
    assert liger_tile(parts, head, CUDA) is not None
    assert len(probes) == 1


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


def test_kernel_calls_are_few_and_take_no_more_memory_than_a_tile(
    probes: list[None],
) -> None:
    parts, head = _model(vocab_size=1000)
    linear: Any = parts.causal_lm.get_output_embeddings()
    vocab, width = linear.weight.shape
    kernel = liger_tile(parts, head, CUDA)
    assert kernel is not None
    assert _Kernel.counts_by == [3, 1], "the probe: with the number, and without"
    assert _Kernel.equal_by == [False, True], "and with the gradient's value, and without"
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
    assert _Kernel.equal_by[2:] == [True, True], "nor the loss's gradient, which is 1"
    half = len(losses) // 2
    torch.testing.assert_close(losses[:half], losses[half:])


def test_labels_of_another_device_come_to_the_kernels() -> None:
    devices: list[torch.device] = []

    class Tile:
        def max_tokens(self, tile_tokens: int) -> int:
            return tile_tokens

        def __call__(self, hidden: Tensor, labels: Tensor, *_: Any) -> Any:
            devices.append(labels.device)
            return hidden.sum(), hidden, []

    loss = ChunkedLoss(lambda x: x, [], tile_tokens=4, liger=cast("Any", Tile()))
    hidden = torch.zeros(1, 4, 6, device="meta", requires_grad=True)
    loss.add(hidden, torch.zeros(1, 4, dtype=torch.long), last=True)
    assert devices == [hidden.device]


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
assert tile.sums_wide and tile.needs_no_wait()
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
    """Arguments and results of the real function, on a CPU."""
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


# -- the auxiliary loss of routers, which is no sum over tokens ------------------------------------

TOKENS = 23


def _settings(**others: Any) -> SPPOConfig:
    return SPPOConfig(chunk_lengths=(9, 1, 13), min_offload_size=1, show_plan=False, **others)


_ROUTER_SETTINGS: list[dict[str, Any]] = [
    {"recompute": "full", "offload": "full"},
    {"recompute": "none", "offload": "full"},
    {"recompute": "full", "offload": "none", "micro_batch_size": 2},
    {"recompute": "full", "order": "by_layer", "layer_tile_tokens": 8},
]


@pytest.mark.parametrize(
    ("padded", "settings"),
    [
        (padded, some)
        for index, some in enumerate(_ROUTER_SETTINGS)
        for padded in turn([True, False], 2, index // 2)
    ],
    ids=str,
)
def test_router_loss_in_modes_and_groups_of_rows(padded: bool, settings: dict[str, Any]) -> None:
    batch = make_batch(rows=3, tokens=TOKENS, padding=(0, 9, 22) if padded else ())
    report = compare(build_tiny_model("mixtral-router-loss"), batch, _settings(**settings))
    assert report.exact, str(report)


@pytest.mark.parametrize("family", ["mixtral-router-loss", "gpt_oss-router-loss"])
def test_tokens_after_the_last_label_count_in_the_router_loss(family: str) -> None:
    batch = make_batch(rows=2, tokens=TOKENS)
    batch["labels"][:, 5:] = -100
    report = compare(build_tiny_model(family), batch, _settings())
    assert report.exact, str(report)


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        (family, recompute)
        for index, family in enumerate(["gpt_oss", "ernie4_5_moe", "qwen3_moe"])
        for recompute in turn(["none", "selective", "full"], 3, index)
    ],
)
def test_router_loss_where_experts_run_in_tiles(
    family: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _settings(order="by_layer", layer_tile_tokens=8, recompute=recompute)
    tiles: dict[str, int] = {}
    run = _TiledCall._run

    def observed(self: _TiledCall, *args: Any, **kwargs: Any) -> list[Tensor]:
        tiles[self._part.name] = len(self._tiles)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(_TiledCall, "_run", observed)
    batch = make_batch(rows=2, tokens=TOKENS, padding=(0, 5))
    report = compare(build_tiny_model(f"{family}-router-loss"), batch, settings)
    assert report.exact, str(report)
    assert tiles["mlp"] > 2


@pytest.mark.parametrize("family", ["qwen3_moe", "jetmoe"])
def test_hooks_of_transformers_leave_tiles_as_they_are(family: str) -> None:
    """Those of others end the tiles of what is around them, whenever they come."""
    model: Any = build_tiny_model(family, dtype=torch.float32)
    layer, like = model.model.layers[-1], torch.zeros(1, 1, model.config.hidden_size)
    before = {part.name for part in token_wise(layer, like)}
    assert "mlp" in before
    maybe_install_capturing_hooks(model.model)
    assert {part.name for part in token_wise(layer, like)} == before
    router = next(x for x in layer.mlp.modules() if captures(x))
    router.register_forward_hook(lambda *_: None)
    assert "mlp" not in {part.name for part in token_wise(layer, like)}


def test_router_loss_with_lora_and_accumulation() -> None:
    batch = make_batch(rows=3, tokens=TOKENS, padding=(4, 0, 11))
    model = add_lora(build_tiny_model("qwen3_moe-router-loss"))
    report = compare(model, batch, _settings(), accumulation=2)
    assert report.exact, str(report)


def test_the_router_loss_is_returned_as_the_model_returns_it() -> None:
    model = build_tiny_model("mixtral-router-loss")
    batch = make_batch(rows=2, tokens=TOKENS, padding=(0, 5))
    with float64_everywhere():
        expected = model(**batch)
        output = convert(model, _settings())(**batch)
    assert type(output) is type(expected)
    torch.testing.assert_close(output.aux_loss, expected.aux_loss)
    torch.testing.assert_close(output.loss, expected.loss)
    without = model.config.router_aux_loss_coef * expected.aux_loss
    assert without > 0.01 * expected.loss, "it is seen at all"


@pytest.mark.parametrize("by_config", [True, False], ids=["config", "keyword"])
def test_an_unproved_family_is_tried_when_its_router_loss_is_switched_on(
    monkeypatch: pytest.MonkeyPatch, by_config: bool
) -> None:
    monkeypatch.setattr(guard, "_verdicts", {})
    model = convert(build_tiny_model("flex_olmo", dtype=torch.float32), _settings())
    assert not guard._verdicts
    model.config.output_router_logits = by_config
    switch = {} if by_config else {"output_router_logits": True}
    model(**make_batch(tokens=TOKENS), **switch).loss.backward()
    assert list(guard._verdicts.values()) == [""]
    ((_, config),) = guard._verdicts
    assert "'output_router_logits': True" in config


def test_a_family_that_is_not_exact_with_its_router_loss_trains_without() -> None:
    model: Any = build_tiny_model("jetmoe", dtype=torch.float32)
    said = r"with a loss of its routers .*: it fails in .*coef=0\.0 in"
    model.config.output_router_logits = True
    with pytest.raises(UnsupportedModelError, match=said):
        convert(model, _settings())
    model.config.output_router_logits = False
    convert(model, _settings())
    batch = make_batch(tokens=TOKENS)
    with pytest.raises(UnsupportedModelError, match=said):
        model(**batch, output_router_logits=True)
    model(**batch).loss.backward()


def test_a_family_proved_without_its_router_loss_is_tried_with_it() -> None:
    """Transformers 5.17 ignores the setting of this family; newer releases do not."""
    model = build_tiny_model("qwen3_vl_moe", dtype=torch.float32)
    model.config.text_config.output_router_logits = True
    assert not guard.is_proved(find_parts(model))


def _logits_of(output: Any) -> Tensor:
    return output.logits[:, ::3].logsumexp(-1).mean() + 3.0 * output.aux_loss


def _log_probs_of(output: Any) -> Tensor:
    return output.log_probs.sigmoid().mean() - 3.0 * output.aux_loss + output.loss


_LOSSES: dict[str, Any] = {
    "labels": lambda output: output.loss,
    "labels, own loss": lambda output: output.loss,
    "logits": _logits_of,
    "head": _log_probs_of,
}


@pytest.mark.parametrize(
    ("asks", "by_config"),
    [(asks, x) for index, asks in enumerate(_LOSSES) for x in turn([True, False], 2, index)],
)
def test_router_losses_beside_any_loss(asks: str, by_config: bool) -> None:
    loss = _LOSSES[asks]
    model: Any = build_tiny_model("qwen3_moe-router-loss")
    model.config.output_router_logits = by_config
    call: dict[str, Any] = make_batch(rows=2, tokens=TOKENS, padding=(0, 5))
    call |= {} if by_config else {"output_router_logits": True}
    if asks == "logits":
        del call["labels"]
    elif asks == "head":
        trl_utils = pytest.importorskip("trl.trainer.utils")
        # What its trainers write there, other than what the model was made with.
        model.config.router_aux_loss_coef = 0.7
        trl_utils.add_fused_lm_head(model)
        call["fused_lm_head"] = True
    elif asks == "labels, own loss":
        model.loss_function = lambda logits, labels, *_, **__: (logits**2)[labels >= 0].mean()

    def run(of: Any) -> tuple[Any, dict[str, Tensor]]:
        model.zero_grad()
        with float64_everywhere():
            output = of(**call)
            loss(output).backward()
        return output, {n: p.grad.clone() for n, p in model.named_parameters()}

    expected, expected_grads = run(model)
    output, grads = run(convert(model, _settings()))
    assert type(output) is type(expected)
    torch.testing.assert_close(output.aux_loss, expected.aux_loss)
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(grads, expected_grads)


@pytest.mark.parametrize(
    ("family", "autocast"),
    [
        (family, autocast)
        for index, family in enumerate(["qwen3_moe", "ernie4_5_moe", "gpt_oss"])
        for autocast in turn([False, True], 2, index)
    ],
)
def test_plans_count_what_the_router_loss_keeps(
    family: str, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    model: Any = convert(build_tiny_model(family, dtype=dtype), _settings(recompute="none"))
    engine = get_engine(model)
    assert engine is not None
    batch, kept, add = make_batch(rows=2, tokens=TOKENS), [], RouterLoss.add

    def save(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    def observed(self: RouterLoss, *args: Any) -> Tensor | None:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda saved: saved):
            return add(self, *args)

    monkeypatch.setattr(RouterLoss, "add", observed)
    tiles: list[tuple[set[str], int]] = []
    for asks in ({}, {"output_router_logits": True}, {}):
        kept.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(**batch, **asks).loss.backward()
        model.zero_grad()
        plan = engine.plan(2, TOKENS, torch.device("cpu"), router_loss=bool(asks))
        assert plan.estimate.device[Cause.ROUTERS] == sum(kept)
        assert bool(kept) == bool(asks)
        layer = engine.parts.layers[-1]
        found = token_wise(layer, torch.zeros(1, 1, plan.shape.hidden_size, dtype=dtype))
        tiles.append(({x.name for x in found}, plan.shape.layers[-1].tile_bytes))
    # Once there are Transformers' hooks they stay; modules with a router run in tiles all the same.
    assert tiles[0] == tiles[1] == tiles[2]
    assert "mlp" in tiles[0][0]


def test_the_keyword_switches_the_router_loss_off() -> None:
    model = convert(build_tiny_model("mixtral-router-loss"), _settings())
    batch = make_batch(tokens=TOKENS)
    with float64_everywhere():
        whole, alone = model(**batch), model(**batch, output_router_logits=False)
    torch.testing.assert_close(alone.loss, whole.loss - 0.1 * whole.aux_loss)
    assert "aux_loss" not in alone
    other = build_tiny_model("mixtral-router-loss", dtype=torch.float32)
    convert(other, _settings())(**batch, output_router_logits=False)
    assert not getattr(other.model, CAPTURES, False), "nothing of the model is asked for it"


def test_a_multimodal_models_routers_are_heard_once() -> None:
    """Its text decoder may have been hooked before, by a call that was not chunked."""
    model: Any = build_tiny_model("qwen3_vl_moe")
    model.config.text_config.output_router_logits = True
    batch = make_batch(rows=2, tokens=TOKENS, padding=(0, 9))
    model.eval()
    with float64_everywhere(), torch.no_grad():
        if model(**batch).get("aux_loss") is None:
            pytest.skip("Transformers 5.17 adds no router loss in this family")
        model.generate(batch["input_ids"][:1, :9], max_new_tokens=2, do_sample=False)
    report = compare(model.train(), batch, _settings(order="by_layer"))
    assert report.exact, str(report)


def test_a_model_without_experts_has_no_router_loss() -> None:
    model = convert(build_tiny_model("llama", dtype=torch.float32), _settings())
    with pytest.raises(UnsupportedModelError, match=r"has no loss of routers.*Leave the argument"):
        model(**make_batch(tokens=TOKENS), output_router_logits=True)


def test_a_pipeline_sums_the_router_losses_of_its_stages() -> None:
    torch.manual_seed(0)
    logits = [torch.randn(6, 4, requires_grad=True) for _ in range(3)]
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    whole, first, second = (
        RouterLoss(4, 2, 0.1, backward_by_chunk=chunked) for chunked in (False, True, True)
    )
    whole.add(tuple(logits), mask, (0, 2), (0, 3))
    value = whole.value()
    assert value is not None
    expected = torch.autograd.grad(value, logits)
    # Of two stages, one has two routers and one has one; a third has none.
    sums = [first.add((logits[0],), mask, (0, 2), (0, 3))]
    sums.append(second.add(tuple(logits[1:]), mask, (0, 2), (0, 3)))
    third = RouterLoss(4, 2, 0.1, backward_by_chunk=True)
    seen: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    for one in (first, second, third):
        one.sum_over_ranks(note, torch.device("cpu"))
    for one in (first, second, third):
        one.sum_over_ranks(lambda _: torch.stack(seen).sum(0), torch.device("cpu"))
        torch.testing.assert_close(one.value(), value)
    grads = torch.autograd.grad(sums, logits, [third.gradient()] * 2)
    torch.testing.assert_close(grads, expected)


def test_a_number_is_filled_in_on_the_device() -> None:
    """A copy from the host's memory would wait for the device."""
    with OperationNames() as operations, loss_module._WithoutWaiting():
        one = torch.tensor(1.0, device="cpu")
        several = torch.tensor([1, 2])
    assert operations.names[0] == "aten::full"
    assert torch.equal(one, torch.tensor(1.0))
    assert several.tolist() == [1, 2]
