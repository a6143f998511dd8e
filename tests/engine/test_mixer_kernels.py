"""Optional kernels of mixers: stand-ins that are right, wrong or fail."""

import contextlib
import copy
import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from sppo_hf.config import SPPOConfig
from sppo_hf.engine import mixer_kernels
from sppo_hf.engine.convert import convert
from sppo_hf.engine.family_guard import family_check_disabled
from sppo_hf.engine.model_parts import find_parts
from sppo_hf.engine.trace_profile import trace_config
from sppo_hf.planning.model_profile import Training
from sppo_hf.testing.exactness import Gradients, parameter_errors, run_batch, run_reference
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch, tiny_config
from tests.engine.forced_plans import trace_short_scans

DELTA_RULE = "torch_chunk_gated_delta_rule"
SETTINGS = SPPOConfig(chunk_lengths=(5, 9, 6), recompute="full", show_plan=False)


class Installed:
    """A function in a family's module, replaced as by an installed package."""

    def __init__(self, family: str, name: str, kernel: Callable[..., Any]) -> None:
        self.module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        self.name = name
        self.own = getattr(self.module, name)
        self.calls = 0

        @functools.wraps(self.own.__wrapped__)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return kernel(self.own, *args, **kwargs)

        setattr(self.module, name, wrapped)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Installed]]:
    monkeypatch.setattr(mixer_kernels, "PACKAGES", ("torch",))
    trace_short_scans(monkeypatch)
    installed: list[Installed] = []

    def _install(*args: Any) -> Installed:
        installed.append(Installed(*args))
        return installed[-1]

    yield _install
    for one in reversed(installed):
        setattr(one.module, one.name, one.own)


def as_it_is(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return own(*args, **kwargs)


def no_gradient_of_state(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("initial_state") is not None:
        kwargs["initial_state"] = kwargs["initial_state"].detach()
    return own(*args, **kwargs)


def no_gradient_of_decay(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return own(*args, **kwargs | {"g": kwargs["g"].detach()})


def no_state(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return own(*args, **kwargs | {"initial_states": None})


def narrow_alone(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if args[0].dtype == torch.float64:
        raise RuntimeError("no kernel for float64")
    return own(*args, **kwargs)


def not_here(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("0 active drivers: there is no GPU")


def worst_error(model: nn.Module, reference: Gradients, batch: Any) -> float:
    """The worst relative error of loss and gradients of a converted copy of `model`."""
    converted = copy.deepcopy(model)
    with family_check_disabled():  # it would try each family before
        convert(converted, SETTINGS)
    ours = run_batch(converted, batch, hooks=True)
    worst = max(error.error for error in parameter_errors(ours, reference))
    return max(worst, abs(ours.loss - reference.loss))


@pytest.mark.parametrize(
    ("family", "name", "kernel", "why"),
    [
        ("qwen3_next", DELTA_RULE, no_gradient_of_state, "inputs in chunk 1"),
        ("qwen3_next", DELTA_RULE, no_gradient_of_decay, "gives no gradient of"),
        ("bamba", "mamba2_chunk_scan", no_state, "output in chunk 2"),
        ("lfm2", "causal_conv1d_fn", not_here, "RuntimeError: 0 active drivers"),
    ],
)
def test_a_kernel_that_differs_is_reported_and_not_used(
    install: Callable[..., Installed],
    caplog: pytest.LogCaptureFixture,
    family: str,
    name: str,
    kernel: Callable[..., Any],
    why: str,
) -> None:
    model, batch = build_tiny_model(family), make_batch(tokens=20)
    reference = run_reference(model, batch)
    installed = install(family, name, kernel)
    with caplog.at_level(logging.WARNING, mixer_kernels.__name__):
        assert worst_error(model, reference, batch) < 1e-9
    (record,) = (one for one in caplog.records if one.name == mixer_kernels.__name__)
    assert name in record.getMessage()
    assert why in record.getMessage()
    tried = installed.calls
    assert worst_error(model, reference, batch) < 1e-9
    assert installed.calls == 2 * tried, "a step without it, after the trial"
    # A model that is not converted still uses the kernel.
    with contextlib.suppress(RuntimeError):
        run_batch(copy.deepcopy(model), batch)
    assert installed.calls > 2 * tried


def test_profiles_are_traced_without_kernels(install: Callable[..., Installed]) -> None:
    installed = install("lfm2", "causal_conv1d_fn", not_here)
    trace_config(tiny_config("lfm2"), Training(dtype_bytes=4, parameter_bytes=4))
    assert installed.calls == 0


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3_next", DELTA_RULE), ("mamba2", "mamba2_chunk_scan")],
)
def test_a_kernel_that_agrees_is_used(
    install: Callable[..., Installed], caplog: pytest.LogCaptureFixture, family: str, name: str
) -> None:
    model, batch = build_tiny_model(family), make_batch(tokens=20)
    reference = run_reference(model, batch)
    installed = install(family, name, as_it_is)
    assert worst_error(model, reference, batch) < 1e-9
    # Forward and recomputation of three chunks, in every layer, beside the two chunks of the trial.
    assert installed.calls >= 2 + 2 * 3
    assert all(one.name != mixer_kernels.__name__ for one in caplog.records)


def test_a_kernel_that_is_not_for_float64_is_used_by_other_models(
    install: Callable[..., Installed], caplog: pytest.LogCaptureFixture
) -> None:
    """The check that conversion makes of a family runs in float64 and on the CPU."""
    installed = install("qwen3_next", DELTA_RULE, narrow_alone)
    model = build_tiny_model("qwen3_next", dtype=torch.float32)
    convert(model, SETTINGS)
    batch = make_batch(tokens=20)
    with torch.inference_mode():  # where nothing has a gradient, nothing is rejected for that
        model(**batch)
    before = installed.calls
    model(**batch).loss.backward()
    assert installed.calls > before
    assert all(one.name != mixer_kernels.__name__ for one in caplog.records)


def test_the_comparison_leaves_the_random_state_unchanged(
    install: Callable[..., Installed],
) -> None:
    install("lfm2", "causal_conv1d_fn", as_it_is)
    model = build_tiny_model("lfm2")
    parts = find_parts(model)
    before = torch.get_rng_state()
    mixer_kernels.check_mixer_kernels(parts, torch.device("cpu"))
    assert not mixer_kernels._rejected[model]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
