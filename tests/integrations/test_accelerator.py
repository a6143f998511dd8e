"""An attached Accelerator: what it converts, what it leaves alone, what unwraps again."""

import logging
import types
import warnings
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, LlamaForCausalLM

from sppo_hf import ConfigError, SPPOPlugin, UnsupportedModelError
from sppo_hf.engine.convert import get_engine, is_converted
from sppo_hf.engine.model_parts import disable_gradient_checkpointing, suppress_peft_warnings
from sppo_hf.integrations import accelerator as accelerator_module
from tests.integrations.training import (
    checkpointing,
    is_checkpointing,
    make_model,
    make_rows,
    switch_checkpointing_on,
)


def _batch() -> dict[str, torch.Tensor]:
    rows = make_rows(2)
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _accelerator(**settings: object) -> Accelerator:
    return Accelerator(cpu=True, parallelism_config=SPPOPlugin(num_chunks=4), **settings)


def _lora(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    with suppress_peft_warnings():
        config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config)


def test_an_optimizer_that_is_prepared_twice_is_offered_the_host_once():
    model = make_model()
    accelerator = _accelerator()
    optimizer = torch.optim.AdamW(model.parameters())
    prepared = accelerator.prepare(model, optimizer)
    engine = get_engine(accelerator.unwrap_model(model))
    kept = engine.plans.optimizer_bytes
    assert kept > 0
    accelerator.prepare(*prepared)
    assert engine.plans.optimizer_bytes == kept
    assert len(engine.placement._optimizers) == 1


def test_an_optimizer_that_is_prepared_before_its_model_is_offered_the_host():
    model = make_model()
    accelerator = _accelerator()
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator.prepare(model, accelerator.prepare(optimizer))
    engine = get_engine(accelerator.unwrap_model(model))
    assert list(engine.placement._optimizers) == [optimizer]


def test_a_raw_loop_trains_to_the_same_weights():
    def train(accelerator: Accelerator) -> tuple[list[float], list[torch.Tensor]]:
        model = make_model()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for _ in range(3):
            loss = model(**_batch()).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [parameter.detach() for parameter in model.parameters()]

    plain_losses, plain_weights = train(Accelerator(cpu=True))
    AcceleratorState._reset_state(reset_partial_state=True)
    losses, weights = train(_accelerator())
    assert losses == pytest.approx(plain_losses, abs=1e-5)
    for ours, theirs in zip(weights, plain_weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)

    AcceleratorState._reset_state(reset_partial_state=True)


def test_evaluation_mode_converts_too():
    accelerator = _accelerator()
    assert is_converted(accelerator.prepare_model(make_model(), evaluation_mode=True))


def test_preparing_twice_and_converting_before_are_fine():
    accelerator = _accelerator()
    model = SPPOPlugin(num_chunks=4).convert(make_model())
    assert accelerator.prepare(accelerator.prepare(model)) is model
    assert get_engine(model).observer is accelerator.sppo_plugin.observer


def test_changed_settings_of_a_converted_model_are_named():
    model = SPPOPlugin(num_chunks=8, order="by_chunk").convert(make_model())
    words = r"converted with num_chunks=8 \(now 4\), order='by_chunk' \(now 'auto'\), so another"
    with pytest.raises(ConfigError, match=words):
        _accelerator().prepare(model)


def test_a_peft_model_is_converted():
    model = _lora(make_model())
    model = _accelerator().prepare(model)
    assert is_converted(model)
    model(**_batch()).loss.backward()
    grads = [p.grad for name, p in model.named_parameters() if "lora_B" in name]
    assert grads
    assert all(grad.abs().sum() > 0 for grad in grads)


def test_modules_without_a_transformers_model_are_left_alone():
    head = nn.Linear(3, 3)
    before = dict(vars(head))
    assert _accelerator().prepare(head) is head
    assert vars(head).keys() - before.keys() <= {"_is_accelerate_prepared"}


@pytest.mark.parametrize("part", ["model", "in place", "base", "layers"])
def test_a_compiled_model_is_refused(part):
    model = make_model()
    if part == "model":
        model = torch.compile(model, backend="eager")
    elif part == "in place":
        model.compile(backend="eager")
    elif part == "base":
        model.model.compile(backend="eager")
    else:
        model.model.layers[1].compile(backend="eager")
    with pytest.raises(ConfigError, match=r"is compiled.*SPPOPlugin\(compile=True\)"):
        _accelerator().prepare(model)


