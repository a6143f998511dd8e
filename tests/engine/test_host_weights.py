"""Weights and optimizer on the host: exact, never read there, and few on the device at a time.

On a CPU a weight could be read while it is on the host, which a GPU could not do. So while it is
there, the parameter and its former copy on the device are NaN here. A weight that moves to another
device loses autograd's node that accumulates its gradient; here it does so too.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch

from sppo_hf.config import SPPOConfig
from sppo_hf.engine import plan_cache, weight_placement
from sppo_hf.engine.convert import convert, get_engine, revert
from sppo_hf.engine.device_facts import model_shape
from sppo_hf.engine.family_guard import family_check_disabled
from sppo_hf.engine.model_parts import find_parts
from sppo_hf.errors import ConfigError, SPPOError
from sppo_hf.offload import weights as host
from sppo_hf.offload.copy_streams import HostCopier
from sppo_hf.planning.activation_modes import KEEP, ActivationMode
from sppo_hf.planning.choices import DeviceFacts, Placement
from sppo_hf.planning.memory import CONTEXT_BYTES, Budgets
from sppo_hf.testing.exactness import compare, float64_everywhere
from sppo_hf.testing.tiny_models import add_lora, build_tiny_model, make_batch
from tests.engine.forced_plans import force_modes, trace_short_scans
from tests.fakes.device import FakeDevice
from tests.sweeps import turn

FAMILIES = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_moe", "gpt2", "qwen3_next")
MODES = (KEEP, ActivationMode("matmuls", "device"), ActivationMode("inputs", "device"))
PLACES = ({"weights": "host"}, {"optimizer": "host"}, {"weights": "host", "optimizer": "device"})


@pytest.fixture(autouse=True)
def _away_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    start, move = host.HostWeights.start_forward, host.HostWeights.move_to_host

    def put_away(weight: host._Weight, *, keep_writes: bool = False) -> None:
        if weight.device is not None:
            weight.device.fill_(torch.nan)
        # Another dtype does what another device does.
        weight.parameter.data = torch.empty(0, dtype=torch.float16)
        weight.parameter.data = torch.full_like(weight.host, torch.nan)
        weight.device = weight.ticket = None

    def start_with_nan(weights: host.HostWeights) -> None:
        start(weights)
        for group in weights._layers:
            for weight in group:
                weight.parameter.data = torch.full_like(weight.host, torch.nan)

    def move_and_show(weights: host.HostWeights, *, keep_writes: bool = False) -> None:
        move(weights, keep_writes=keep_writes)
        for weight in weights._all():
            weight.parameter.data = weight.host

    monkeypatch.setattr(host._Weight, "to_host", put_away)
    # The next forward would take the NaN for new values of the weight.
    monkeypatch.setattr(host._Weight, "adopt_replaced_data", lambda weight: None)
    monkeypatch.setattr(host.HostWeights, "start_forward", start_with_nan)
    monkeypatch.setattr(host.HostWeights, "move_to_host", move_and_show)


@pytest.mark.parametrize(
    ("family", "places"),
    [
        pytest.param(family, places, id=f"{family}-{places}")
        for index, family in enumerate(FAMILIES)
        for places in (turn(PLACES, 3, index) if index else PLACES)
    ],
)
def test_weights_on_the_host_are_exact(
    family: str, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace_short_scans(monkeypatch)
    force_modes(monkeypatch, lambda chunk, layer: MODES[(chunk + layer) % len(MODES)])
    model = build_tiny_model(family, dtype=torch.float64)
    config = SPPOConfig(chunk_lengths=(5, 9, 7), **places)
    with family_check_disabled():  # what the check at conversion would find is found here
        report = compare(model, make_batch(rows=2, tokens=21), config)
    assert report.exact, str(report)


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_adapters_are_exact(places: dict[str, str]) -> None:
    model = add_lora(build_tiny_model("llama", dtype=torch.float64))
    config = SPPOConfig(chunk_lengths=(5, 9, 7), **places)
    report = compare(model, make_batch(rows=2, tokens=21), config)
    assert report.exact, str(report)


def test_an_optimizer_on_the_host_takes_rows_in_groups() -> None:
    """Copies stay until backward, so that a weight gets the sum of the gradients of all groups."""
    model = build_tiny_model("llama", dtype=torch.float64)
    config = SPPOConfig(chunk_lengths=(5, 9, 7), optimizer="host", micro_batch_size=1)
    report = compare(model, make_batch(rows=2, tokens=21), config)
    assert report.exact, str(report)


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Have host-resident weights page-locked, as on CUDA; returns what locks them."""
    device = FakeDevice()
    monkeypatch.setattr(HostCopier, "page_locker", device)
    return device


