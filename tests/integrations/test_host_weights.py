"""Weights and optimizer on the host, by the Trainer and by a raw loop: as if they were not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import Trainer
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from sppo_hf import ConfigError, SPPOConfig, SPPOPlugin
from sppo_hf.engine.convert import get_engine
from sppo_hf.integrations.accelerator import optimizer_state_bytes, reason_against_host
from sppo_hf.integrations.validation import check_host_placement
from sppo_hf.offload.copy_streams import HostCopier
from sppo_hf.planning import plan
from sppo_hf.planning.choices import Placement
from sppo_hf.testing.exactness import float64_everywhere
from tests.fakes.device import FakeDevice
from tests.integrations.training import VOCABULARY, make_arguments, make_model, make_rows
from tests.sweeps import ALL

HOST = ({"weights": "host"}, {"optimizer": "host"})


def _train(
    folder: Path,
    plugin: SPPOPlugin | None,
    resume: str | None = None,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
):
    AcceleratorState._reset_state(reset_partial_state=True)
    trainer = Trainer(
        make_model().to(dtype),
        make_arguments(folder, parallelism_config=plugin, **changes),
        train_dataset=make_rows(40),
        eval_dataset=make_rows(10, seed=2),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def _numbers(trainer: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


STEPS = 50 if ALL else 4


@pytest.mark.slow
@pytest.mark.parametrize("places", HOST, ids=str)
def test_many_steps_are_those_of_the_plain_trainer(places: dict[str, str], tmp_path: Path) -> None:
    batch = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.3,
        "max_steps": STEPS,
        "eval_strategy": "steps",
        "eval_steps": STEPS // 2,
    }
    # In float64: what Adam makes of a gradient near zero differs by the machine in float32.
    with float64_everywhere():
        batch["dtype"] = torch.float64
        plain = _train(tmp_path / "plain", None, **batch)
        hosted = _train(tmp_path / "host", SPPOPlugin(chunk_tokens=16, **places), **batch)
    for name in ("loss", "grad_norm", "eval_loss"):
        assert len(_numbers(plain, name)) in (2, STEPS)
        assert _numbers(hosted, name) == pytest.approx(_numbers(plain, name), rel=1e-5)
    for ours, theirs in zip(hosted.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("places", HOST, ids=str)
def test_training_resumes_from_a_checkpoint(
    places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What rests is in pieces of locked memory, as on CUDA; a checkpoint has its bytes alone.
    monkeypatch.setattr(HostCopier, "page_locker", FakeDevice())
    steps = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    plugin = SPPOPlugin(chunk_tokens=16, **places)
    whole = _train(tmp_path, plugin, **steps)
    begun = str(tmp_path / "checkpoint-2")
    resumed = _train(tmp_path, SPPOPlugin(chunk_tokens=16, **places), begun, **steps)
    plain = _train(tmp_path, None, begun, **steps)
    for other in (resumed, plain):
        for ours, theirs in zip(whole.model.parameters(), other.model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    saved = (tmp_path / "checkpoint-4" / "model.safetensors").stat().st_size
    assert saved < 1.5 * sum(p.nbytes for p in whole.model.parameters())


def test_a_dropped_loss_leaves_nothing_on_the_device_for_the_optimizer() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, parallelism_config=SPPOPlugin(weights="host"))
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    ids = torch.arange(12)[None]
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    weights = get_engine(model).weights
    assert weights.device_bytes == 0
    model(input_ids=ids, labels=ids)
    assert weights.device_bytes > 0
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert weights.device_bytes == 0
    assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def _decided(places: Placement) -> Callable[..., tuple[Placement, ...]]:
    """Place on the host, as on a full GPU, whatever settings and optimizer leave open."""

    def read(config: SPPOConfig, *_: object, **__: object):
        return (
            (places,)
            if config.host_resident != (True, True)
            else (Placement(*config.host_resident),)
        )

    return read


@pytest.mark.parametrize("places", [Placement(False, True), Placement(True, True)], ids=str)
def test_planned_host_placement_happens_before_the_first_step(
    places: Placement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With Adam's own epsilon, rounding decides the sign of steps along the smallest gradients.
    steps = {"max_steps": 3, "adam_epsilon": 1e-3}
    plain = _train(tmp_path / "plain", None, **steps)
    monkeypatch.setattr(plan, "read_placements", _decided(places))
    auto = _train(tmp_path / "auto", SPPOPlugin(chunk_tokens=16), **steps)
    weights = get_engine(auto.model).weights
    assert weights.keep_device_copies is not places.weights
    assert weights.host_bytes == sum(p.nbytes for p in auto.model.parameters())
    for ours, theirs in zip(auto.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_weights_follow_the_optimizer_where_longer_rows_ask_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, parallelism_config=SPPOPlugin(chunk_tokens=4))
    model, plain = make_model(), make_model()
    optimizers = [torch.optim.AdamW(m.parameters(), eps=1e-3) for m in (model, plain)]
    model, ours = accelerator.prepare(model, optimizers[0])
    for tokens, places in ((8, Placement(False, True)), (12, Placement(True, True)), (8, None)):
        if places is not None:
            monkeypatch.setattr(plan, "read_placements", _decided(places))
        ids = torch.arange(tokens)[None]
        for one, optimizer in ((model, ours), (plain.train(), optimizers[1])):
            one(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert get_engine(model).weights.keep_device_copies is (places == Placement(False, True))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert optimizers[0].param_groups[0]["fused"], "torch's fused kernel updates host memory"
    assert optimizers[1].param_groups[0]["fused"] is None


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        (torch.optim.AdamW, {"num_processes": 2}, "2 processes"),
        (torch.optim.AdamW, {"mixed_precision": "fp16"}, "fp16"),
        (torch.optim.LBFGS, {}, "what torch.optim.lbfgs.LBFGS keeps"),
        (torch.optim.AdamW, {}, ""),
    ],
)
def test_reasons_against_host_weights_are_named(
    kind: Any, changes: dict[str, Any], named: str
) -> None:
    accelerator = SimpleNamespace(**{"num_processes": 1, "mixed_precision": "no", **changes})
    said = reason_against_host(accelerator, kind([torch.nn.Parameter(torch.rand(2))]))
    assert named in said
    assert bool(said) == bool(named)


@pytest.mark.parametrize(
    ("kind", "options", "per_parameter"),
    [
        (torch.optim.AdamW, {}, 2),
        (torch.optim.Adam, {"amsgrad": True}, 3),
        (torch.optim.SGD, {}, 0),
        (torch.optim.SGD, {"momentum": 0.9}, 1),
    ],
)
def test_optimizer_state_bytes_are_known_before_the_first_step(
    kind: Any, options: dict[str, Any], per_parameter: int
) -> None:
    parameter = torch.nn.Parameter(torch.rand(64, dtype=torch.bfloat16))
    optimizer = kind([parameter], **options)
    said = optimizer_state_bytes(optimizer)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = sum(x.nbytes for x in optimizer.state[parameter].values() if x.numel() > 1)
    assert said == kept == per_parameter * parameter.nbytes


class _Eight(torch.optim.AdamW):
    """An optimizer whose kernels are for GPUs alone."""


_Eight.__module__ = "bitsandbytes.optim.adamw"


def _update_in_backward(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Make what Transformers makes for optimizers by layer, such as "galore_adamw_layerwise"."""
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in parameters}

    def update(parameter: torch.nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    return LayerWiseDummyOptimizer(optimizer_dict=optimizers)


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (_Eight, {}, "bitsandbytes.optim.adamw._Eight"),
        (torch.optim.AdamW, {"capturable": True}, "capturable=True"),
        (_update_in_backward, {}, "transformers.trainer_pt_utils.LayerWiseDummyOptimizer"),
    ],
)
def test_an_optimizer_that_needs_the_device_is_refused_on_the_host(kind, options, named) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, parallelism_config=SPPOPlugin(optimizer="host"))
    model = make_model()
    with pytest.raises(ConfigError, match=f"cannot be on the host: {named}"):
        accelerator.prepare(model, kind(model.parameters(), **options))


