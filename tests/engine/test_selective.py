"""Recording and replaying a layer's matmuls, on layers of a few lines."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode

from sppo_hf import SPPOError
from sppo_hf.engine.recompute import SavedTensor
from sppo_hf.engine.selective import Matmul, SelectiveRecorder, SelectiveReplayer
from tests.engine.measuring import MatmulCounter

D = 16
ROWS = 5

Forward = Callable[["Weights", Tensor], Tensor]


class Weights(nn.Module):
    """A layer's weights; each test has a forward for them."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))

        self.a, self.b, self.c = draw(D, D), draw(D, D), draw(D, D)
        self.thin_in, self.thin_out = draw(D, 2), draw(2, D)


def _input() -> Tensor:
    return torch.randn(ROWS, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _record(
    layer: Weights, forward: Forward, x: Tensor, *, model: nn.Module | None = None
) -> tuple[Tensor, list[Tensor], tuple[Matmul, ...]]:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        recorder.on_saved(tensor)
        saved.append(tensor.detach().clone())
        return tensor

    recorder = SelectiveRecorder(layer, x, hold=lambda _, tensor: SavedTensor(tensor), model=model)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        recorder.start()
        output = forward(layer, x)
        products = recorder.stop()
    return output, saved, products


def _play(
    layer: Weights, forward: Forward, x: Tensor, products: tuple[Matmul, ...]
) -> tuple[list[Tensor], int]:
    """Run again; return what autograd saves, and how many products were computed."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach().clone())
        return tensor

    counter = MatmulCounter()
    player = SelectiveReplayer(products, width=D, label="layer 3, chunk 1")
    with saved_tensors_hooks(pack, lambda tensor: tensor), counter, player:
        forward(layer, x)
    return saved, counter.count


def _kept(products: tuple[Matmul, ...]) -> list[bool]:
    return [product.output is not None for product in products]


def _mlp(w: Weights, x: Tensor) -> Tensor:
    return (torch.sigmoid(x @ w.a) * (x @ w.b)) @ w.c


def _add_in_place(w: Weights, x: Tensor) -> Tensor:
    y = x @ w.a
    y += 1.5
    return torch.sigmoid(y) @ w.b


def _copy_onto_itself(w: Weights, x: Tensor) -> Tensor:
    y = (x @ w.a).clone()
    y.detach().copy_(y.detach())
    return torch.sigmoid(y) @ w.b


def _write_into_a_view(w: Weights, x: Tensor) -> Tensor:
    y = torch.sigmoid(x @ w.a)  # needed, and then written into
    z = x @ w.b
    late = torch.sigmoid(z)
    z.view(-1)[3:7].mul_(2)
    return torch.sigmoid(z) + y + late


def _write_out(w: Weights, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = torch.empty(ROWS, D, dtype=x.dtype)
        torch.mm(x, w.a, out=y)
    return torch.sigmoid(y * (x @ w.b)) @ w.c


def _lora(w: Weights, x: Tensor) -> Tensor:
    return torch.sigmoid(x @ w.a + (x @ w.thin_in) @ w.thin_out) @ w.c


def _added(w: Weights, x: Tensor) -> Tensor:
    y = (x @ w.a).addmm_(x @ w.thin_in, w.thin_out, alpha=0.5)
    return torch.sigmoid(y) @ w.c


def _frozen_added(w: Weights, x: Tensor) -> Tensor:
    y = (x @ w.a).addmm_(x @ w.thin_in.detach(), w.thin_out.detach())
    return torch.sigmoid(y) @ w.c


def _added_late(w: Weights, x: Tensor) -> Tensor:
    y = x @ w.a
    gate = torch.sigmoid(y)  # saved, so the product as it is now has been kept
    return (gate * y.addmm_(x @ w.thin_in, w.thin_out)) @ w.c


def _added_after_a_read(w: Weights, x: Tensor) -> Tensor:
    y = x @ w.a
    more = y + 1  # of the product as it is now; nothing is saved yet
    y.addmm_(x @ w.thin_in, w.thin_out)
    return (torch.sigmoid(more) * y) @ w.c


def _merged(w: Weights, x: Tensor) -> Tensor:
    return torch.sigmoid(x @ (w.a @ w.b)) @ w.c


def _scattered(w: Weights, x: Tensor) -> Tensor:
    rows = torch.tensor([3, 0])
    unused = x @ w.c
    y = torch.zeros_like(x).index_add_(0, rows, x[rows] @ w.a)
    return torch.sigmoid(y) @ w.b + unused


def _routed(w: Weights, x: Tensor) -> Tensor:
    scores = (x @ w.a)[:, :3].detach()
    outputs = torch.zeros_like(x)
    for expert in scores.argmax(-1).unique().tolist():
        rows = torch.where(scores.argmax(-1) == expert)[0]
        outputs = outputs.index_add(0, rows, torch.sigmoid(x[rows] @ w.b) @ w.c)
    return outputs


def _decided(w: Weights, x: Tensor) -> Tensor:
    positive = bool((x @ w.a).sum() > -1e9)
    return torch.sigmoid(x @ w.b) if positive else torch.sigmoid(x)


def _drop_out(w: Weights, x: Tensor) -> Tensor:
    torch.manual_seed(5)
    unused = x @ w.a
    return nn.functional.dropout(torch.sigmoid(x @ w.b), 0.3) @ w.c + unused


def _batched(w: Weights, x: Tensor) -> Tensor:
    return torch.sigmoid(torch.bmm(x[None], w.a[None]))[0] + torch.sigmoid(
        nn.functional.linear(x, w.b, w.thin_out[0])
    )


LAYERS: dict[str, tuple[Forward, list[bool], int]] = {
    # The layer, which products are held, and how many are computed in the second run.
    "mlp": (_mlp, [True, True, False], 0),
    "add in place": (_add_in_place, [True, False], 0),
    "copy onto itself": (_copy_onto_itself, [True, False], 0),
    "write into a view": (_write_into_a_view, [True, True], 0),
    "write out": (_write_out, [True, False], 1),
    "lora": (_lora, [True, True, False], 1),
    # The sum in place of the first product, and the rerun adds nothing.
    "product added": (_added, [True, True, False], 0),
    "frozen product added": (_frozen_added, [True, False, False], 0),
    "product added late": (_added_late, [True, True, False], 1),
    "product added after a read": (_added_after_a_read, [True, True, False], 1),
    "merged weights": (_merged, [False, True, False], 1),
    "scattered into zeros": (_scattered, [False, True, False], 0),
    "routed": (_routed, [True] * 7, 0),  # adding by index saves what it adds
    "decided by a value": (_decided, [True, True], 0),
    "dropout": (_drop_out, [False, True, False], 0),
    "batched, with bias": (_batched, [True, True], 0),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_second_run_saves_the_same_and_computes_no_kept_product(name: str) -> None:
    forward, kept, computed = LAYERS[name]
    for _ in range(2):  # a layer's first recorder copies, others do not
        layer, x = Weights(), _input().requires_grad_()
        for _ in range(2):
            _, saved, products = _record(layer, forward, x)
            assert _kept(products) == kept
            again, count = _play(layer, forward, x, products)
            assert len(again) == len(saved)
            for ours, theirs in zip(again, saved, strict=True):
                assert torch.equal(ours, theirs)
            assert count == computed


class _Unseen(torch.autograd.Function):
    """A kernel that torch does not see: numpy writes into fresh memory, or into its input."""

    @staticmethod
    def forward(ctx, x, in_place):
        result = x if in_place else torch.empty_like(x)
        result.numpy()[...] = 2 * x.numpy() + 1
        return result.view_as(result) if in_place else result

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad, None


@pytest.mark.parametrize("in_place", [False, True])
def test_what_torch_does_not_see_is_respected(in_place: bool) -> None:
    def forward(w: Weights, x: Tensor) -> Tensor:
        return torch.sigmoid(_Unseen.apply(x @ w.a, in_place)) @ w.b

    layer, x = Weights(), _input().requires_grad_()
    for _ in range(3):
        _, saved, products = _record(layer, forward, x)
        assert _kept(products) == [True, False]
        again, count = _play(layer, forward, x, products)
        assert all(torch.equal(*pair) for pair in zip(again, saved, strict=True))
        assert count == 0


def test_a_write_that_a_layer_s_first_forward_did_not_have_is_respected_too() -> None:
    layer, x = Weights(), _input().requires_grad_()
    for forward in (lambda w, x: torch.sigmoid(x @ w.a) @ w.b, _add_in_place):
        _, saved, products = _record(layer, forward, x)
        again, _ = _play(layer, forward, x, products)
        assert all(torch.equal(*pair) for pair in zip(again, saved, strict=True))


def test_products_without_copies_share_the_output_s_memory() -> None:
    layer, x = Weights(), _input().requires_grad_()
    outputs: list[Tensor] = []

    def forward(w: Weights, x: Tensor) -> Tensor:
        outputs.append(x @ w.a)
        return torch.sigmoid(outputs[-1])

    shared = []
    for _ in range(2):
        _, _, (product,) = _record(layer, forward, x)
        assert product.output is not None
        shared.append(product.output.take().data_ptr() == outputs[-1].data_ptr())
    assert shared == [False, True], "only the first recorder of a layer copies"


def test_the_first_layer_of_a_kind_copies_for_all_of_its_model() -> None:
    """The last layer's copies would come when the device is full, and the host waits for each."""
    x = _input().requires_grad_()
    model = nn.ModuleList(Weights() for _ in range(3))
    for index, layer in enumerate(model):
        layer.layer_idx, layer.rotary = index, index != 1
    copied = []

    def forward(w: Weights, x: Tensor) -> Tensor:
        product = x @ w.a
        outputs.append(product.data_ptr())
        return torch.sigmoid(product)

    for layer in model:
        outputs: list[int] = []
        _, _, (product,) = _record(layer, forward, x, model=model)
        assert product.output is not None
        copied.append(product.output.take().data_ptr() not in outputs)
    assert copied == [True, True, False], "the second one is not of the first one's kind"


def test_operations_while_paused_are_not_products() -> None:
    layer, x = Weights(), _input().requires_grad_()
    recorder = SelectiveRecorder(layer, x, hold=lambda _, tensor: SavedTensor(tensor))
    recorder.start()
    y = x @ layer.a
    recorder.pause()
    outside = (y @ layer.b).detach()
    recorder.start(outside)
    _ = outside @ layer.c
    products = recorder.stop()
    assert [product.shapes[1] for product in products] == [layer.a.shape, layer.c.shape]
    assert not any(product.of_weights for product in products)
    assert _get_current_dispatch_mode() is None


def test_a_recorder_does_not_keep_the_graph_alive() -> None:
    layer, x = Weights(), _input().requires_grad_()
    output, _, products = _record(layer, _mlp, x)
    assert any(_kept(products))
    assert output.grad_fn is not None
    output.grad_fn.metadata["mark"] = mark = Weights()
    alive = weakref.ref(mark)
    del mark, output
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda w, x: torch.sigmoid(x[:2] @ w.a), r"matmul 0 was aten::mm of \(5, 16\) and"),
        (lambda w, x: torch.sigmoid(torch.addmm(x, x, w.a)), r"is aten::addmm of \(5, 16\)"),
        (lambda w, x: torch.sigmoid(x @ w.a) @ w.b, r"layer 3, chunk 1: .* 1 was not there"),
    ],
)
def test_a_layer_that_multiplies_differently_is_refused(other: Forward, message: str) -> None:
    layer, x = Weights(), _input().requires_grad_()
    _, _, products = _record(layer, lambda w, x: torch.sigmoid(x @ w.a), x)
    with pytest.raises(SPPOError, match=message):
        _play(layer, other, x, products)
    assert _get_current_dispatch_mode() is None
