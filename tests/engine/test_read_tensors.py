"""Changes between forward and backward: weights are checked, settings restored."""

import copy

import pytest
import torch
from torch import Tensor, nn

from sppo_hf import SPPOConfig, SPPOError
from sppo_hf.engine.convert import convert
from sppo_hf.engine.model_parts import suppress_peft_warnings
from sppo_hf.engine.read_tensors import ReadTensors
from sppo_hf.engine.recompute import SavedTensor
from sppo_hf.planning.activation_modes import all_modes, mode_of
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch
from tests.engine.forced_plans import force_modes
from tests.sweeps import turn

MODES = [mode for mode in all_modes() if mode.tier != "disk"]
CHUNKS = (9, 1, 13)


@pytest.fixture(scope="module")
def llama():
    return build_tiny_model("llama", dtype=torch.float32, num_hidden_layers=2).train()


def _converted(llama, monkeypatch=None, mode=None, **settings):
    if monkeypatch is not None:
        force_modes(monkeypatch, lambda chunk, layer: mode)
    settings = {"chunk_lengths": CHUNKS, "min_offload_size": 1, "show_plan": False, **settings}
    return convert(copy.deepcopy(llama), SPPOConfig(**settings))


WEIGHTS = {
    "a projection": "model.layers.1.self_attn.q_proj.weight",
    "a layer's norm": "model.layers.0.input_layernorm.weight",
    "the last product": "model.layers.1.mlp.down_proj.weight",
    "the final norm": "model.norm.weight",
    "the head": "lm_head.weight",
}


CASES = [
    *((mode, WEIGHTS["a projection"]) for mode in MODES),
    *((mode_of("matmuls", "device"), name) for name in WEIGHTS.values()),
]


@pytest.mark.parametrize(("mode", "name"), CASES, ids=str)
def test_a_weight_changed_before_backward_is_refused_in_every_mode(
    llama, mode, name, monkeypatch
) -> None:
    model = _converted(llama, monkeypatch, mode)
    loss = model(**make_batch(rows=2)).loss
    with torch.no_grad():
        model.get_parameter(name).mul_(2)
    words = "changed in place between forward and backward|modified (in place|by an inplace)"
    with pytest.raises((SPPOError, RuntimeError), match=words):
        loss.backward()
    # The next step works.
    model.zero_grad()
    model(**make_batch(rows=2)).loss.backward()
    expected = copy.deepcopy(llama)
    expected.load_state_dict(model.state_dict())
    expected(**make_batch(rows=2)).loss.backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


