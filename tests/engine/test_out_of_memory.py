"""Memory runs out in the middle of a step, the user catches the error, and the next step is right.

On the CPU `torch.OutOfMemoryError` comes from wherever memory is taken: a layer, attention, the
copies of the offload engine, the loss; at the first, a middle and the last call of a step. On CUDA
memory really runs out. Afterwards nothing is offloaded, pools are empty, and loss and gradients are
bit by bit those of a step without a fault. The cases take turns at which of the three calls fails,
and, without `--all`, at which two of the four ways to keep activations are met.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import pytest
import torch
from torch import Tensor

from sppo_hf import SPPOConfig
from sppo_hf.attention.backends.aten import CPUFlash
from sppo_hf.engine.convert import convert, get_engine, revert
from sppo_hf.engine.engine import is_out_of_memory
from sppo_hf.engine.loss import ModelHead
from sppo_hf.engine.step_observer import StepObserver
from sppo_hf.errors import BudgetError
from sppo_hf.offload.copy_streams import HostCopier
from sppo_hf.offload.host_memory import HostPool, HostPoolFull
from sppo_hf.planning.cost import Correction
from sppo_hf.planning.decisions import Order
from sppo_hf.planning.plan import Plan
from sppo_hf.planning.prediction import MeasuredStep
from sppo_hf.testing.tiny_models import build_tiny_model
from tests.sweeps import turn

TOKENS = 48


@dataclass
class Fault:
    """Raises at one call of a step."""

    at: int = -1
    calls: int = 0
    raised: bool = False
    kind: type[Exception] = torch.OutOfMemoryError
    words: str = "CUDA out of memory. As injected"

    def __call__(self) -> None:
        """Count a call."""
        self.calls += 1
        if self.calls == self.at:
            self.raised = True
            raise self.kind(self.words)

    def arm(self, at: int) -> None:
        """Raise at the `at`-th call from now, the first being 1."""
        self.at, self.calls, self.raised = at, 0, False

    def disarm(self) -> None:
        """Raise no more."""
        self.at = -1


def _at_call_of(owner: type, name: str) -> Callable[..., None]:
    """Memory runs out when a method is called."""

    def inject(patch: pytest.MonkeyPatch, model: torch.nn.Module, fault: Fault) -> None:
        original = getattr(owner, name)

        def method(*args: object, **kwargs: object) -> object:
            fault()
            return original(*args, **kwargs)

        patch.setattr(owner, name, method)

    return inject


def _in_layers(patch: pytest.MonkeyPatch, model: torch.nn.Module, fault: Fault) -> None:
    """Memory runs out in front of an MLP; in backward too, where layers are recomputed."""
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: fault())


def _in_gradients(patch: pytest.MonkeyPatch, model: torch.nn.Module, fault: Fault) -> None:
    """Memory runs out where backward comes to a layer's input."""

    def hook(module: object, args: tuple[Tensor, ...]) -> None:
        if args[0].requires_grad:
            args[0].register_hook(lambda _: fault())

    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(hook)


def _in_values(patch: pytest.MonkeyPatch, model: torch.nn.Module, fault: Fault) -> None:
    """Memory runs out in the backward of a layer's values, while its queries and keys wait."""

    def hook(module: object, args: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: fault())

    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(hook)


PLACES = {
    "a layer": _in_layers,
    "a layer's backward": _in_gradients,
    "values' backward": _in_values,
    "attention": _at_call_of(CPUFlash, "forward"),
    "attention's backward": _at_call_of(CPUFlash, "backward"),
    "a copy out": _at_call_of(HostCopier, "start_d2h"),
    "a copy back": _at_call_of(HostCopier, "start_h2d"),
    "host memory": _at_call_of(HostPool, "try_allocate"),
    "the loss": _at_call_of(ModelHead, "logits"),
}
MODES = {
    "activations offloaded": {"offload": "full", "recompute": "none"},
    "inputs offloaded": {"offload": "full", "recompute": "full"},
    "inputs and K/V offloaded": {"offload": "full", "recompute": "full", "offload_kv": "full"},
    "by chunk": {"offload": "full", "recompute": "none", "order": "by_chunk"},
}

