"""Choosing a backend: by name, or "auto" with a reason a person can read.

"auto" goes through the backends of a device type from fast to general. A backend for CUDA also has
to agree with the reference on small inputs, once per process, device and requirement, before it is
trusted. Where several can serve the requirement on CUDA, they race once and the fastest is taken;
on a CPU the first is. What is asked for by name is never timed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sppo_hf.attention.backends.autotune import autotune, autotune_key, run_apart
from sppo_hf.attention.backends.base import AttentionSpec, Backend, determinism
from sppo_hf.attention.backends.select import find_mismatch
from sppo_hf.errors import ConfigError
from sppo_hf.planning.autotune_store import (
    AutotuneResult,
    autotune_path,
    publish_autotune,
    read_autotune,
)
from sppo_hf.registry import ATTENTION_BACKENDS

logger = logging.getLogger(__name__)

BACKENDS: dict[str, tuple[Callable[[], Backend], ...]] = ATTENTION_BACKENDS.load()
"""Variants of every backend by name, the preferred one first."""


def _auto_order(device_type: str) -> tuple[str, ...]:
    able = ATTENTION_BACKENDS.where(device_type)
    return tuple(sorted(able, key=lambda name: ATTENTION_BACKENDS.facts(name)[device_type]))


AUTO_ORDER: dict[str, tuple[str, ...]] = {kind: _auto_order(kind) for kind in ("cpu", "cuda")}
"""Backends that "auto" tries per device type before it falls back to the reference."""

VERIFIED_DEVICE_TYPES = frozenset({"cuda"})
"""Where a backend must agree with the reference before its first use."""

AUTOTUNED_DEVICE_TYPES = frozenset({"cuda"})
"""Where "auto" times the backends that it may take, if there is such a device."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A backend and why it was taken."""

    backend: Backend
    reason: str
    """One sentence for the plan's table, such as
    "cpu_flash: CPU, float32, head size 64; reference not needed"."""


def select_backend(name: str, requirement: AttentionSpec) -> Selection:
    """Choose the attention backend.

    Args:
        name: a key of `BACKENDS`, or "auto".
        requirement: what the model needs.

    Returns:
        The backend, ready to use, and the reason. On CUDA the first call with a requirement runs
        small checks on the current device, and "auto" a race of under two seconds unless one was
        run before, see `autotune`.

    Raises:
        ConfigError: if the name is unknown, or the named backend cannot serve the requirement;
            the message says which backends can.
    """
    if name == "auto":
        return _select_automatically(requirement)
    if name not in BACKENDS:
        allowed = ["auto", *BACKENDS]
        nearest = ATTENTION_BACKENDS.nearest(name)
        hint = f"; did you mean {nearest!r}?" if nearest else ""
        raise ConfigError(
            f"attention_backend={name!r} is unknown; allowed are {', '.join(allowed)}{hint}"
        )
    found = find_backend(name, requirement)
    if isinstance(found, Backend):
        return Selection(found, f"{name}: asked for by name; {requirement}")
    able = [other for other in BACKENDS if isinstance(find_backend(other, requirement), Backend)]
    raise ConfigError(
        f"attention_backend={name!r} cannot serve {requirement}: it {found}. "
        f"Backends that can: {', '.join(able) or 'none'}; or set attention_backend='auto'"
    )


def _select_automatically(requirement: AttentionSpec) -> Selection:
    """The fastest or first backend of the device's order that works, else the reference."""
    raced = _select_fastest(requirement)
    if raced is not None:
        return raced
    passed_over: list[str] = []
    order = AUTO_ORDER.get(requirement.device_type, ())
    # False comes before True.
    for name in sorted(order, key=lambda name: _stumbles(name, requirement)):
        found = find_backend(name, requirement)
        if isinstance(found, Backend):
            because = "; ".join([*passed_over, "reference not needed"])
            return Selection(found, f"{name}: {requirement}; {because}")
        logger.info("attention backend %s passed over: it %s", name, found)
        passed_over.append(f"{name} {found}")
    because = "; ".join(passed_over) or f"no fused kernel for {requirement.device_type}"
    found = find_backend("reference", requirement)
    if isinstance(found, Backend):
        return Selection(found, f"reference: {requirement}; {because}")
    raise ConfigError(
        f"no attention backend can serve {requirement}: the reference {found}. "
        "Load the model in float32, bfloat16 or float16"
    )