def test_the_message_names_the_weight_and_what_to_do(llama) -> None:
    model = _converted(llama, recompute="full", offload="none")
    loss = model(**make_batch(rows=2)).loss
    optimizer = torch.optim.SGD(model.model.layers.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    words = r"layer 1, chunk 2: self_attn\.q_proj\.weight was changed in place.*after backward"
    with pytest.raises(SPPOError, match=words):
        loss.backward()


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_weights_of_a_functional_call_are_in_its_rerun(llama, recompute) -> None:
    """`functional_call` replaces weights during forward alone."""
    model = _converted(llama, recompute=recompute, offload="none")

    def gradients(of: nn.Module) -> list[Tensor]:
        other = {n: (p * 1.1).detach().requires_grad_() for n, p in llama.named_parameters()}
        loss = torch.func.functional_call(of, other, (), make_batch(rows=2)).loss
        loss.backward()
        assert all(p.grad is None for p in of.parameters())
        return [x.grad for x in other.values()]

    for ours, theirs in zip(gradients(model), gradients(copy.deepcopy(llama)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


class _Scaled(nn.Module):
    """A product of an input that a buffer scales."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_buffers_of_a_functional_call_are_in_its_rerun(llama, recompute) -> None:
    gradients = []
    for convert_it in (True, False):
        model = copy.deepcopy(llama)
        for layer in model.model.layers:
            layer.mlp = _Scaled(layer.mlp)
        if convert_it:
            model = _converted(model, recompute=recompute, offload="none")
        buffers = {n: b * 1.7 for n, b in model.named_buffers() if n.endswith("scale")}
        torch.func.functional_call(model, buffers, (), make_batch(rows=2)).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_buffers_that_a_module_replaces_itself_are_not_restored() -> None:
    module = _Scaled(nn.Identity())
    reads = ReadTensors.of_module(module)
    before = reads.versions()
    module.scale = grown = torch.ones(2)
    reads.ignore_own_writes(before)
    with reads.as_in_forward():
        assert module.scale is grown


def _two_adapters(model: nn.Module, *more: str) -> nn.Module:
    peft = pytest.importorskip("peft", reason="needs the extra `test`")
    targets = ["q_proj", "up_proj", *more]
    settings = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(0)
    with suppress_peft_warnings():
        wrapped = peft.get_peft_model(copy.deepcopy(model), settings)
        wrapped.add_adapter("other", settings)
    _train_both(wrapped, "default")
    return wrapped


def _adapted(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def _train_both(model: nn.Module, active: str) -> None:
    model.set_adapter(active)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def _other_adapter(model: nn.Module) -> Tensor:
    loss = model(**make_batch(rows=2)).loss
    _train_both(model, "other")
    return loss + model(**make_batch(rows=2, seed=1)).loss


def _other_scale(model: nn.Module) -> Tensor:
    loss = model(**make_batch(rows=2)).loss
    for module in _adapted(model):
        module.scaling["default"] *= 3
    return loss


def _no_adapter(model: nn.Module) -> Tensor:
    loss = model(**make_batch(rows=2)).loss
    model.base_model.disable_adapter_layers()
    return loss


def _frozen(model: nn.Module) -> Tensor:
    loss = model(**make_batch(rows=2)).loss
    model.base_model.model.model.layers[1].requires_grad_(False)
    return loss


@pytest.mark.parametrize(
    ("change", "recompute"),
    [
        (change, recompute)
        for index, change in enumerate([_other_adapter, _other_scale, _frozen, _no_adapter])
        for recompute in turn(["selective", "full"], 2, index)
    ],
)
def test_a_rerun_has_the_settings_of_forward(llama, change, recompute) -> None:
    """Adapters are switched, and parameters frozen, between a forward and its backward."""
    ours, plain = _two_adapters(llama), _two_adapters(llama)
    ours = convert(ours, SPPOConfig(chunk_lengths=CHUNKS, recompute=recompute, show_plan=False))
    for model in (ours, plain):
        change(model).backward()
    active = [module.active_adapters for module in _adapted(ours)]
    wanted = [module.active_adapters for module in _adapted(plain)]
    assert active == wanted
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert mine.requires_grad == theirs.requires_grad
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("change", [_other_adapter, _other_scale, _no_adapter])
def test_the_rerun_of_a_hooked_head_has_the_settings_of_forward(llama, change) -> None:
    """With hooks the head is rerun in backward; see `ChunkedLoss.head_in_backward`."""
    ours, plain = _two_adapters(llama, "lm_head"), _two_adapters(llama, "lm_head")
    for model in (ours, plain):
        head = model.get_submodule("base_model.model.lm_head")
        head.register_full_backward_hook(lambda *_: None)
    ours = convert(ours, SPPOConfig(chunk_lengths=CHUNKS, show_plan=False))
    for model in (ours, plain):
        change(model).backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)


def test_the_rerun_of_a_hooked_head_has_the_weights_of_a_functional_call(llama) -> None:
    gradients = []
    for convert_it in (True, False):
        model = copy.deepcopy(llama)
        model.lm_head.register_full_backward_hook(lambda *_: None)
        if convert_it:
            model = _converted(model, recompute="full", offload="none")
        other = {n: (p * 1.1).detach().requires_grad_() for n, p in model.named_parameters()}
        torch.func.functional_call(model, other, (), make_batch(rows=2)).loss.backward()
        gradients.append([x.grad for x in other.values()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_dropout_of_a_loss_is_redrawn_in_evaluation(llama) -> None:
    gradients = []
    for recompute in ("none", "full", "selective"):
        model = _two_adapters(llama)
        for module in _adapted(model):
            module.lora_dropout["default"] = nn.Dropout(0.5)
        config = SPPOConfig(chunk_lengths=CHUNKS, recompute=recompute, show_plan=False)
        model = convert(model.train(), config)
        torch.manual_seed(1)
        loss = model(**make_batch(rows=2)).loss
        model.eval()
        loss.backward()
        assert not any(module.training for module in model.modules())
        gradients.append([p.grad for n, p in model.named_parameters() if "lora_B.default" in n])
    for kept, *again in zip(*gradients, strict=True):
        for found in again:
            torch.testing.assert_close(found, kept, rtol=1e-3, atol=1e-5)


def test_settings_that_a_module_changes_itself_are_not_restored() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.scale = 0, 1.0

        def forward(self) -> None:
            self.calls += 1

    module = Counts()
    reads = ReadTensors.of_module(module)
    before = reads.versions()
    module()
    reads.ignore_own_writes(before)
    module.scale = 2.0
    with reads.as_in_forward():
        assert (module.calls, module.scale) == (1, 1.0)
        module()
    assert (module.calls, module.scale) == (2, 2.0)


def test_inputs_changed_before_backward_are_refused(llama) -> None:
    model = _converted(llama, recompute="full", offload="none")
    seen = []
    model.model.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["position_embeddings"][0]), with_kwargs=True
    )
    loss = model(**make_batch(rows=2)).loss
    with torch.no_grad():
        seen[-1].mul_(2)
    with pytest.raises(SPPOError, match="position_embeddings was changed in place"):
        loss.backward()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_common_changes_between_forward_and_backward_are_allowed(llama, recompute) -> None:
    """Accumulation, two forwards before a backward, steps between, and steps within backward."""
    batches = [make_batch(rows=2, seed=seed) for seed in range(2)]

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches:
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses = [model(**batch).loss for batch in batches]
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()

        def step(parameter: nn.Parameter) -> None:
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            parameter.grad = None

        handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
        for batch in batches:
            model(**batch).loss.backward()
        for handle in handles:
            handle.remove()

    ours, plain = _converted(llama, recompute=recompute, loss_tile_tokens=5), copy.deepcopy(llama)
    for model in (ours, plain):
        train(model)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_buffers_may_grow_and_be_written_into_by_their_own_module_alone() -> None:
    module = nn.Module()
    module.register_buffer("table", torch.zeros(2))
    reads = ReadTensors.of_module(module)
    before = reads.versions()
    module.register_buffer("table", torch.zeros(4))
    reads.check_unchanged(before, "here")
    module = nn.BatchNorm1d(3)
    reads = ReadTensors.of_module(module)
    before = reads.versions()
    module(torch.randn(4, 3))
    with pytest.raises(SPPOError, match="here: num_batches_tracked was changed in place"):
        reads.check_unchanged(before, "here")
    reads.ignore_own_writes(before)
    reads.check_unchanged(before, "here")
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(SPPOError, match="here: weight was changed in place"):
        reads.check_unchanged(before, "here")


def test_a_kept_tensor_is_refused_when_it_was_written_into() -> None:
    kept = SavedTensor(torch.zeros(2))
    assert kept.take() is not None
    tensor = torch.zeros(2)
    kept = SavedTensor(tensor.detach())
    tensor.add_(1)
    with pytest.raises(SPPOError, match="kept for recomputation was changed in place"):
        kept.take()
