"""Host-resident weights on the fake device: at any speeds nothing races.

No byte is read before it is there or written while somebody reads it, and sums are right.
"""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.nn import Parameter

from sppo_hf.errors import OffloadError
from sppo_hf.offload.copy_streams import StreamCopier
from sppo_hf.offload.host_memory import ALIGNMENT_BYTES
from sppo_hf.offload.weights import HostWeights, _Accumulation, can_be_host_resident
from sppo_hf.planning.model_shape import HostResident
from tests.fakes.device import FakeDevice, RaceError

LAYERS = 4
SECONDS = st.lists(st.sampled_from([0.0, 0.1, 1.0, 7.0, 50.0]), min_size=1, max_size=7)


class _Model:
    """Four layers of two weights and one weight outside, as the host would enqueue their work."""

    def __init__(
        self,
        copies: list[float],
        work: list[float],
        *,
        keep_device_copies: bool,
        locked: bool = False,
        trained: bool = True,
    ) -> None:
        self.copies, self.work = itertools.cycle(copies), itertools.cycle(work)
        self.device = FakeDevice(lambda stream, num_bytes: next(self.copies))
        self.layers = [
            [Parameter(torch.rand(8), trained), Parameter(torch.rand(2, 3), trained)]
            for _ in range(LAYERS)
        ]
        self.other = Parameter(torch.rand(5), trained)
        self.weights = HostWeights(
            self.layers,
            [self.other],
            copier=StreamCopier(self.device),
            keep_device_copies=keep_device_copies,
            locker=self.device if locked else None,
        )
        self.processor = self.device.new_stream()
        # Backward is played here without autograd, which calls back at its end.
        self.weights._notice_end = lambda: None  # type: ignore[method-assign]
        self.weights._add = self.sum_up  # type: ignore[method-assign]

    def sum_up(self, sum_: _Accumulation) -> None:
        """Add a gradient as `HostWeights` does, as work of the host that the fake device sees."""
        gradient = sum_.weight.gradient
        assert gradient is not None
        self.on_host(sum_.arrived, writes=False)
        self.on_host(gradient, writes=True)
        HostWeights._add(self.weights, sum_)

    def on_host(self, memory: torch.Tensor, *, writes: bool) -> None:
        """Access host memory from the host, which waits until that is over."""
        self.device.host_memory(self.processor, memory, 0.0, writes=writes)
        over = self.device.new_event(timed=False)
        over.record(self.processor)
        over.synchronize()

    def use(self, parameters: list[Parameter]) -> None:
        self.device.kernel(reads=[p.data for p in parameters], seconds=next(self.work))

    def forward(self) -> None:
        self.weights.start_forward()
        for index, layer in enumerate(self.layers):
            self.weights.enter_layer(index)
            self.use([*layer, self.other])

    def backward(self, value: float) -> None:
        for index in reversed(range(LAYERS)):
            self.weights.enter_layer(index, backward=True)
            self.use([*self.layers[index], self.other])
            for parameter in self.layers[index]:
                self.take(parameter, value)
        self.take(self.other, value)
        self.weights.move_to_host()

    def take(self, parameter: Parameter, value: float) -> None:
        weight = self.weights._weight_of[id(parameter)]
        self.weights._before_gradient(weight, parameter)
        full = torch.full(parameter.shape, value)
        parameter.grad = self.device.tensor(full, next(self.work))
        self.weights._after_gradient(weight, parameter)

    def step(self) -> None:
        """The host writes into all host-resident weights."""
        for parameter in [self.other, *itertools.chain(*self.layers)]:
            self.on_host(parameter.data, writes=True)
            parameter.data += 1


