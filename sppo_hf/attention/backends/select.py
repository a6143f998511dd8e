"""Choosing a backend: by name, or "auto" with a reason a person can read.

"auto" goes through the backends of a device type from fast to general and takes the first that
can serve the requirement. A backend for CUDA also has to agree with the reference on small inputs,
once per process, device and requirement, before it is trusted.

Knows the backends and what they say about themselves, nothing of models.
"""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sppo_hf.attention.backends.aten_flash import AtenFlash
from sppo_hf.attention.backends.base import Backend, Requirement
from sppo_hf.attention.backends.cpu_flash import CPUFlash
from sppo_hf.attention.backends.cudnn import CuDNN
from sppo_hf.attention.backends.efficient import Efficient
from sppo_hf.attention.backends.flash_attn import (
    FlashAttention2,
    FlashAttention3,
    FlashAttention4,
)
from sppo_hf.attention.backends.reference import Reference
from sppo_hf.attention.backends.verify import find_mismatch
from sppo_hf.errors import ConfigError

logger = logging.getLogger(__name__)

Factory = Callable[[], Backend]


def _head_variants(make: Callable[..., Backend], *, native_sizes: bool) -> tuple[Factory, ...]:
    """Variants that leave more and more of the heads' adaptation to us.

    Args:
        make: class of the backend.
        native_sizes: try values of another head size than the keys' unpadded first.
    """
    sizes = (False, True) if native_sizes else (True,)
    return tuple(
        functools.partial(make, grouped_heads=grouped, equal_head_sizes=equal)
        for grouped in (True, False)
        for equal in sizes
    )


BACKENDS: dict[str, tuple[Factory, ...]] = {
    "reference": (Reference,),
    "cpu_flash": (CPUFlash,),
    "aten_flash": (AtenFlash, functools.partial(AtenFlash, grouped_heads=False)),
    "cudnn": _head_variants(CuDNN, native_sizes=True),
    "efficient": (Efficient,),
    "flash_attention_2": _head_variants(FlashAttention2, native_sizes=False),
    "flash_attention_3": _head_variants(FlashAttention3, native_sizes=False),
    "flash_attention_4": _head_variants(FlashAttention4, native_sizes=True),
}
"""Variants of every backend by name, the preferred one first."""

AUTO_ORDER: dict[str, tuple[str, ...]] = {
    "cpu": ("cpu_flash",),
    "cuda": (
        "flash_attention_3",
        "flash_attention_4",
        "flash_attention_2",
        "aten_flash",
        "cudnn",
        "efficient",
    ),
}
"""Backends that "auto" tries per device type before it falls back to the reference."""

VERIFIED_DEVICE_TYPES = frozenset({"cuda"})
"""Where a backend must agree with the reference before its first use."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A backend and why it was taken."""

    backend: Backend
    reason: str
    """One sentence for the plan's table, such as
    "cpu_flash: CPU, float32, head size 64; reference not needed"."""


def select_backend(name: str, requirement: Requirement) -> Selection:
    """Choose the attention backend.

    Args:
        name: a key of `BACKENDS`, or "auto".
        requirement: what the model needs.

    Returns:
        The backend, ready to use, and the reason. On CUDA the first call with a requirement runs
        small checks on the current device.

    Raises:
        ConfigError: if the name is unknown, or the named backend cannot serve the requirement;
            the message says which backends can.
    """
    if name == "auto":
        return _select_automatically(requirement)
    if name not in BACKENDS:
        allowed = ["auto", *BACKENDS]
        nearest = difflib.get_close_matches(name, allowed, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(
            f"attention_backend={name!r} is unknown; allowed are {', '.join(allowed)}{hint}"
        )
    found = _find(name, requirement)
    if isinstance(found, Backend):
        return Selection(found, f"{name}: asked for by name; {requirement}")
    able = [other for other in BACKENDS if isinstance(_find(other, requirement), Backend)]
    raise ConfigError(
        f"attention_backend={name!r} cannot serve {requirement}: it {found}. "
        f"Backends that can: {', '.join(able) or 'none'}; or set attention_backend='auto'"
    )


def _select_automatically(requirement: Requirement) -> Selection:
    """First backend of the device's order that works, else the reference."""
    passed_over: list[str] = []
    for name in AUTO_ORDER.get(requirement.device_type, ()):
        found = _find(name, requirement)
        if isinstance(found, Backend):
            because = "; ".join([*passed_over, "reference not needed"])
            return Selection(found, f"{name}: {requirement}; {because}")
        logger.info("attention backend %s passed over: it %s", name, found)
        passed_over.append(f"{name} {found}")
    because = "; ".join(passed_over) or f"no fused kernel for {requirement.device_type}"
    found = _find("reference", requirement)
    if isinstance(found, Backend):
        return Selection(found, f"reference: {requirement}; {because}")
    raise ConfigError(
        f"no attention backend can serve {requirement}: the reference {found}. "
        "Load the model in float32, bfloat16 or float16"
    )


def _find(name: str, requirement: Requirement) -> Backend | str:
    """A variant of the named backend that serves the requirement, or why none does."""
    device_name = requirement.device_type
    if requirement.device_type == "cuda" and torch.cuda.is_available():
        device_name = f"cuda:{torch.cuda.current_device()}"
    return _find_on(name, requirement, device_name)


@functools.cache
def _find_on(name: str, requirement: Requirement, device_name: str) -> Backend | str:
    """`_find` for one device; cached, since checking runs kernels."""
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
