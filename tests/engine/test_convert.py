"""Conversion leaves no trace: same object before and after, untouched calls in between."""

import copy
import inspect
import pickle
import threading

import pytest
import torch
from transformers import DynamicCache

from sppo_hf import ConfigError, SPPOConfig, SPPOError, UnsupportedModelError
from sppo_hf.engine.convert import convert, get_engine, is_converted, revert
from sppo_hf.engine.model_parts import find_parts, suppress_peft_warnings
from sppo_hf.testing.exactness import compare
from sppo_hf.testing.tiny_models import add_lora, build_tiny_model, make_batch
from tests.sweeps import turn

QUIET = SPPOConfig(num_chunks=3, show_plan=False)


def _fingerprint(model):
    """Everything conversion touches, of every module."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs",
             "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")  # fmt: skip
    return {
        name: (
            type(module),
            sorted(key for key in module.__dict__ if not key.startswith("_forward")),
            [len(getattr(module, hook)) for hook in hooks],
            module.__dict__.get("forward"),
            getattr(getattr(module, "config", None), "_attn_implementation", None),
        )
        for name, module in model.named_modules()
    }


def _gradients(model, ids):
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def model():
    return build_tiny_model("llama", dtype=torch.float32).train()


@pytest.fixture
def ids():
    return torch.arange(46).view(2, 23) % 97


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3-longrope"])
def test_revert_restores_the_object(family, ids):
    model = build_tiny_model(family, dtype=torch.float32).train()
    model(input_ids=ids)  # some rotary modules add an attribute of their own when they first run
    before = _fingerprint(model)
    assert convert(model, QUIET) is model
    assert is_converted(model)
    assert _fingerprint(model) != before
    model(input_ids=ids, labels=ids).loss.backward()
    assert revert(model) is model
    assert _fingerprint(model) == before
    assert not is_converted(model)
    assert revert(model) is model


def test_lora_model_is_converted_inside_its_wrapper(ids):
    model = add_lora(build_tiny_model("llama", dtype=torch.float32).train())
    before = _fingerprint(model)
    convert(model, QUIET)
    assert _gradients(model, ids)
    assert get_engine(model).counters["attention_forwards"] == 3 * 3
    revert(model)
    assert _fingerprint(model) == before


def test_converting_again_changes_nothing(model):
    convert(model, QUIET)
    before = _fingerprint(model)
    convert(model, SPPOConfig(num_chunks=3, show_plan=False))
    assert _fingerprint(model) == before


def test_a_second_plugin_is_refused(model):
    convert(model, QUIET)
    with pytest.raises(ConfigError, match="already converted with other settings"):
        convert(model, SPPOConfig(num_chunks=4, show_plan=False))


def test_conversion_keeps_signature_and_name(model):
    before = inspect.signature(model.forward)
    convert(model, QUIET)
    assert inspect.signature(model.forward) == before
    assert model.forward.__name__ == "forward"


def test_calls_without_labels_run_the_original_forward(model, ids):
    model.eval()
    mask = torch.ones_like(ids)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        name = find_parts(model).cache_argument()
        cached = model(input_ids=ids, **{name: DynamicCache(config=model.config)})
        generated = model.generate(ids[:1], max_new_tokens=5, do_sample=False)
        convert(model, QUIET)
        assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, expected)
        again = model(input_ids=ids, **{name: DynamicCache(config=model.config)})
        assert torch.equal(again.logits, cached.logits)
        assert again[name].get_seq_length() == 23
        assert torch.equal(model.generate(ids[:1], max_new_tokens=5, do_sample=False), generated)
    assert not get_engine(model).counters


def test_a_cache_together_with_labels_is_refused_by_its_name(model, ids):
    name = find_parts(model).cache_argument()
    convert(model, QUIET)
    with pytest.raises(ConfigError, match=f"{name} together with labels"):
        model(input_ids=ids, labels=ids, **{name: DynamicCache(config=model.config)})


@pytest.mark.parametrize(("trains", "gradients"), [(False, True), (True, False), (True, True)])
def test_calls_of_the_stored_original_forward_are_refused_in_training_only(
    model, ids, trains, gradients
):
    expected = model.model(input_ids=ids).last_hidden_state
    convert(model, QUIET).train(trains)
    with torch.set_grad_enabled(gradients):
        if trains and gradients:
            with pytest.raises(ConfigError, match=r"LlamaModel is called directly"):
                model.model(input_ids=ids)
        else:
            assert torch.equal(model.model(input_ids=ids).last_hidden_state, expected)


def test_a_deep_copy_trains_itself(model, ids):
    convert(model, QUIET)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    expected = _gradients(revert(copy.deepcopy(twin)), ids)
    ours = _gradients(twin, ids)
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
    assert get_engine(twin).counters["attention_forwards"] == 9
    assert not get_engine(model).counters
    revert(twin)
    assert is_converted(model)
    assert not is_converted(twin)


def test_after_revert_a_wrapper_of_our_forward_calls_the_original(model, ids):
    expected = model(input_ids=ids, labels=ids).logits
    convert(model, QUIET)
    ours = model.forward
    model.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    revert(model)
    assert not is_converted(model)
    assert torch.equal(model(input_ids=ids, labels=ids).logits, expected)
    convert(model, SPPOConfig(num_chunks=2, show_plan=False))
    assert model(input_ids=ids, labels=ids).logits is None
    assert get_engine(model).counters["attention_forwards"] == 6


def test_what_has_no_head_is_refused():
    with pytest.raises(UnsupportedModelError, match="Linear is not a Transformers causal"):
        convert(torch.nn.Linear(2, 2), QUIET)
    base = build_tiny_model("llama", dtype=torch.float32).model
    with pytest.raises(
        UnsupportedModelError, match=r"no head .*AutoModelForCausalLM, or AutoModelForSequence"
    ):
        convert(base, QUIET)


def test_layers_may_share_parameters_but_not_be_the_same():
    shared = build_tiny_model("llama", num_hidden_layers=3, use_cache=False)
    first, _, last = shared.model.layers
    for name, module in first.named_children():
        setattr(last, name, module)
    report = compare(
        shared, make_batch(rows=2, tokens=23), SPPOConfig(num_chunks=3, show_plan=False)
    )
    assert report.exact, report
    shared.model.layers[2] = first
    with pytest.raises(UnsupportedModelError, match="the same decoder layer more than once"):
        convert(shared, QUIET)


def test_only_a_reverted_model_can_be_pickled(model, tmp_path):
    plain = copy.deepcopy(model)
    convert(model, QUIET)
    for save in (pickle.dumps, lambda model: torch.save(model, tmp_path / "model.pt")):
        with pytest.raises(SPPOError, match=r"cannot be pickled.*save_pretrained.*plugin\.revert"):
            save(model)
    model.save_pretrained(tmp_path / "saved")
    again = pickle.loads(pickle.dumps(revert(model)))
    for mine, theirs in zip(again.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_forward_in_another_thread_is_refused(model):
    convert(model, QUIET)
    ids = torch.arange(23)[None]
    expected = _gradients(model, ids)
    found = []

    def forward(*_):
        with pytest.raises(SPPOError, match=r"in another thread\. One thread at a time"):
            model(input_ids=ids, labels=ids)
        found.append(True)

    def in_a_thread(*_):
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()

    handle = model.model.layers[1].register_forward_pre_hook(in_a_thread)
    found_gradients = _gradients(model, ids)
    handle.remove()
    assert found
    for name, gradient in expected.items():
        assert torch.equal(found_gradients[name], gradient)
    # One after the other, threads may call it.
    thread = threading.Thread(target=lambda: found.append(_gradients(model, ids)))
    thread.start()
    thread.join()
    assert found[-1].keys() == expected.keys()


def test_function_transforms_are_refused(model):
    convert(model, QUIET)
    ids = torch.arange(23)[None]
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights):
        return torch.func.functional_call(model, weights, (), {"input_ids": ids, "labels": ids})[0]

    with pytest.raises(SPPOError, match=r"torch\.func\.grad.*loss\.backward\(\)"):
        torch.func.grad(loss)(weights)
    assert _gradients(model, ids)


@pytest.mark.parametrize(
    ("change", "order"),
    [
        (change, order)
        for index, change in enumerate(["fewer", "more", "another"])
        for order in turn(["by_layer", "by_chunk"], 2, index)
    ],
)
def test_layers_changed_after_conversion_are_refused(model, ids, order, change):
    config = QUIET.replace(order=order)
    convert(model, config)
    old = list(model.model.layers)
    added = [] if change == "fewer" else [copy.deepcopy(build_tiny_model("llama").model.layers[0])]
    kept = old if change == "more" else old[:-1]
    model.model.layers = torch.nn.ModuleList([*kept, *(layer.float() for layer in added)])
    words = rf"3 decoder layers when .* now it has {len(kept) + len(added)}, of which {len(added)}"
    for _ in range(2):
        with pytest.raises(ConfigError, match=words):
            model(input_ids=ids, labels=ids)
    revert(model)
    if change == "fewer":  # the remedy; the others need indices of their own
        plain = copy.deepcopy(model)
        convert(model, config)
        ours, theirs = _gradients(model, ids), _gradients(plain, ids)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_moved_layers_are_accepted(model, ids):
    plain = copy.deepcopy(model)
    convert(model, QUIET)
    for one in (model, plain):
        layers = one.model.layers
        layers[0], layers[1] = layers[1], layers[0]
    expected = _gradients(plain, ids)
    torch.testing.assert_close(_gradients(model, ids), expected, rtol=1e-3, atol=1e-5)


def test_a_part_that_is_copied_by_itself_does_not_copy_the_model() -> None:
    """As PEFT copies modules that it saves; their hooks go when the model is reverted."""
    model = convert(build_tiny_model("llama"), SPPOConfig(num_chunks=2, show_plan=False))
    memo = {}
    norm = copy.deepcopy(model.model.norm, memo)
    assert id(model.lm_head.weight) not in memo
    model.model.norm = torch.nn.ModuleList([norm])  # stands for PEFT's wrapper
    revert(model)
    assert not norm._forward_hooks
    assert not norm._forward_pre_hooks
    assert not norm._forward_hooks_always_called


def test_an_adapter_that_computes_its_own_loss_from_logits_needs_them(ids):
    peft = pytest.importorskip("peft")
    config = peft.CPTConfig(
        cpt_token_ids=[1, 2], cpt_mask=[1, 1], cpt_tokens_type_mask=[4, 4], task_type="CAUSAL_LM"
    )
    with suppress_peft_warnings():
        wrapped = peft.get_peft_model(build_tiny_model("llama", dtype=torch.float32), config)
    batch = {"input_ids": ids, "labels": ids}
    types = torch.full_like(ids, 4)  # PEFT changes it
    expected = wrapped(**batch, input_type_mask=types.clone()).loss.item()
    with pytest.raises(ConfigError, match=r"CPTConfig.*return_logits=True"):
        convert(wrapped, QUIET)
    convert(wrapped, QUIET.replace(return_logits=True))
    loss = wrapped(**batch, input_type_mask=types).loss
    assert loss.item() == pytest.approx(expected, rel=1e-5)