def _select_fastest(requirement: AttentionSpec) -> Selection | None:
    """The winner of the race; None where none is run, or nobody finished."""
    kind = requirement.device_type
    if kind not in AUTOTUNED_DEVICE_TYPES or (kind == "cuda" and not torch.cuda.is_available()):
        return None
    result = _race_on(_alike(requirement), _device_name(requirement), determinism())
    if result is None:
        return None
    for lap in result.ranking():
        if _stumbles(lap.name, requirement):
            continue
        found = find_backend(lap.name, requirement)
        if isinstance(found, Backend):
            left_out = [f"{name} {reason}" for name, reason in result.left_out.items()]
            reason = "; ".join([result.text(lap.name), str(requirement), *left_out])
            return Selection(found, reason)
        # Another process timed it, and in this one it is wrong.
        logger.warning("attention backend %s won a race, but it %s", lap.name, found)
    return None


def _stumbles(name: str, requirement: AttentionSpec) -> bool:
    """Whether a race, whose shapes do not change, flatters a backend."""
    return requirement.varied and BACKENDS[name][0]().plans_each_shape


def _alike(requirement: AttentionSpec) -> AttentionSpec:
    """The requirement as far as it decides what a backend can do, and how fast it is."""
    return replace(requirement, varied=False)


@functools.cache
def _race_on(requirement: AttentionSpec, device_name: str, mode: int) -> AutotuneResult | None:
    """The race of all backends that can serve `requirement`; None where there is no choice.

    Cached for each `mode`, of `determinism`, apart.
    """
    order = AUTO_ORDER[requirement.device_type]
    hopeful = [n for n in order if BACKENDS[n][0]().reason_unsupported(requirement) is None]
    if len(hopeful) < 2:
        return None
    device = torch.device(device_name)
    path = autotune_path(*autotune_key(hopeful, requirement, device))
    result = read_autotune(path)
    if result is None:
        verdicts = {name: find_backend(name, requirement) for name in order}
        able = [found for found in verdicts.values() if isinstance(found, Backend)]
        if len(able) < 2:
            return None
        result = run_apart(lambda: autotune(able, requirement, device), device)
        wrong = {name: found for name, found in verdicts.items() if isinstance(found, str)}
        result = replace(result, left_out={**wrong, **result.left_out})
        result = publish_autotune(path, result)
    logger.info("attention backends raced for %s: %s", requirement, result)
    return result


def find_backend(name: str, requirement: AttentionSpec) -> Backend | str:
    """The variant of the named backend that serves the requirement, or why none does.

    Returns:
        The backend, or words that follow its name ("is not installed (package flash-attn)"). On
        CUDA the first call with a requirement compares it with the reference.
    """
    return _find_on(name, _alike(requirement), _device_name(requirement), determinism())


def _device_name(requirement: AttentionSpec) -> str:
    """The device that is meant, with its number where there is one."""
    if requirement.device_type == "cuda" and torch.cuda.is_available():
        return f"cuda:{torch.cuda.current_device()}"
    return requirement.device_type


@functools.cache
def _find_on(name: str, requirement: AttentionSpec, device_name: str, mode: int) -> Backend | str:
    """`find_backend` for one device; cached, since checking runs kernels.

    For each `mode`, of `determinism`, apart: not every backend can serve all of them.
    """
    reason = ""
    for make in BACKENDS[name]:
        backend = make()
        unsupported = backend.reason_unsupported(requirement)
        if unsupported is not None:
            return unsupported
        if name == "reference" or requirement.device_type not in VERIFIED_DEVICE_TYPES:
            return backend
        mismatch = find_mismatch(backend, requirement, torch.device(device_name))
        if mismatch is None:
            return backend
        logger.info("attention backend %s (%s): %s", name, make, mismatch)
        reason = reason or mismatch
    return reason