def test_weights_in_locked_memory_are_exact(
    locked: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = (*MODES, ActivationMode("whole", "host"))
    force_modes(monkeypatch, lambda chunk, layer: modes[(chunk + layer) % len(modes)])
    most = [0]
    locked.on_lock = lambda *_: most.append(sum(locked.locked.values()))
    model = build_tiny_model("llama", dtype=torch.float64)
    config = SPPOConfig(chunk_lengths=(5, 9, 7), weights="host", optimizer="host")
    report = compare(model, make_batch(rows=2, tokens=21), config)
    assert report.exact, str(report)
    assert max(most) > sum(p.nbytes for p in model.parameters())


def test_gradients_add_up_in_locked_memory(locked: FakeDevice) -> None:
    hosted, plain = _converted(weights="host"), build_tiny_model("llama", dtype=torch.float64)
    after = []
    for model in (hosted, plain.train()):
        with float64_everywhere():
            for seed in (0, 1, 0, 1, 0, 1):
                _loss(model, seed).backward()
                after.append(sum(locked.locked.values()))
    torch.testing.assert_close(_gradients(hosted), _gradients(plain), rtol=1e-9, atol=1e-12)
    assert 0 < after[0] < after[1], "room for what arrives, from the second batch on"
    assert {*after[2:]} == {after[1]}
    assert all(p.grad.untyped_storage().nbytes() == p.nbytes for p in hosted.parameters())


def _loss(model: torch.nn.Module, seed: int = 0) -> torch.Tensor:
    return model(**make_batch(rows=1, tokens=21, seed=seed)).loss


def _converted(family: str = "llama", **settings: str) -> torch.nn.Module:
    model = build_tiny_model(family, dtype=torch.float64).train()
    return convert(model, SPPOConfig(chunk_lengths=(5, 9, 7), **settings))


def _gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_batches_add_up_on_the_host(places: dict[str, str]) -> None:
    hosted, plain = _converted(**places), build_tiny_model("llama", dtype=torch.float64).train()
    for model in (hosted, plain):
        with float64_everywhere():
            for seed in range(3):
                _loss(model, seed).backward()
            both = _loss(model, 3) + _loss(model, 4)  # two forwards before one backward
            both.backward()
    torch.testing.assert_close(_gradients(hosted), _gradients(plain), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("places", PLACES[:2], ids=str)
def test_no_more_than_two_layers_are_on_the_device(
    places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    enter = host.HostWeights.enter_layer

    def watch(weights: host.HostWeights, *args: int, **kwargs: bool) -> None:
        enter(weights, *args, **kwargs)
        seen.append(weights.device_bytes)

    monkeypatch.setattr(host.HostWeights, "enter_layer", watch)
    model = _converted(**places)
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in model.model.layers]
    outside = sum(p.nbytes for p in model.parameters()) - sum(layers)
    _loss(model).backward()
    weights = get_engine(model).weights
    assert weights.host_bytes == sum(layers) + outside
    assert max(seen) == outside + (2 * layers[0] if "weights" in places else sum(layers))
    assert weights.device_bytes == 0


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_a_backward_that_failed_leaves_nothing_behind(places: dict[str, str]) -> None:
    plain, hosted = _converted(), _converted(**places)
    loss = _loss(hosted, 1)
    hook = hosted.model.layers[0].mlp.down_proj.weight.register_hook(_fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        loss.backward()
    hook.remove()
    del loss
    hosted.zero_grad()
    for model in (plain, hosted):
        _loss(model).backward()
    torch.testing.assert_close(_gradients(hosted), _gradients(plain))


def _fail(_: torch.Tensor) -> None:
    raise RuntimeError("in the middle")


def test_weights_change_between_steps_and_evaluation_and_generation_see_it() -> None:
    hosted, plain = _converted(weights="host"), build_tiny_model("llama", dtype=torch.float64)
    ids = make_batch(rows=1, tokens=21)["input_ids"]
    made = []
    for model in (hosted, plain.train()):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        with float64_everywhere():
            for seed in range(2):
                _loss(model, seed).backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                made.append([_loss(model.eval()), model(ids).logits])
        made[-1].append(model.generate(ids, max_new_tokens=4))
    torch.testing.assert_close(made[0], made[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("to_data", [False, True], ids=["to the weight", "to its data"])
@pytest.mark.parametrize("places", PLACES, ids=str)
def test_a_write_after_a_forward_whose_loss_is_dropped_is_kept(
    places: dict[str, str], to_data: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # what was written is in the copy on the device
    hosted, plain = _converted(**places), build_tiny_model("llama", dtype=torch.float64).train()
    for model in (hosted, plain):
        with float64_everywhere():
            _loss(model).backward()
            dropped = _loss(model, 1)
            with torch.no_grad():
                for parameter in model.parameters():
                    (parameter.data if to_data else parameter).mul_(0.9)
            assert dropped.requires_grad
            _loss(model, 2).backward()
    torch.testing.assert_close(_gradients(hosted), _gradients(plain), rtol=1e-9, atol=1e-12)
    assert all(map(torch.equal, hosted.parameters(), plain.parameters()))


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_weights_that_were_swapped_for_others_come_back(
    places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # assigned data are adopted
    hosted, plain = _converted(**places), build_tiny_model("llama", dtype=torch.float64).train()
    losses: list[list[torch.Tensor]] = []
    for model in (hosted, plain):
        with float64_everywhere():
            _loss(model, 1).backward()
            model.zero_grad()
            own = [parameter.data for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.data = 0.9 * parameter.data
            with torch.no_grad():
                averaged = _loss(model)
            for parameter, data in zip(model.parameters(), own, strict=True):
                parameter.data = data
            losses.append([averaged, _loss(model)])
            losses[-1][1].backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    torch.testing.assert_close(_gradients(hosted), _gradients(plain), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_hooks_after_accumulation_find_the_whole_gradient(
    places: dict[str, str], first: bool
) -> None:
    hosted, plain = _converted(**places), build_tiny_model("llama", dtype=torch.float64).train()
    for model in (hosted, plain):

        def halve_largest(parameter: torch.Tensor) -> None:  # not linear in the gradient
            parameter.grad.clamp_(max=parameter.grad.max().item() / 2)

        with float64_everywhere():
            if not first:
                _loss(model).backward()
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(halve_largest)
            for seed in (1, 2):
                _loss(model, seed).backward()
    torch.testing.assert_close(_gradients(hosted), _gradients(plain), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("trained", [True, False], ids=["in training", "in an evaluation"])
@pytest.mark.parametrize("places", PLACES[1:], ids=str)
def test_an_unfrozen_parameter_is_planned_and_moves_to_the_host(
    places: dict[str, str], trained: bool
) -> None:
    """An earlier batch ran while it was frozen; its gradient is on the host as well."""
    models = _converted(**places), build_tiny_model("llama", dtype=torch.float64).train()
    for model in models:
        layer = model.model.layers[0]
        with float64_everywhere():
            layer.requires_grad_(False)
            with torch.set_grad_enabled(trained):
                loss = _loss(model, 0)
            if trained:
                loss.backward()
            assert layer.mlp.up_proj.weight.grad is None
            layer.requires_grad_(True)
            _loss(model, 1).backward()
    engine = get_engine(models[0])
    assert engine is not None
    all_bytes = sum(p.nbytes for p in models[0].parameters())
    assert engine.shape().gradient_bytes == all_bytes
    assert engine.weights is not None
    assert (engine.weights.host_bytes == all_bytes) is (places.get("optimizer") == "host")
    torch.testing.assert_close(*map(_gradients, models), rtol=1e-9, atol=1e-12)


def test_revert_puts_everything_back() -> None:
    hosted, plain = _converted(weights="host"), build_tiny_model("llama", dtype=torch.float64)
    for model in (hosted, plain.train()):
        with float64_everywhere():
            _loss(model).backward()
    revert(hosted)
    torch.testing.assert_close(_gradients(hosted), _gradients(plain), rtol=1e-9, atol=1e-12)
    with float64_everywhere():
        _loss(hosted).backward()
    doubled = [2 * gradient for gradient in _gradients(plain)]
    torch.testing.assert_close(_gradients(hosted), doubled, rtol=1e-9, atol=1e-12)
    assert not any(p._backward_hooks for p in hosted.parameters())


def test_a_weight_that_changes_between_forward_and_backward_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    force_modes(monkeypatch, lambda chunk, layer: KEEP)
    model = _converted(weights="host")
    loss = _loss(model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)
    with pytest.raises(SPPOError, match="modified in place"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:order. by_chunk, because")
@pytest.mark.parametrize("optimizer", [False, True])
def test_weights_moved_by_the_planner_return_if_the_order_by_layer_fails(
    optimizer: bool,
) -> None:
    """The planner moves weights to the host for runs layer by layer; if these fail, they return.

    Trained weights stay if their optimizer is on the host.
    """
    hosted, plain = _converted(), _converted()
    engine = get_engine(hosted)
    assert engine is not None
    for model in (hosted, plain):
        for parameter in model.model.layers[1].parameters():
            parameter.requires_grad_(False)
        model.model.layers[0].register_full_backward_hook(lambda *_: None)
    engine.placement.set_places(Placement(weights=True, optimizer=optimizer), torch.device("cpu"))
    held = engine.weights
    assert held is not None
    assert not held.keep_device_copies
    for model in (hosted, plain):
        _loss(model).backward()
    for ours, theirs in zip(hosted.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert held is not engine.weights
    if optimizer:
        assert engine.weights is not None
        assert engine.weights.keep_device_copies
    else:
        assert engine.weights is None


def test_a_model_that_cannot_go_layer_by_layer_is_refused_with_a_remedy() -> None:
    def converted(**places: Any) -> Any:
        return convert(build_tiny_model("glm_moe_dsa"), SPPOConfig(num_chunks=3, **places))

    said = r"GlmMoe.* cannot: layer 0 .* returns more than .*Remedy: drop weights; optimizer='host"
    model = converted(weights="host")
    for _ in range(2):
        with pytest.raises(ConfigError, match=said):
            _loss(model)
    with pytest.warns(UserWarning, match="order: by_chunk, because"):
        _loss(converted(optimizer="host")).backward()


def test_a_copy_of_a_model_has_its_weights_where_the_model_has_them() -> None:
    model = _converted()
    engine = get_engine(model)
    assert engine is not None
    engine.placement.set_places(Placement(weights=True, optimizer=True), torch.device("cpu"))
    twin = copy.deepcopy(model)
    for one in (model, twin):
        _loss(one).backward()
    torch.testing.assert_close(_gradients(twin), _gradients(model))
    held, of_twin = engine.weights, get_engine(twin).weights
    assert held is not None
    assert of_twin is not None
    assert of_twin.host_bytes == held.host_bytes
    assert not {id(w.parameter) for w in of_twin._all()} & {id(w.parameter) for w in held._all()}


def test_weights_that_leave_no_room_for_any_length_move_before_the_first_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choices = [Placement(*away) for away in ((False, False), (False, True), (True, True))]
    whole = model_shape(find_parts(_converted()), torch.device("cpu"))
    standing = [
        whole.with_host_residents(weights=p.weights, optimizer=p.optimizer).standing_bytes
        for p in choices
    ]
    assert standing == sorted(set(standing), reverse=True)
    context = 1 + standing[0]
    monkeypatch.setitem(CONTEXT_BYTES, "cpu", context)
    monkeypatch.setattr(weight_placement, "read_placements", lambda *_, **__: choices)

    def on_host(room: int) -> list[bool]:
        budgets = Budgets(device=context + room)
        monkeypatch.setattr(weight_placement, "read_budgets", lambda *_: budgets)
        model = _converted()
        engine = get_engine(model)
        assert engine is not None
        engine.placement.register_optimizer(torch.optim.AdamW(model.parameters()), None)
        engine.placement.move_to_host_if_too_large(torch.device("cpu"))
        weights = engine.weights
        return [weights is not None and not weights.keep_device_copies, weights is not None]

    for place, room in zip(choices, standing, strict=True):
        assert on_host(room) == [place.weights, place.optimizer]
        assert on_host(room - 1) == [room < standing[0], True]


class Wraps(torch.optim.Optimizer):
    """A wrapper that skips Optimizer.__init__, as some do, and has the hooks of its step alone."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
        self._optimizer_step_post_hooks = OrderedDict()


def test_an_optimizer_without_all_hooks_is_offered_the_host() -> None:
    model = _converted(weights="host")
    engine = get_engine(model)
    assert engine is not None
    optimizer = Wraps(torch.optim.AdamW(model.parameters()))
    engine.placement.register_optimizer(optimizer, None)
    _loss(model).backward()
    before = engine.placement.unpinned_host_bytes()
    optimizer.inner.step()
    for hook in optimizer._optimizer_step_post_hooks.values():
        hook(optimizer, (), {})
    assert engine.placement.unpinned_host_bytes() > before


def test_host_memory_of_gradients_and_states_is_known_to_the_next_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _converted(weights="host")
    engine = get_engine(model)
    assert engine is not None
    optimizer = torch.optim.AdamW(model.parameters())
    engine.placement.register_optimizer(optimizer, None)
    assert engine.placement.unpinned_host_bytes() == 0
    _loss(model).backward()
    trained = sum(p.nbytes for p in model.parameters())
    assert engine.placement.unpinned_host_bytes() == trained
    optimizer.step()
    steps = sum(state["step"].nbytes for state in optimizer.state.values())
    assert engine.placement.unpinned_host_bytes() == 3 * trained + steps
    optimizer.zero_grad()
    with monkeypatch.context() as patched:
        # Forwards between two updates count no states.
        patched.setattr(
            engine.placement, "_states_bytes", lambda optimizer: pytest.fail("counted again")
        )
        assert engine.placement.unpinned_host_bytes() == 2 * trained + steps
    engine.placement.set_places(Placement(weights=True, optimizer=True), torch.device("cpu"))
    assert engine.placement.unpinned_host_bytes() == 2 * trained + steps
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["more"] = torch.zeros(3)
    optimizer.load_state_dict(saved)
    assert engine.placement.unpinned_host_bytes() == 2 * trained + steps + 24 * len(saved["state"])


def test_locked_gradients_are_not_available_memory_in_an_evaluation(
    locked: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: dict[bool, int] = {}
    facts = plan_cache.device_facts

    def note(*args: Any, counted_bytes: int, own_bytes: Any) -> DeviceFacts:
        counted[torch.is_grad_enabled()] = counted_bytes
        return facts(*args)

    monkeypatch.setattr(plan_cache, "device_facts", note)
    model = _converted(weights="host")
    engine = get_engine(model)
    assert engine is not None
    _loss(model).backward()
    assert engine.weights is not None
    engine.plans.host_resident_bytes = 7
    engine.plans.pinned_gradient_bytes = engine.weights.pinned_gradient_bytes
    with torch.no_grad():
        _loss(model.eval())
    engine.plans._plans.clear()
    _loss(model.train())
    trained = sum(p.nbytes for p in model.parameters())
    assert counted == {True: 7, False: -trained}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weights": "host", "order": "by_chunk"}, "contradicts order='by_chunk'"),
        ({"weights": "host", "micro_batch_size": 1}, "contradicts micro_batch_size=1"),
        ({"weights": "host", "pp_size": 2}, "weights='host' contradicts pp_size=2"),
        ({"weights": "host", "sp_size": 2}, "weights='host' contradicts sp_size=2"),
        ({"optimizer": "host", "pp_size": 2}, "optimizer='host' contradicts pp_size=2"),
    ],
)
def test_contradicting_settings_are_refused(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SPPOConfig(**settings)