def test_an_optimizer_that_updates_in_backward_keeps_weights_on_the_device() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, parallelism_config=SPPOPlugin())
    model = make_model()
    accelerator.prepare(model, _update_in_backward(model.parameters()))
    assert "during backward" in get_engine(model).plans.device_only_reason


@pytest.mark.parametrize("places", HOST, ids=str)
def test_hooks_that_update_weights_on_the_host_are_refused(places: dict[str, str]) -> None:
    model = SPPOPlugin(num_chunks=2, show_plan=False, **places).convert(make_model())
    _update_in_backward(model.parameters())
    get_engine(model).placement.place(torch.device("cpu"))
    batch = torch.arange(24)[None]
    with pytest.raises(ConfigError, match="removes"):
        model(input_ids=batch, labels=batch).loss.backward()


def test_the_trainer_never_moves_all_of_the_model_to_the_device(tmp_path: Path) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    model = make_model()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("all weights at once may be more than the device holds")

    model.to = refuse
    plugin = SPPOPlugin(chunk_tokens=16, weights="host")
    arguments = make_arguments(tmp_path, parallelism_config=plugin, max_steps=1)
    trained = Trainer(model, arguments, train_dataset=make_rows(4)).train()
    assert trained.global_step == 1
    assert get_engine(model).weights.host_bytes == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ({"num_processes": 2}, "weights='host' with 2 processes"),
        ({"mixed_precision": "fp16"}, "weights='host' with mixed_precision='fp16'"),
    ],
)
def test_host_placement_with_fp16_or_processes_is_refused(seen: dict[str, Any], said: str) -> None:
    accelerator = SimpleNamespace(**{"num_processes": 1, "mixed_precision": "no", **seen})
    with pytest.raises(ConfigError, match=said):
        check_host_placement(accelerator, SPPOConfig(weights="host"))


