"""Choosing a backend: by name, or "auto" with a reason a person can read.

"auto" goes through the backends of a device type from fast to general and takes the first that
can serve the requirement. A backend for CUDA also has to agree with the reference on small inputs,
once per process, device and requirement, before it is trusted.

Knows the backends and what they say about themselves, nothing of models.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from sppo_hf.attention.backends.base import Backend, Requirement
from sppo_hf.attention.backends.cpu_flash import CPUFlash
from sppo_hf.attention.backends.reference import Reference
from sppo_hf.errors import ConfigError

logger = logging.getLogger(__name__)

Factory = Callable[[], Backend]

BACKENDS: dict[str, tuple[Factory, ...]] = {
    "reference": (Reference,),
    "cpu_flash": (CPUFlash,),
}
"""Variants of every backend by name, the preferred one first."""

AUTO_ORDER: dict[str, tuple[str, ...]] = {"cpu": ("cpu_flash",)}
"""Backends that "auto" tries per device type before it falls back to the reference."""


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
        The backend, ready to use, and the reason.

    Raises:
        ConfigError: if the name is unknown, or the named backend cannot serve the requirement;
            the message says which backends can.
    """
    if name == "auto":
        return _select_automatically(requirement)
    if name not in BACKENDS:
        raise ConfigError(
            f"attention_backend={name!r} is unknown; allowed are auto, {', '.join(BACKENDS)}"
        )
    found = _first_variant(name, requirement)
    if isinstance(found, Backend):
        return Selection(found, f"{name}: asked for by name; {requirement}")
    able = [other for other in BACKENDS if isinstance(_first_variant(other, requirement), Backend)]
    raise ConfigError(
        f"attention_backend={name!r} cannot serve {requirement}: it {found}. "
        f"Backends that can: {', '.join(able) or 'none'}; or set attention_backend='auto'"
    )


def _select_automatically(requirement: Requirement) -> Selection:
    """First backend of the device's order that works, else the reference."""
    passed_over: list[str] = []
    for name in AUTO_ORDER.get(requirement.device_type, ()):
        found = _first_variant(name, requirement)
        if isinstance(found, Backend):
            because = "; ".join([*passed_over, "reference not needed"])
            return Selection(found, f"{name}: {requirement}; {because}")
        logger.info("attention backend %s passed over: it %s", name, found)
        passed_over.append(f"{name} {found}")
    because = "; ".join(passed_over) or f"no fused kernel for {requirement.device_type}"
    found = _first_variant("reference", requirement)
    if isinstance(found, Backend):
        return Selection(found, f"reference: {requirement}; {because}")
    raise ConfigError(f"no attention backend can serve {requirement}: reference {found}")


def _first_variant(name: str, requirement: Requirement) -> Backend | str:
    """First variant of a backend that serves the requirement, or why none does."""
    reasons: list[str] = []
    for make in BACKENDS[name]:
        backend = make()
        reason = backend.reason_unsupported(requirement)
        if reason is None:
            return backend
        reasons.append(reason)
    return reasons[0]