def test_the_remedy_for_compiled_models_works():
    def gradients(model):
        model(**_batch()).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(make_model())
    model = make_model()
    for layer in model.model.layers:
        layer.mlp.compile(backend="eager")
    ours = gradients(_accelerator().prepare(model))
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_ligers_patch_of_a_later_training_does_not_replace_our_forward(mixed_precision):
    def lce_forward(self, *args, **kwargs):
        return LlamaForCausalLM.forward(self, *args, **kwargs)

    def patch(model):  # as `TrainingArguments(use_liger_kernel=True)` in `train()`
        model.forward = types.MethodType(lce_forward, model)

    names = {**globals(), "__name__": "liger_kernel.transformers.model.llama"}
    lce_forward = types.FunctionType(lce_forward.__code__, names)
    model, accelerator = make_model(), _accelerator(mixed_precision=mixed_precision)
    patch(model)
    model = accelerator.prepare(model)
    first = model.forward
    accelerator.free_memory()
    assert accelerator.prepare(model).forward == first, "without a patch it stays as it is"
    patch(model)
    accelerator.free_memory()
    model = accelerator.prepare(model)
    before = get_engine(model).counters.copy()
    model(**_batch()).loss.backward()
    assert get_engine(model).counters != before, "attention ran chunk by chunk"


def test_compiling_around_a_converted_model_changes_nothing():
    loss = make_model()(**_batch()).loss
    model = SPPOPlugin(num_chunks=4, show_plan=False).convert(make_model())
    compiled = torch.compile(model, backend="eager")(**_batch()).loss
    torch.testing.assert_close(compiled, loss)
    compiled.backward()
    assert model.lm_head.weight.grad is not None


class _StoresForward(nn.Module):
    """Stores its model's forward when it is made, as PEFT's AdaptionPrompt does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.forward = model.forward

    def get_base_model(self) -> nn.Module:
        return self.model


def test_a_wrapper_that_stored_the_old_forward_is_refused_at_the_first_step():
    model = _accelerator().prepare(_StoresForward(make_model()))
    assert is_converted(model)
    with torch.no_grad():
        assert model(**_batch()).loss.isfinite()
    with pytest.raises(ConfigError, match=r"never be in use.*plugin\.convert\(model\) before"):
        model(**_batch())


def test_a_wrapper_made_after_the_conversion_trains_chunk_by_chunk():
    accelerator = _accelerator()
    wrapped = _StoresForward(accelerator.sppo_plugin.convert(make_model()))
    model = accelerator.prepare(wrapped)
    model(**_batch()).loss.backward()
    assert get_engine(model).counters["attention_forwards"] == 8


def test_adaption_prompts_are_refused_or_trained_by_the_order_of_wrapping():
    peft = pytest.importorskip("peft")
    config = peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=1, task_type="CAUSAL_LM")
    accelerator = _accelerator()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        late = accelerator.prepare(peft.get_peft_model(make_model(), config))
        early = peft.get_peft_model(accelerator.sppo_plugin.convert(make_model()), config)
    with pytest.raises(ConfigError, match="AdaptionPrompt"):
        late(**_batch())
    plain, early = late, accelerator.prepare(early)
    accelerator.sppo_plugin.revert(plain)
    for model in (plain, early):
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "adaption" in name:
                nn.init.normal_(parameter, std=0.1)
        model(**_batch()).loss.backward()
    assert get_engine(early).counters["attention_forwards"] == 8
    named = dict(plain.named_parameters())
    for name, parameter in early.named_parameters():
        if "adaption" in name:
            torch.testing.assert_close(parameter.grad, named[name].grad, rtol=1e-4, atol=1e-6)


def test_a_call_of_the_base_model_between_steps_only_warns():
    model = _accelerator().prepare(make_model())
    model(**_batch()).loss.backward()
    ids = _batch()["input_ids"]
    with pytest.warns(UserWarning, match=r"LlamaModel is called directly.*not chunked"):
        model.model(input_ids=ids)
    model.eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        ours = model.model(input_ids=ids).last_hidden_state
        theirs = make_model().model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(ours, theirs)


def test_unwrapping_takes_off_mixed_precision_and_keeps_the_conversion():
    accelerator = _accelerator(mixed_precision="bf16")
    model = accelerator.prepare(make_model())
    assert model(**_batch()).loss.dtype == torch.float32
    inner = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert inner is model
    assert is_converted(inner)
    assert torch.isfinite(inner(**_batch()).loss)


def test_revert_after_mixed_precision_leaves_the_plain_model():
    accelerator = _accelerator(mixed_precision="bf16")
    plain, model = make_model(), make_model()
    model = accelerator.sppo_plugin.revert(accelerator.prepare(model))
    assert "forward" not in vars(model)
    torch.testing.assert_close(model(**_batch()).loss, plain(**_batch()).loss)


def test_checkpointing_of_the_model_is_switched_off_with_a_warning(caplog):
    model = make_model()
    switch_checkpointing_on(model)
    with caplog.at_level(logging.WARNING, logger="sppo_hf"):
        _accelerator().prepare(model)
    assert not is_checkpointing(model)
    assert "recomputes by itself" in caplog.text
    (argument,) = checkpointing()
    assert f"{argument} is on" in caplog.text
    assert f"{argument}=False" in caplog.text  # who left TRL's default has none to drop
    caplog.clear()
    assert not disable_gradient_checkpointing(model)
    assert not caplog.records


def test_checkpointing_that_comes_after_the_conversion_is_switched_off_at_the_next_step(caplog):
    model, plain = _accelerator().prepare(make_model()), make_model()
    switch_checkpointing_on(model)
    with caplog.at_level(logging.WARNING, logger="sppo_hf"):
        for one in (model, plain):
            one(**_batch()).loss.backward()
    assert not is_checkpointing(model)
    assert "recomputes by itself" in caplog.text
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_checkpointing_of_a_peft_model_is_switched_off():
    model = _lora(make_model())
    switch_checkpointing_on(model.get_base_model())
    assert disable_gradient_checkpointing(model)
    assert not is_checkpointing(model)


def test_saved_weights_are_those_of_a_plain_model(tmp_path):
    accelerator = _accelerator()
    model = accelerator.prepare(make_model())
    accelerator.unwrap_model(model).save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    expected = extract_model_from_parallel(make_model()).state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, weight in loaded.state_dict().items():
        torch.testing.assert_close(weight, expected[name])


def test_the_process_is_bound_next_to_its_device_before_anything_is_pinned(monkeypatch):
    bound = []
    monkeypatch.setattr(accelerator_module, "bind_to_device", bound.append)
    accelerator = Accelerator(parallelism_config=SPPOPlugin(show_plan=False))
    assert bound == [accelerator.device]


class _Ends:
    """Both ends of a pipeline in turn; `all_reduce` knows what the other end gave before."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self, *grads: list[torch.Tensor]) -> None:
        self.parameters = [[nn.Parameter(grad.clone()) for grad in those] for those in grads]
        for parameter in (p for those in self.parameters for p in those):
            parameter.grad = parameter.detach().clone()
        self.given: dict[int, torch.Tensor] = {}
        self.at = 0

    def all_reduce(self, x: torch.Tensor, *, op: object, group: str) -> None:
        assert group == "pp"
        self.given[self.at] = x.clone()
        given = torch.stack([*self.given.values()])
        x.copy_(given.amax(0) if op == self.ReduceOp.MAX else given.sum(0))

    def norms(self, norm_type: float) -> list[torch.Tensor]:
        """The norm on each end, whose last parameters are one that both hold."""
        self.given.clear()
        found = []
        for at in (0, 1, 0, 1):
            self.at, parameters = at, self.parameters[at]
            engine: Any = types.SimpleNamespace(
                mesh=types.SimpleNamespace(is_first=at == 0, device="cpu", pp_group="pp"),
                shared_parameters=lambda tied=parameters[-1:]: tied,
            )
            found.append(accelerator_module.total_norm(engine, parameters, norm_type))
        return found[2:]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_a_pipelines_norm_is_that_of_all_gradients(norm_type, monkeypatch):
    torch.manual_seed(0)
    tied = 3 * torch.randn(4)
    first, last = [torch.randn(2, 3), tied], [torch.randn(5).double(), torch.randn(3), tied]
    for grads in ((first, last), (first, [tied]), ([torch.randn(3), tied], [tied])):
        ends = _Ends(*grads)
        monkeypatch.setattr(accelerator_module, "dist", ends)
        every = torch.cat([grad.double().flatten() for grad in (*grads[0], *grads[1][:-1])])
        expected = torch.linalg.vector_norm(every, norm_type)
        dtype = torch.float64 if last is grads[1] else torch.float32
        for norm in ends.norms(norm_type):
            torch.testing.assert_close(norm, expected.to(dtype))