def test_the_action_log_ends_with_the_update(tmp_path: Path) -> None:
    plugin = SPPOPlugin(chunk_tokens=16, weights="host", trace_dir=str(tmp_path / "did"))
    _train(tmp_path, plugin, max_steps=2, gradient_accumulation_steps=2)
    ran = (tmp_path / "did" / "rank0.actions").read_text().split()
    assert ran[-1] == "0U0"
    assert ran.count("0U0") == 1
    assert ran[0].startswith("0P0.")
    trace = (tmp_path / "did" / "rank0.trace.json").read_text()
    assert '"host compute"' in trace


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_may_be_resized_between_two_trainings(tied: bool, tmp_path: Path) -> None:
    """Resizing gives parameters other data, and may put other parameters into the model."""

    def train(**places: str) -> Trainer:
        AcceleratorState._reset_state(reset_partial_state=True)
        plugin = SPPOPlugin(chunk_tokens=8, **places) if places else None
        arguments = make_arguments(
            tmp_path,
            parallelism_config=plugin,
            gradient_accumulation_steps=2,
            optim="sgd",
            max_steps=2,
        )
        model = make_model(tie_word_embeddings=tied)
        trainer = Trainer(model, arguments, train_dataset=make_rows(16))
        trainer.train()
        model.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
        model.lm_head = copy.deepcopy(model.lm_head)
        model.tie_weights()
        trainer.optimizer = trainer.lr_scheduler = None
        trainer.train()
        return trainer

    plain, hosted = train(), train(weights="host")
    for ours, theirs in zip(hosted.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    weights = get_engine(hosted.model).weights
    assert all(weights.has(parameter) for parameter in hosted.model.parameters())


def test_data_that_is_assigned_before_the_optimizer_steps_stays() -> None:
    def train(**places: str) -> list[torch.Tensor]:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(
            cpu=True, parallelism_config=SPPOPlugin(**places) if places else None
        )
        model = make_model()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        ids = torch.arange(12)[None]
        for _ in range(2):
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
            for parameter in model.parameters():
                parameter.data = parameter.data.clamp(-0.02, 0.02)
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    for ours, theirs in zip(train(weights="host"), train(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
