"""Hooks on parameters, layers and heads: what runs, how often, and what it makes of it.

Every comparison of the harness runs with hooks on all parameters (`GradientHooks`). Here are the
places where a parameter's gradient comes together from several parts.
"""

import copy

import pytest
import torch

from sppo_hf import SPPOConfig
from sppo_hf.engine.convert import convert
from sppo_hf.engine.model_parts import (
    find_causal_lm,
    has_parameter_hooks,
    suppress_peft_warnings,
    without_parameter_hooks,
)
from sppo_hf.testing.exactness import GradientHooks, compare, parameter_errors, run_batch
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch
from tests.sweeps import pairs

TILED = SPPOConfig(chunk_lengths=(9, 1, 13), loss_tile_tokens=7, show_plan=False)


def _adapted():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with suppress_peft_warnings():
        return peft.get_peft_model(build_tiny_model("llama"), lora)


@pytest.mark.parametrize(
    "build",
    [
        lambda: build_tiny_model("llama"),
        lambda: build_tiny_model("llama-bias-tied"),
        _adapted,
    ],
    ids=["own head", "tied", "modules_to_save"],
)
def test_small_tiles_run_hooks_once(build):
    model = build()
    report = compare(model, make_batch(rows=2), TILED)
    assert report.exact, report
    head = find_causal_lm(model).get_output_embeddings()
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert [n for n in trained if any(p is model.get_parameter(n) for p in head.parameters())]


def test_hooks_may_be_set_before_and_after_conversion():
    batch = make_batch(rows=2)
    model = build_tiny_model("llama-bias-tied")
    expected = run_batch(model, batch, hooks=True)
    model = build_tiny_model("llama-bias-tied")
    with GradientHooks(model) as before:
        convert(model, TILED)
        run_batch(model, batch)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected.by_name[name])
    assert before.calls == expected.hook_calls


def test_the_harness_sees_hooks_that_run_twice(monkeypatch):
    model, batch = build_tiny_model("llama"), make_batch(rows=2)
    count = GradientHooks._count

    def count_norms_twice(hooks, name, parameter):
        for _ in range(1 + ("norm" in name)):
            count(hooks, name, parameter)

    monkeypatch.setattr(GradientHooks, "_count", count_norms_twice)
    twice = run_batch(model, batch, hooks=True)
    monkeypatch.undo()
    report = compare(model, batch, TILED, reference=twice)
    assert report.error <= report.tolerance
    assert not report.exact
    assert "norm.weight: its hooks ran another number of times" in str(report)


def _clamp(module, grads, _):
    return tuple(g.clamp(-1e-3, 1e-3) for g in grads)


def _clamp_output(module, args, output):
    if output.requires_grad:
        output.register_hook(lambda g: g.clamp(-1e-3, 1e-3))


@pytest.mark.parametrize(
    "hook",
    [
        lambda head: head.register_full_backward_hook(_clamp),
        lambda head: head.register_full_backward_pre_hook(lambda m, g: _clamp(m, g, None)),
        lambda head: head.register_forward_hook(_clamp_output),
    ],
    ids=["backward", "backward pre", "forward, on the output"],
)
def test_hooks_on_the_heads_module_see_gradients_of_the_loss_itself(hook):
    batch = make_batch(rows=2)
    model = build_tiny_model("llama")
    free = run_batch(copy.deepcopy(model), batch)
    hook(model.lm_head)
    report = compare(model, batch, TILED)
    assert report.exact, report
    hooked = run_batch(model, batch)
    name = "model.norm.weight"
    assert not torch.allclose(hooked.by_name[name], free.by_name[name])


def test_removed_hooks_are_restored_and_may_change():
    parameter = torch.nn.Parameter(torch.ones(2))
    seen = []
    first = parameter.register_hook(lambda _: seen.append("first"))
    assert has_parameter_hooks([parameter])
    with without_parameter_hooks([parameter]):
        assert not has_parameter_hooks([parameter])
        parameter.sum().backward()
        parameter.register_hook(lambda _: seen.append("second"))
    assert not seen
    parameter.sum().backward()
    assert seen == ["first", "second"]
    first.remove()
    parameter.sum().backward()
    assert seen == ["first", "second", "second"]


def _gate(hidden):
    # Its gradient needs the tensor that it was given, which autograd saves.
    return hidden * torch.sigmoid(hidden)


def _gate_before(_, args):
    return _gate(args[0]), *args[1:]


def _gate_after(_, __, output):
    if isinstance(output, torch.Tensor):
        return _gate(output)
    return type(output)(last_hidden_state=_gate(output.last_hidden_state))


def _add_hook(model, module, place):
    module = model.get_submodule(module)
    if place == "before":
        module.register_forward_pre_hook(_gate_before)
    else:
        module.register_forward_hook(_gate_after)


@pytest.mark.parametrize(
    ("hook", "when", "order"),
    pairs(
        [
            ("model.layers.1", "before"),
            ("model.layers.1", "after"),
            ("model.norm", "before"),
            ("model.norm", "after"),
            ("model", "after"),
        ],
        ["before the conversion", "after it"],
        ["by_chunk", "by_layer"],
    ),
)
def test_forward_hooks_that_change_hidden_states(hook, when, order):
    config = SPPOConfig(
        chunk_lengths=(9, 1, 13),
        loss_tile_tokens=7,
        recompute="full",
        order=order,
        show_plan=False,
    )
    batch = make_batch(rows=2)
    hooked = build_tiny_model("llama")
    _add_hook(hooked, *hook)
    if when == "before the conversion":
        report = compare(hooked, batch, config)
        assert report.exact, report
        return
    model = convert(build_tiny_model("llama"), config)
    _add_hook(model, *hook)
    ours, expected = run_batch(model, batch), run_batch(hooked, batch)
    assert ours.loss == pytest.approx(expected.loss, rel=1e-9)
    assert parameter_errors(ours, expected)[0].error < 1e-9
