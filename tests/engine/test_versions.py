"""What is changed in place between forward and backward is refused, as autograd does."""

import copy

import pytest
import torch
from torch import nn

from sppo_hf import SPPOConfig, SPPOError
from sppo_hf.engine.convert import convert
from sppo_hf.engine.selective import SavedTensor
from sppo_hf.engine.versions import ReadTensors
from sppo_hf.planning.activation_modes import all_modes, mode_of
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch
from tests.engine.forced_plans import force_modes

MODES = [mode for mode in all_modes() if mode.tier != "disk"]
CHUNKS = (9, 1, 13)


@pytest.fixture(scope="module")
def llama():
    return build_tiny_model("llama", dtype=torch.float32).train()


def _converted(llama, monkeypatch=None, mode=None, **settings):
    if monkeypatch is not None:
        force_modes(monkeypatch, lambda chunk, layer: mode)
    settings = {"chunk_lengths": CHUNKS, "min_offload_size": 1, "show_plan": False, **settings}
    return convert(copy.deepcopy(llama), SPPOConfig(**settings))


WEIGHTS = {
    "a projection": "model.layers.1.self_attn.q_proj.weight",
    "a layer's norm": "model.layers.0.input_layernorm.weight",
    "the last product": "model.layers.2.mlp.down_proj.weight",
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
    # The step after it is none the worse.
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
    words = r"layer 2, chunk 2: self_attn\.q_proj\.weight was changed in place.*after backward"
    with pytest.raises(SPPOError, match=words):
        loss.backward()


def test_weights_of_another_call_are_refused(llama) -> None:
    """`functional_call` puts other weights in for forward alone; the second forward has the own."""
    model = _converted(llama, recompute="full", offload="none")
    other = {n: (p * 2).detach().requires_grad_() for n, p in model.named_parameters()}
    loss = torch.func.functional_call(model, other, (), make_batch(rows=2)).loss
    with pytest.raises(SPPOError, match="was replaced between forward and backward"):
        loss.backward()
    model(**make_batch(rows=2)).loss.backward()


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
def test_what_is_usual_goes_on(llama, recompute) -> None:
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
    reads.refuse_changes(before, "here")
    module = nn.BatchNorm1d(3)
    reads = ReadTensors.of_module(module)
    before = reads.versions()
    module(torch.randn(4, 3))
    with pytest.raises(SPPOError, match="here: num_batches_tracked was changed in place"):
        reads.refuse_changes(before, "here")
    reads.leave_out_own_writes(before)
    reads.refuse_changes(before, "here")
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(SPPOError, match="here: weight was changed in place"):
        reads.refuse_changes(before, "here")


def test_a_kept_tensor_is_refused_when_it_was_written_into() -> None:
    kept = SavedTensor(torch.zeros(2))
    assert kept.take() is not None
    tensor = torch.zeros(2)
    kept = SavedTensor(tensor.detach())
    tensor.add_(1)
    with pytest.raises(SPPOError, match="kept for recomputation was changed in place"):
        kept.take()
