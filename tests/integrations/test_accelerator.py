"""An attached Accelerator: what it converts, what it leaves alone, what unwraps again."""

import logging

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import extract_model_from_parallel
from torch import nn

from sppo_hf import ConfigError, SPPOPlugin
from sppo_hf.integrations import accelerator as accelerator_module
from sppo_hf.integrations.accelerator import own_recomputation
from sppo_hf.model.adapters import quiet_peft
from sppo_hf.model.convert import get_engine, is_converted
from tests.integrations.training import (
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
    with quiet_peft():
        config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config)


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


def test_a_compiled_model_is_refused():
    with pytest.raises(ConfigError, match="compiled"):
        _accelerator().prepare(torch.compile(make_model(), backend="eager"))


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


def test_checkpointing_of_the_model_is_switched_off_with_a_word(caplog):
    model = make_model()
    switch_checkpointing_on(model)
    with caplog.at_level(logging.WARNING, logger="sppo_hf"):
        _accelerator().prepare(model)
    assert not is_checkpointing(model)
    assert "recomputes by itself" in caplog.text
    caplog.clear()
    assert not own_recomputation(model)
    assert not caplog.records


def test_checkpointing_of_a_peft_model_is_switched_off():
    model = _lora(make_model())
    switch_checkpointing_on(model.get_base_model())
    assert own_recomputation(model)
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
