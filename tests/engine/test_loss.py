"""The tiled loss against cross-entropy on whole logits: values, gradients, tiles, scales."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sppo_hf import SPPOError
from sppo_hf.engine.loss import ChunkedLoss, divide_loss

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
    expected_grads = torch.autograd.grad(3 * expected, leaves)
    for mine, theirs in zip(torch.autograd.grad(3 * ours, leaves), expected_grads, strict=True):
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


def test_second_backward_is_a_clear_error():
    value, _ = _chunked(*_problem(), tile=4)
    value.backward(retain_graph=True)
    with pytest.raises(SPPOError, match="backward ran twice"):
        value.backward()


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