MOMENTS = ("first", "middle", "last")
"""Calls of a step."""


class AtStart(StepObserver):
    """Looks at the engine when the first chunk of a forward begins."""

    def __init__(self) -> None:
        self.model: torch.nn.Module | None = None
        self.in_base = False
        """Whether the base model is running by then: once for all chunks of a layer."""

    def on_plan(self, plan: Plan, model_name: str) -> None:
        self.in_base = plan.order == "by_layer"

    def on_correction(self, before: Plan, after: Plan, measured: MeasuredStep) -> None:
        self.in_base = after.order == "by_layer"

    def on_unit(self, direction: str, chunk: int, num_chunks: int) -> None:
        if (direction, chunk) == ("forward", 0) and self.model is not None:
            assert_clean(self.model, running=self.in_base)


def make_model(
    device: torch.device, mode: str, overrides: dict[str, int] | None = None
) -> torch.nn.Module:
    """A small model that offloads all it can."""
    torch.manual_seed(0)
    model = build_tiny_model(
        "llama", dtype=torch.float32, **{"num_hidden_layers": 2, **(overrides or {})}
    )
    model.to(device).train()
    shared = {"num_chunks": 4, "show_plan": False, "min_offload_size": 1}
    observer = AtStart()
    convert(model, SPPOConfig(**shared, **MODES[mode]), observer=observer)
    observer.model = model
    return model


