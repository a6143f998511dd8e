"""Whole training steps with random pauses on every stream: no order is left to luck.

On the fake device every operation of the model and every copy is checked for races; on CUDA the
results are compared, with freed and new device bytes spoilt so that a lost race shows. Sizes are
small, so that `compute-sanitizer` can run the CUDA half:

    compute-sanitizer --tool memcheck python -m pytest -m gpu tests/engine/test_delays.py
"""

import contextlib
import random
import tempfile

import pytest
import torch

from sppo_hf import SPPOConfig
from sppo_hf.engine import plan_cache
from sppo_hf.engine.convert import convert, get_engine, revert
from sppo_hf.offload import engine as offload_engine
from sppo_hf.offload.copy_streams import StreamCopier, StreamTicket
from sppo_hf.offload.engine import make_engine
from sppo_hf.offload.tiers import _ReclaimedRegion
from sppo_hf.planning.activation_modes import all_modes
from sppo_hf.testing.tiny_models import build_tiny_model, make_batch
from tests.engine.forced_plans import force_kv, force_modes
from tests.fakes.delays import FAKE_SECONDS, delayed_cuda, delayed_fake
from tests.fakes.device import RaceError
from tests.fakes.disk import FakeDisk
from tests.fakes.operations import OperatingDevice, Operations
from tests.sweeps import ALL

LENGTHS = [5, 1, 9, 8]
TOKENS = sum(LENGTHS)
MODES = [mode for mode in all_modes() if mode.tier != "disk"]
STEPS = 2
STAGING_BYTES = 2**16


def _steps(model, batch, device, around, steps=STEPS):
    """Loss and gradients of a few steps, each under `around`; spoils what a step leaves free."""
    results = []
    for _ in range(steps):
        model.zero_grad()
        with around():
            loss = model(**batch).loss
            loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        del loss
        if device.type == "cuda":
            torch.full((2**20,), float("nan"), device=device)
    return results


def assert_exact(monkeypatch, family, device, copier, around, seed, *, disk=None):
    """Random modes and K/V on the host, against the model with everything kept on the device.

    With `disk`, which takes the place of its store, and little staging, modes offload there, too.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batch = {name: x.to(device) for name, x in make_batch(rows=2, tokens=TOKENS).items()}
    model = build_tiny_model(family, dtype=torch.float64).to(device).train()
    settings = {"chunk_lengths": LENGTHS, "min_offload_size": 1, "show_plan": False}
    convert(model, SPPOConfig(**settings, offload="none", recompute="none"))
    (expected,) = _steps(model, batch, device, contextlib.nullcontext, steps=1)
    revert(model)
    modes = {}
    with monkeypatch.context() as patch:
        allowed = MODES if disk is None else all_modes()
        force_modes(patch, lambda *at: modes.setdefault(at, draw.choice(allowed)))
        force_kv(patch, block_tokens=draw.choice([1, 6, TOKENS]))
        patch.setattr(offload_engine, "HostCopier", copier)
        patch.setattr(offload_engine, "StreamCopier", lambda *_, **settings: copier(**settings))
        if disk is not None:
            settings["offload_dir"] = tempfile.gettempdir()
            sizes = {"staging_bytes": STAGING_BYTES, "budget_bytes": 2 * STAGING_BYTES}
            make = lambda device, **plan: make_engine(device, **(plan | sizes))  # noqa: E731
            patch.setattr(plan_cache, "make_engine", make)
            patch.setattr(plan_cache, "Store", lambda _, space, **__: space.close() or disk)
        convert(model, SPPOConfig(**settings))
        for ours in _steps(model, batch, device, around):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)
            get_engine(model).offload.assert_drained()
    stats = get_engine(model).offload.stats()
    assert stats.d2h_bytes > 0
    assert stats.h2d_bytes > 0
    get_engine(model).close()


def _assert_exact_on_the_fake_device(monkeypatch, family, seed, *, with_disk=False):
    device = OperatingDevice(lambda stream, num_bytes: 0.5)
    runtime = delayed_fake(device, seed)
    draw = random.Random(seed)
    seconds = lambda num_bytes: draw.choice(FAKE_SECONDS)  # noqa: E731
    disk = FakeDisk(device, seconds, seconds) if with_disk else None
    assert_exact(
        monkeypatch,
        family,
        torch.device("cpu"),
        lambda **_: StreamCopier(runtime),
        lambda: Operations(device, seconds=0.1),
        seed,
        disk=disk,
    )
    device.finish()
    if disk is None:
        assert device.host_waits == 0
    else:
        assert min(disk.writes, disk.reads) > 0


# With a disk llama runs always, below.
@pytest.mark.parametrize(
    ("family", "seed"),
    [("gpt_oss", 3), *([("llama", 0), ("llama", 1), ("llama", 2)] if ALL else ())],
)
def test_no_operation_races_on_the_fake_device(monkeypatch, family, seed):
    _assert_exact_on_the_fake_device(monkeypatch, family, seed)


def test_no_operation_races_with_a_disk(monkeypatch):
    _assert_exact_on_the_fake_device(monkeypatch, "llama", 0, with_disk=True)


def test_the_fake_device_sees_staging_that_is_reused_too_early(monkeypatch):
    monkeypatch.setattr(_ReclaimedRegion, "is_over", lambda self: True)
    with pytest.raises(RaceError):
        _assert_exact_on_the_fake_device(monkeypatch, "llama", 0, with_disk=True)


@pytest.mark.parametrize("broken", ["wait", "ordered"])
def test_the_fake_device_sees_a_broken_order(monkeypatch, broken):
    mutants = {"wait": lambda self: None, "ordered": property(lambda self: True)}
    monkeypatch.setattr(StreamTicket, broken, mutants[broken])
    with pytest.raises(RaceError):
        _assert_exact_on_the_fake_device(monkeypatch, "llama", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("own_streams", [True, False])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_results_are_right_on_cuda(monkeypatch, family, seed, own_streams):
    runtime = delayed_cuda(seed)
    assert_exact(
        monkeypatch,
        family,
        torch.device("cuda"),
        lambda **_: StreamCopier(runtime, own_streams=own_streams),
        contextlib.nullcontext,
        seed,
    )