@given(
    copies=SECONDS,
    work=SECONDS,
    keep_device_copies=st.booleans(),
    batches=st.integers(1, 3),
    locked=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_nothing_races(
    copies: list[float], work: list[float], keep_device_copies: bool, batches: int, locked: bool
) -> None:
    model = _Model(copies, work, keep_device_copies=keep_device_copies, locked=locked)
    for _ in range(2):
        for batch in range(batches):
            model.forward()
            model.backward(2.0**batch)
        for parameter in [model.other, *itertools.chain(*model.layers)]:
            model.device.host_memory(model.processor, parameter.grad, 0.0, writes=False)
            assert torch.all(parameter.grad == 2.0**batches - 1)
            parameter.grad = None
        model.forward()  # its loss is dropped
        model.weights.move_to_host()
        model.step()


@pytest.mark.parametrize("keep_device_copies", [False, True])
def test_only_the_layer_in_use_and_the_next_are_on_the_device(keep_device_copies: bool) -> None:
    model = _Model([1.0], [1.0], keep_device_copies=keep_device_copies)
    model.forward()
    model.backward(1.0)
    layer, other = 4 * (8 + 2 * 3), 4 * 5
    assert model.weights.peak_bytes == (LAYERS if keep_device_copies else 2) * layer + other
    assert model.weights.device_bytes == 0


@pytest.mark.parametrize("full_at", range(1 + 2 * LAYERS))
@pytest.mark.parametrize("keep_device_copies", [False, True])
def test_nothing_is_left_on_a_device_that_was_full(
    monkeypatch: pytest.MonkeyPatch, keep_device_copies: bool, full_at: int
) -> None:
    copies, start_h2d = itertools.count(), StreamCopier.start_h2d

    def start(copier: StreamCopier, host: torch.Tensor) -> object:
        if next(copies) == full_at:
            raise torch.OutOfMemoryError("as injected")
        return start_h2d(copier, host)

    monkeypatch.setattr(StreamCopier, "start_h2d", start)
    model = _Model([50.0], [1.0], keep_device_copies=keep_device_copies)
    with pytest.raises(torch.OutOfMemoryError):
        model.forward()
    model.weights.move_to_host()
    assert model.weights.device_bytes == 0
    assert all(weight.ticket is None for weight in model.weights._all())
    model.forward()
    model.backward(1.0)
    model.step()


def test_the_host_waits_for_copies_from_memory_that_it_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _Model([50.0], [0.0], keep_device_copies=False)
    model.forward()
    model.weights._last_h2d = None  # as if nobody had to wait
    model.weights.move_to_host()
    with pytest.raises(RaceError):
        model.step()


@pytest.mark.parametrize("keep_device_copies", [False, True])
def test_the_host_may_write_frozen_weights_after_a_forward(keep_device_copies: bool) -> None:
    """As a reference model's are that follow the trained ones, or by `load_state_dict`."""
    model = _Model([50.0], [0.0], keep_device_copies=keep_device_copies, trained=False)
    model.forward()
    model.weights.move_to_host()
    model.step()
    model.forward()


def test_replaced_data_leave_the_former_bytes_to_whoever_holds_them() -> None:
    model = _Model([50.0], [0.0], keep_device_copies=False)
    model.forward()  # its loss is dropped
    weight = model.weights._weight_of[id(model.layers[-1][0])]
    former, values = weight.host, weight.host.clone()
    weight.parameter.data = torch.full((8,), 3.0)
    model.forward()
    assert torch.equal(former, values)
    assert torch.all(weight.parameter.data == 3.0)


def test_a_view_of_a_weight_reads_its_bytes_at_backward() -> None:
    model = _Model([1.0], [1.0], keep_device_copies=False)
    parameter = model.layers[0][1]
    model.forward()
    view = model.weights.saved_view_of(parameter.t(), "layer 0")
    assert view is not None
    assert model.weights.saved_view_of(torch.rand(2, 3)) is None
    model.weights.enter_layer(0, backward=True)
    made = view.make()
    assert torch.equal(made, parameter.detach().t())
    assert made.data_ptr() == parameter.data_ptr()
    with torch.no_grad():
        parameter.mul_(2)
    with pytest.raises(OffloadError, match=r"a weight of layer 0, torch.float32, shape \(2, 3\)"):
        view.make()


def _run(model: _Model, batches: int) -> list[torch.Tensor]:
    """Run some batches; return their gradients, which are removed."""
    for batch in range(batches):
        model.forward()
        model.backward(2.0**batch)
    parameters = [model.other, *itertools.chain(*model.layers)]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients


def test_locked_bytes_are_the_planned_ones() -> None:
    model = _Model([50.0], [0.0], keep_device_copies=False, locked=True)
    layers, other = [8 * 4 + 6 * 4] * LAYERS, 5 * 4
    resting = HostResident(
        layer_bytes=tuple(layers),
        outer_bytes=other,
        keeps_device_copies=False,
        layer_gradient_bytes=tuple(layers),
        outer_gradient_bytes=other,
        optimizer_bytes=0,
    )
    rounded = ALIGNMENT_BYTES * 2 * (2 * LAYERS + 1)  # each tensor begins at a multiple of it
    locked = model.device.locked
    once = sum(locked.values())
    assert resting.held_bytes <= once <= resting.held_bytes + rounded
    for _ in range(3):
        _run(model, 1)
        assert sum(locked.values()) == once
    for _ in range(3):
        for gradient in _run(model, 3):
            assert torch.all(gradient == 7.0)
        # The host was ahead of all copies, and gradients of two layers at most were on their way.
        assert once < sum(locked.values()) <= once + resting.arriving_bytes + 2 * ALIGNMENT_BYTES
    del gradient
    model.weights.close()
    for parameter in [model.other, *itertools.chain(*model.layers)]:
        parameter.data = (
            parameter.data.clone()
        )  # the fake device is the host, so it is where it was
    model.weights = None
    assert not locked


def test_a_gradient_that_is_still_held_is_not_overwritten() -> None:
    model = _Model([1.0], [1.0], keep_device_copies=False, locked=True)
    kept = _run(model, 1)
    _run(model, 2)
    assert all(torch.all(gradient == 1.0) for gradient in kept)
    places = {gradient.data_ptr() for gradient in kept}
    del kept
    assert {gradient.data_ptr() for gradient in _run(model, 1)} == places


def test_a_gradient_of_another_dtype_keeps_it() -> None:
    device = FakeDevice()
    parameter = Parameter(torch.zeros(3, dtype=torch.bfloat16))
    parameter.grad_dtype = torch.float32
    parameter.grad = torch.full((3,), 1 + 2**-12)
    HostWeights([], [parameter], copier=StreamCopier(device), locker=device)
    assert torch.equal(parameter.grad, torch.full((3,), 1 + 2**-12))


def test_host_resident_weights_are_saved_tensor_by_tensor(tmp_path: Path) -> None:
    model = _Model([1.0], [1.0], keep_device_copies=False, locked=True)
    _run(model, 1)
    parameters = itertools.chain(*model.layers)
    state = {f"weight {number}": p.detach() for number, p in enumerate(parameters)}
    for tensor in state.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    save_file(state, tmp_path / "model.safetensors")  # refuses tensors that share memory
    buffer = io.BytesIO()
    torch.save(state, buffer)
    assert len(buffer.getvalue()) < sum(t.nbytes for t in state.values()) + 1024 * (len(state) + 2)
    buffer.seek(0)
    for name, tensor in torch.load(buffer).items():
        assert torch.equal(tensor, state[name])


def test_host_resident_weights_keep_their_memory_for_the_next_owner() -> None:
    model = _Model([1.0], [1.0], keep_device_copies=True, locked=True)
    copier = StreamCopier(model.device)
    at = [p.data_ptr() for p in model.layers[0]]
    locked = dict(model.device.locked)
    model.weights.release()
    more = Parameter(torch.rand(7), requires_grad=False)
    model.layers[0].append(more)
    model.weights = HostWeights(
        model.layers, [model.other], copier=copier, locker=model.device, previous=model.weights
    )
    model.weights._notice_end = lambda: None  # type: ignore[method-assign]
    assert [p.data_ptr() for p in model.layers[0][:2]] == at
    assert sum(model.device.locked.values()) == sum(locked.values()) + ALIGNMENT_BYTES
    model.layers[0].pop()
    assert all(torch.all(gradient == 1.0) for gradient in _run(model, 1))


def test_quantized_and_sharded_parameters_are_not_host_resident() -> None:
    assert can_be_host_resident(Parameter(torch.rand(2)))
    assert not can_be_host_resident(
        Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    )
    assert not can_be_host_resident(Parameter(torch.rand(2, device="meta")))
    assert not can_be_host_resident(Parameter(torch.rand(0)))