def step(model: torch.nn.Module, ids: Tensor) -> list[Tensor]:
    """Loss and gradients; a failing step leaves no local behind."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def failing_step(model: torch.nn.Module, ids: Tensor) -> None:
    """A step whose out-of-memory error is caught, as in a training loop."""
    try:
        step(model, ids)
    except torch.OutOfMemoryError:
        model.zero_grad()
    else:
        pytest.fail("memory did not run out")


def assert_clean(model: torch.nn.Module, *, running: bool = False) -> None:
    """Nothing is offloaded, no host memory is used, and a forward is running or not, as given."""
    offload = get_engine(model).offload
    offload.assert_drained()
    if offload.device.type == "cuda":
        torch.cuda.synchronize()
    stats = offload.stats()
    assert stats.live_handles == stats.host_used_bytes == 0
    assert (get_engine(model).running is not None) is running


def assert_equal(ours: list[Tensor], expected: list[Tensor]) -> None:
    """Compare bit by bit."""
    for one, other in zip(ours, expected, strict=True):
        assert torch.equal(one, other)


def assert_near(ours: list[Tensor], expected: list[Tensor]) -> None:
    """Compare in float32, where the order of sums may change from run to run."""
    for one, other in zip(ours, expected, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm().clamp_min(1e-6)


def fail_and_recover(
    model: torch.nn.Module,
    ids: Tensor,
    expected: list[Tensor],
    *,
    then: Callable[[], object],
    compare: Callable[[list[Tensor], list[Tensor]], None] = assert_equal,
) -> None:
    """A step runs out of memory, `then` there is enough, and the next one is right.

    What is left of the failed step is gone when the first chunk begins, see `AtStart`.
    """
    try:
        failing_step(model, ids)
    finally:
        then()
    compare(step(model, ids), expected)
    assert_clean(model)


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Context without garbage collection: memory is freed by its last owner alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@functools.cache
def _without_a_fault(mode: str) -> tuple[Tensor, list[Tensor]]:
    """Tokens, and what a step of `make_model` gives on them."""
    model = make_model(torch.device("cpu"), mode)
    ids = torch.randint(0, 97, (2, TOKENS))
    return ids, step(model, ids)


@pytest.mark.parametrize(
    ("place", "mode", "moment"),
    [
        (place, mode, moment)
        for index, place in enumerate(PLACES)
        for number, mode in enumerate(turn(list(MODES), 2, index))
        for moment in turn(MOMENTS, 3, index + number)
    ],
)
def test_the_next_step_is_exact(
    monkeypatch: pytest.MonkeyPatch, place: str, mode: str, moment: str
) -> None:
    ids, expected = _without_a_fault(mode)
    model, fault = make_model(torch.device("cpu"), mode), Fault()
    PLACES[place](monkeypatch, model, fault)
    assert_equal(step(model, ids), expected)
    calls = fault.calls
    assert calls > 1, "the place is passed in a step"
    with no_collector():
        fault.arm({"first": 1, "middle": (calls + 1) // 2, "last": calls}[moment])
        fail_and_recover(model, ids, expected, then=fault.disarm)
        assert fault.raised


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_that_outlives_its_failed_backward(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """A loop that catches the error keeps `loss` until the next forward ends."""
    model, fault = make_model(torch.device("cpu"), mode), Fault()
    ids = torch.randint(0, 97, (2, TOKENS))
    expected = step(model, ids)
    PLACES["attention's backward"](monkeypatch, model, fault)
    get_engine(model).observer.model = None  # at its first chunk the failed step is still held
    for at in (3, -1):
        fault.arm(at)
        model.zero_grad()
        try:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        except torch.OutOfMemoryError:
            assert at == 3
    assert_equal([loss.detach(), *(p.grad for p in model.parameters())], expected)
    del loss
    assert_clean(model)


def test_evaluation_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fault = make_model(torch.device("cpu"), "inputs and K/V offloaded"), Fault()
    ids = torch.randint(0, 97, (2, TOKENS))
    with torch.no_grad():
        expected = model(input_ids=ids, labels=ids).loss
    PLACES["attention"](monkeypatch, model, fault)
    fault.arm(5)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        model(input_ids=ids, labels=ids)
    fault.arm(-1)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, labels=ids).loss, expected)
    assert_clean(model)


@pytest.mark.parametrize(
    ("mode", "orders"),
    [
        (mode, orders)
        for index, mode in enumerate(name for name, mode in MODES.items() if "order" not in mode)
        for orders in turn([("by_layer", "by_chunk"), ("by_chunk", "by_layer")], 2, index)
    ],
)
def test_a_plan_that_was_corrected_to_another_order(
    monkeypatch: pytest.MonkeyPatch, mode: str, orders: tuple[Order, Order]
) -> None:
    """As on a device that other processes slow down: measured speeds make another order faster."""
    ids, expected = _without_a_fault(mode)
    model, fault = make_model(torch.device("cpu"), mode), Fault()
    PLACES["attention"](monkeypatch, model, fault)
    plans = get_engine(model).plans

    def prefer(order: Order) -> None:
        monkeypatch.setattr(plans, "_config", plans._config.replace(order=order))

    prefer(orders[0])
    assert_equal(step(model, ids), expected)
    (before,) = plans._plans.values()
    slow = MeasuredStep(forward_seconds=(1.0,), backward_seconds=(1.0,), stall_seconds=0.0)
    corrections = [(before, slow, Correction(forward=16.0))]  # of a plan that is there once
    monkeypatch.setattr(plans, "_new_corrections", lambda: iter(corrections))
    prefer(orders[1])
    assert_equal(step(model, ids), expected)
    (after,) = plans._plans.values()
    assert (before.order, after.order) == orders
    with no_collector():
        fault.arm(5)
        fail_and_recover(model, ids, expected, then=fault.disarm)
        assert fault.raised


# -- a first forward is planned anew, once -------------------------------------------------------

BUDGET = 64 * 2**20


class Plans(StepObserver):
    """Notes the device budgets of the plans that are shown."""

    def __init__(self) -> None:
        self.budgets: list[int | None] = []

    def on_plan(self, plan: Plan, model_name: str) -> None:
        self.budgets.append(plan.budgets.device)


def budgeted(dropout: float = 0.0) -> tuple[torch.nn.Module, Plans, Tensor]:
    """A model with a device budget, its plans and a batch."""
    torch.manual_seed(0)
    model = build_tiny_model("llama", dtype=torch.float32).train()
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.Sequential(layer.mlp.act_fn, torch.nn.Dropout(dropout))
    plans = Plans()
    settings = {"num_chunks": 4, "show_plan": False, "offload": "full", "min_offload_size": 1}
    convert(model, SPPOConfig(device_memory=BUDGET, **settings), observer=plans)
    torch.manual_seed(1)
    return model, plans, torch.randint(0, 97, (2, TOKENS))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (torch.OutOfMemoryError, "CUDA out of memory. As injected"),
        (RuntimeError, "CUDA ran out of memory outside PyTorch's allocator. As injected"),
        (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        (RuntimeError, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    ],
    ids=["allocator", "driver", "cublas", "cudnn"],
)
def test_a_first_forward_is_run_again_with_less_memory(
    monkeypatch: pytest.MonkeyPatch, kind: type[RuntimeError], words: str
) -> None:
    model, plans, ids = budgeted(dropout=0.3)
    expected = step(model, ids)
    model, plans, ids = budgeted(dropout=0.3)
    fault = Fault(kind=kind, words=words)
    PLACES["attention"](monkeypatch, model, fault)
    fault.arm(5)
    with no_collector(), pytest.warns(UserWarning, match="memory ran out in the first forward"):
        ours = step(model, ids)
    assert fault.raised
    assert plans.budgets == [BUDGET, int(0.95 * BUDGET)]
    assert_equal(ours, expected)  # dropout's draws are those of the first try
    assert_clean(model)


def test_only_the_first_forward_is_run_again_and_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, plans, ids = budgeted()
    fault = Fault()
    PLACES["attention"](monkeypatch, model, fault)
    fault.arm(5)
    with pytest.warns(UserWarning, match="memory ran out"):
        step(model, ids)
    fault.arm(5)
    failing_step(model, ids)  # a forward under this plan has come to its end before
    fault.arm(5)
    failing_step(model, ids[:, :40])  # another plan, but that was the second time
    assert plans.budgets == [BUDGET, int(0.95 * BUDGET), int(0.95 * BUDGET)]


def test_plans_that_ran_keep_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plans, ids = budgeted()
    step(model, ids[:, :40])
    fault = Fault()
    PLACES["attention"](monkeypatch, model, fault)
    fault.arm(5)
    with pytest.warns(UserWarning, match="memory ran out"):
        step(model, ids)
    fault.disarm()
    step(model, ids[:, :40])
    step(model, ids)
    assert plans.budgets == [BUDGET, BUDGET, int(0.95 * BUDGET)]


def test_a_first_forward_is_run_again_with_less_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ends of slabs may hold more than a plan allows for, whose pieces then find no place."""

    class Budgets(AtStart):
        def on_plan(self, plan: Plan, model_name: str) -> None:
            super().on_plan(plan, model_name)
            host.append(plan.budgets.host)

    host: list[int | None] = []
    settings = {"num_chunks": 4, "show_plan": False, "offload": "full", "min_offload_size": 1}
    torch.manual_seed(0)
    model = build_tiny_model("llama", dtype=torch.float32).train()
    ids = torch.randint(0, 97, (2, TOKENS))
    convert(model, SPPOConfig(host_memory=BUDGET, **settings))
    expected = step(model, ids)
    revert(model)
    observer = Budgets()
    convert(model, SPPOConfig(host_memory=BUDGET, **settings), observer=observer)
    observer.model = model
    fault = Fault(kind=HostPoolFull, words="offloading needs 8 bytes more in one piece")
    _at_call_of(HostPool, "allocate")(monkeypatch, model, fault)
    monkeypatch.setattr(HostPool, "try_allocate", lambda self, num_bytes: None)
    fault.arm(5)
    with no_collector(), pytest.warns(UserWarning, match="the host's memory ran out in the first"):
        ours = step(model, ids)
    assert host == [BUDGET, int(0.95 * BUDGET)]
    assert_equal(ours, expected)
    assert_clean(model)
    fault.arm(5)
    with pytest.raises(HostPoolFull, match="in one piece"):
        step(model, ids[:, :40])  # that was the second time