def _reward_model() -> BertForSequenceClassification:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForSequenceClassification(
        BertConfig(vocab_size=64, num_hidden_layers=1, num_labels=1, **sizes)
    )


@pytest.mark.parametrize("how", ["evaluation_mode", "frozen"])
def test_a_model_that_is_only_evaluated_and_cannot_be_converted_is_left_alone(caplog, how):
    model = _reward_model().eval()
    switch_checkpointing_on(model)
    before = set(vars(model))
    expected = model(input_ids=_batch()["input_ids"]).logits
    accelerator = _accelerator()
    with caplog.at_level(logging.INFO, logger="sppo_hf"):
        if how == "frozen":
            prepared = accelerator.prepare(model.requires_grad_(False))
        else:
            prepared = accelerator.prepare_model(model, evaluation_mode=True)
    assert prepared is model
    assert set(vars(model)) - before <= {"_is_accelerate_prepared"}
    assert is_checkpointing(model), "its settings are its own"
    assert torch.equal(model(input_ids=_batch()["input_ids"]).logits, expected)
    said = [record.getMessage() for record in caplog.records if "alone" in record.getMessage()]
    assert len(said) == 1
    assert "BertForSequenceClassification cannot be trained chunk by chunk" in said[0]
    assert "\n" not in said[0]


def test_the_same_model_is_refused_for_training():
    with pytest.raises(UnsupportedModelError, match="no list of decoder layers"):
        _accelerator().prepare(_reward_model())
    with pytest.raises(UnsupportedModelError, match="no list of decoder layers"):
        _accelerator().prepare_model(_reward_model())


def test_a_compiled_model_is_left_alone_if_it_is_only_evaluated():
    model = torch.compile(make_model(), backend="eager")
    _accelerator().prepare_model(model, evaluation_mode=True)
    assert get_engine(model._orig_mod) is None