def test_other_errors_do_not_shrink_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plans, ids = budgeted()
    fault = Fault(kind=RuntimeError, words="shapes do not fit")
    PLACES["attention"](monkeypatch, model, fault)
    fault.arm(5)
    with pytest.raises(RuntimeError, match="do not fit"):
        step(model, ids)
    assert plans.budgets == [BUDGET]


# -- where memory really runs out ----------------------------------------------------------------


NEEDED_BYTES = 4 * 2**30
"""Of device and of host memory: steps take one and three GiB, and plans leave as much."""


class Card:
    """This process' share of the CUDA device's memory."""

    def __init__(self) -> None:
        self.total_bytes = torch.cuda.mem_get_info()[1]

    def leave(self, num_bytes: float) -> int:
        """Let the allocator take `num_bytes` more than what is in use; returns how much in all."""
        torch.cuda.empty_cache()
        limit_bytes = int(torch.cuda.memory_reserved() + num_bytes)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / self.total_bytes))
        return limit_bytes

    def free(self) -> None:
        """Let it take all."""
        torch.cuda.set_per_process_memory_fraction(1.0)

    def is_filled_by_others(self) -> bool:
        """Whether other processes, such as tests beside this one, leave too little memory."""
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() < NEEDED_BYTES

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Context of steps that fit, or the test is skipped if others have filled the device."""
        try:
            yield
        except (BudgetError, RuntimeError) as error:
            ran_out = isinstance(error, BudgetError) or is_out_of_memory(error)
            if not ran_out or not self.is_filled_by_others():
                raise
            pytest.skip("other processes have filled the device")


@pytest.fixture
def card() -> Iterator[Card]:
    card = Card()
    torch.cuda.empty_cache()
    if card.is_filled_by_others() or psutil.virtual_memory().available < NEEDED_BYTES:
        pytest.skip("needs 4 GiB of free device memory and 4 GiB of host memory")
    yield card
    card.free()
    torch.cuda.empty_cache()


# For a chunk of 8,192 tokens an MLP's intermediate is 64 MiB, and a layer saves about 350 MiB.
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2**15,
}


def _on_cuda(mode: str, tokens: int) -> tuple[torch.nn.Module, Tensor, list[Tensor], int]:
    """Model, tokens, what a step gives, and the bytes that a step takes beside what stays.

    The fewest of three steps, since copies that other processes slow down take more.
    """
    device = torch.device("cuda")
    model = make_model(device, mode, WIDE)
    ids = torch.randint(0, 97, (1, tokens), device=device)
    step(model, ids)
    expected = step(model, ids)
    step_bytes: list[int] = []
    for _ in range(3):
        # The first of these steps finds the times of the last one and may correct the plan, to
        # another order too where other processes slow the device down; later ones do not.
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        assert_near(step(model, ids), expected)
        assert_clean(model)
        step_bytes.append(torch.cuda.max_memory_allocated() - before)
    return model, ids, expected, min(step_bytes)


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.2, 0.4, 0.6])
@pytest.mark.parametrize("mode", MODES)
def test_a_device_that_is_too_small(card: Card, mode: str, share: float) -> None:
    with card.shared():
        # The allocator takes 20 MiB at a time: a step has to take many times that.
        model, ids, expected, step_bytes = _on_cuda(mode, tokens=2**15)
        assert step_bytes > 2**28, "too small a step to cut a share of"
        for _ in range(3):
            allocated_bytes = torch.cuda.memory_allocated()
            card.leave(share * step_bytes)
            fail_and_recover(model, ids, expected, then=card.free, compare=assert_near)
            assert torch.cuda.memory_allocated() <= allocated_bytes + 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["a layer", "a layer's backward"])
@pytest.mark.parametrize("mode", MODES)
def test_a_ballast_that_is_too_large(
    card: Card, monkeypatch: pytest.MonkeyPatch, mode: str, place: str
) -> None:
    class Ballast(Fault):
        def __call__(self) -> None:
            self.calls += 1
            if self.calls == self.at:
                self.raised = True
                torch.empty(limit_bytes, dtype=torch.uint8, device="cuda")

    with card.shared():
        model, ids, expected, step_bytes = _on_cuda(mode, tokens=512)
        limit_bytes = card.leave(step_bytes + 2**28)
        fault = Ballast()
        PLACES[place](monkeypatch, model, fault)
        assert_near(step(model, ids), expected)
        calls = fault.calls
        for at in sorted({1, (calls + 1) // 2, calls}):
            fault.arm(at)
            fail_and_recover(model, ids, expected, then=fault.disarm, compare=assert_near)
            assert fault.raised
