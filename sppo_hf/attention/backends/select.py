"""Choosing an attention backend: by name, or "auto" with a reason that a person can read.

"auto" takes the backends of a device type from fast to general. On CUDA a backend must first agree
with the reference on a few small inputs, once per process, device and requirement. Where several
can serve the requirement on CUDA they are timed once (`autotune`) and the fastest is taken; on a
CPU the first is. A backend that is asked for by name is never timed.

Kernels for CUDA differ between releases and cards in what they accept and in how they align masks.
Instead of a table of versions, `find_mismatch` runs small cases that cover what a chunk meets: the
first chunk, a later one, a single token, padded queries, earlier keys alone, a window, merged
values, and scores far below zero. Most kernels need milliseconds for it. A kernel that builds a
plan for each new shape (cuDNN) takes a second per rectangle, so it gets only the cases that show
what the kernel itself can do; how bands are cut into rectangles is arithmetic, which tests on a CPU
cover.

[Note: low scores]
A row's log-sum-exp may lie anywhere. A kernel that computes exp(-lse) somewhere, or reads keys
beyond the end as if their score were 0, overflows float32 once it is below about -88. cuDNN's
backward has done so where half a tile (64 of 128 keys) was empty: NaN in dQ. Random inputs have
scores about 0 and never show it, so two cases shift all scores to about -120.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sppo_hf.attention.backends.autotune import autotune, autotune_key, run_isolated
from sppo_hf.attention.backends.base import (
    AttentionOutput,
    AttentionSpec,
    Backend,
    CausalBand,
    Documents,
    Mask,
    determinism,
    merge_partials,
)
from sppo_hf.attention.backends.reference import Reference
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
    able = ATTENTION_BACKENDS.names_with(device_type)
    return tuple(sorted(able, key=lambda name: ATTENTION_BACKENDS.facts(name)[device_type]))


AUTO_ORDER: dict[str, tuple[str, ...]] = {kind: _auto_order(kind) for kind in ("cpu", "cuda")}
"""Backends that "auto" tries per device type before it falls back to the reference."""

VERIFIED_DEVICE_TYPES = frozenset({"cuda"})
"""Device types on which a backend must agree with the reference before its first use."""

AUTOTUNED_DEVICE_TYPES = frozenset({"cuda"})
"""Device types on which "auto" times the backends that it may take, if there is a device."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A backend and why it was selected."""

    backend: Backend
    reason: str
    """One sentence for the plan's table, such as
    "cpu_flash: CPU, float32, head size 64; reference not needed"."""


def select_backend(name: str, requirement: AttentionSpec) -> Selection:
    """Choose the attention backend.

    `name` is a key of `BACKENDS`, or "auto". On CUDA the first call with a requirement runs small
    checks on the current device, and "auto" times the backends for less than two seconds unless a
    stored result exists, see `autotune`.

    Raises:
        ConfigError: the name is unknown, or the named backend cannot serve the requirement; the
            message names those that can.
    """
    if name == "auto":
        return _select_auto(requirement)
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


def _select_auto(requirement: AttentionSpec) -> Selection:
    """Return the fastest or first usable backend of the device type, else the reference."""
    raced = _select_fastest(requirement)
    if raced is not None:
        return raced
    rejected: list[str] = []
    order = AUTO_ORDER.get(requirement.device_type, ())
    # Those that the requirement does not slow down come first (False sorts before True).
    for name in sorted(order, key=lambda name: _replans_often(name, requirement)):
        found = find_backend(name, requirement)
        if isinstance(found, Backend):
            because = "; ".join([*rejected, "reference not needed"])
            return Selection(found, f"{name}: {requirement}; {because}")
        logger.info("attention backend %s passed over: it %s", name, found)
        rejected.append(f"{name} {found}")
    because = "; ".join(rejected) or f"no fused kernel for {requirement.device_type}"
    found = find_backend("reference", requirement)
    if isinstance(found, Backend):
        return Selection(found, f"reference: {requirement}; {because}")
    raise ConfigError(
        f"no attention backend can serve {requirement}: the reference {found}. "
        "Load the model in float32, bfloat16 or float16"
    )


def _select_fastest(requirement: AttentionSpec) -> Selection | None:
    """Return the fastest timed backend; None if none is timed or none succeeded."""
    kind = requirement.device_type
    if kind not in AUTOTUNED_DEVICE_TYPES or (kind == "cuda" and not torch.cuda.is_available()):
        return None
    result = _autotuned(_timing_requirement(requirement), _device_name(requirement), determinism())
    if result is None:
        return None
    for timing in result.ranking():
        if _replans_often(timing.name, requirement):
            continue
        found = find_backend(timing.name, requirement)
        if isinstance(found, Backend):
            left_out = [f"{name} {reason}" for name, reason in result.left_out.items()]
            reason = "; ".join([result.text(timing.name), str(requirement), *left_out])
            return Selection(found, reason)
        # The stored timing is of another process, and in this one the backend is wrong.
        logger.warning(
            "attention backend %s was the fastest when timed, but it %s", timing.name, found
        )
    return None


def _replans_often(name: str, requirement: AttentionSpec) -> bool:
    """Return whether the fixed shapes of the timing hide the cost of a plan for each shape."""
    return requirement.varied and BACKENDS[name][0]().plans_each_shape


def _timing_requirement(requirement: AttentionSpec) -> AttentionSpec:
    """Return the requirement without what affects neither support nor timing."""
    return replace(requirement, varied=False)


@functools.cache
def _autotuned(requirement: AttentionSpec, device_name: str, mode: int) -> AutotuneResult | None:
    """Time all backends that can serve `requirement`; None where there are less than two.

    Cached by `mode` too, the value of `determinism`.
    """
    order = AUTO_ORDER[requirement.device_type]
    candidates = [n for n in order if BACKENDS[n][0]().reason_unsupported(requirement) is None]
    if len(candidates) < 2:
        return None
    device = torch.device(device_name)
    path = autotune_path(*autotune_key(candidates, requirement, device))
    result = read_autotune(path)
    if result is None:
        verdicts = {name: find_backend(name, requirement) for name in order}
        able = [found for found in verdicts.values() if isinstance(found, Backend)]
        if len(able) < 2:
            return None
        result = run_isolated(lambda: autotune(able, requirement, device), device)
        wrong = {name: found for name, found in verdicts.items() if isinstance(found, str)}
        result = replace(result, left_out={**wrong, **result.left_out})
        result = publish_autotune(path, result)
    logger.info("attention backends timed for %s: %s", requirement, result)
    return result


def find_backend(name: str, requirement: AttentionSpec) -> Backend | str:
    """Return the variant of the named backend that serves the requirement, or why none does.

    Returns:
        The backend, or words that follow its name ("is not installed (package flash-attn)"). On
        CUDA the first call with a requirement compares it with the reference.
    """
    return _find_on_device(
        name, _timing_requirement(requirement), _device_name(requirement), determinism()
    )


def _device_name(requirement: AttentionSpec) -> str:
    """Return the current device of the requirement's type, with its index on CUDA."""
    if requirement.device_type == "cuda" and torch.cuda.is_available():
        return f"cuda:{torch.cuda.current_device()}"
    return requirement.device_type


@functools.cache
def _find_on_device(
    name: str, requirement: AttentionSpec, device_name: str, mode: int
) -> Backend | str:
    """Implement `find_backend` for one device; cached, because checks run kernels.

    The key includes `mode`, the value of `determinism`, which not every backend supports.
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


TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 2e-3,  # kernels may multiply in tf32
    torch.float16: 1e-2,
    torch.bfloat16: 4e-2,
}
"""Largest accepted error of a tensor, relative to its norm. A misplaced mask is above 0.1."""

_SOFTCAP = 5.0
_WINDOW_TOKENS = 50
_KV_HEADS = 2
_NUM_CHOSEN = 8

_LOW_SCORE = -120.0
"""Approximate value of all scores in a case with low scores."""


@dataclass(frozen=True, slots=True)
class _Case:
    """One small problem: numbers of queries and keys, and the mask between them."""

    num_rows: int
    num_keys: int
    band: Mask
    low_scores: bool = False

    def __str__(self) -> str:
        if isinstance(self.band, Documents):
            text = f"documents of {', '.join(map(str, self.band.num_queries))} queries"
        else:
            text = f"{self.num_rows} queries at {self.band.q_start} of {self.num_keys} keys"
        text += f", window {self.band.window}" if self.band.window else ""
        return text + (f", scores about {_LOW_SCORE:.0f}" if self.low_scores else "")


def find_mismatch(backend: Backend, requirement: AttentionSpec, device: torch.device) -> str | None:
    """Compare forward and backward of a backend with the reference.

    Returns:
        None if they agree, else what differs or which exception was raised.
    """
    cases = _cases(requirement, few=backend.plans_each_shape)
    if backend.documents_at_once:
        cases += _document_cases(requirement)
    for number, case in enumerate(cases):
        try:
            found = _compare(backend, requirement, device, case, seed=number)
        # Kernels raise all kinds of exceptions for what they cannot do.
        except Exception as error:
            logger.debug("backend %s failed on %s", backend.name, case, exc_info=True)
            first_line = (str(error).strip().splitlines() or [""])[0]
            return f"raised {type(error).__name__} for {case}: {first_line}"
        if found is not None:
            return f"differs from the reference in {found} for {case}"
    return None


def _cases(requirement: AttentionSpec, *, few: bool) -> list[_Case]:
    """Return problems that cover what chunks need under this requirement; `few`: a minimum."""
    shapes = [(77, 207, 130), (1, 131, 130)]
    shapes += [] if few else [(77, 77, 0), (77, 180, 130), (40, 90, 90), (77, 20, 25)]
    windows = (None, _WINDOW_TOKENS) if requirement.window else (None,)
    cases = [
        _Case(rows, keys, CausalBand(start, window))
        for rows, keys, start in shapes
        for window in windows
    ]
    if requirement.softcap:
        return cases  # a cap keeps scores near 0
    return cases + [_Case(64, 192, CausalBand(start), low_scores=True) for start in (192, 128)]


def _document_cases(requirement: AttentionSpec) -> list[_Case]:
    """Return packed rows: a document that began earlier, short ones, one of a single token."""
    queries, keys = (40, 1, 77, 9), (170, 1, 77, 9)
    windows = (None, _WINDOW_TOKENS) if requirement.window else (None,)
    return [_Case(sum(queries), sum(keys), Documents(queries, keys, w)) for w in windows]


def _compare(
    backend: Backend, requirement: AttentionSpec, device: torch.device, case: _Case, *, seed: int
) -> str | None:
    """Return the name and error of the first result that differs; None if all agree."""
    # Its own generator leaves the user's random state unchanged.
    generator = torch.Generator().manual_seed(seed)

    def random(heads: int, tokens: int, size: int) -> Tensor:
        """Queries, keys, ... as models lay them out: a transposed [B, tokens, heads, H]."""
        shape = (batch, tokens, heads, size)
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return x.to(device=device, dtype=requirement.dtype).transpose(1, 2)

    batch = 1 if isinstance(case.band, Documents) else 2
    heads = _KV_HEADS * requirement.gqa_ratio
    q = random(heads, case.num_rows, requirement.qk_head_size)
    k = random(_KV_HEADS, case.num_keys, requirement.qk_head_size)
    v = random(_KV_HEADS, case.num_keys, requirement.v_head_size)
    if case.low_scores:
        q, k = _lower_scores(q, k, generator)
    dout = random(heads, case.num_rows, requirement.v_head_size)
    other_out = random(heads, case.num_rows, requirement.v_head_size).double()
    scores: dict[str, Any] = {"band": case.band, "scale": requirement.qk_head_size**-0.5}
    scores["softcap"] = _SOFTCAP if requirement.softcap else None
    if requirement.chosen:
        # Some rows choose few of the keys that they see, or none.
        shape = (batch, case.num_rows, _NUM_CHOSEN)
        chosen = torch.randint(-9, 2 * case.num_keys, shape, generator=generator, device="cpu")
        scores["chosen_BCS"] = chosen.int().to(device)

    # In float64, because the user may have allowed tf32 for float32 products.
    exact = Reference()
    actual = backend.forward(q, k, v, **scores)
    wide = [x.double() for x in (q, k, v)]
    expected = exact.forward(*wide, **scores)
    seen = expected.lse_BNC > float("-inf")
    if not torch.equal(actual.lse_BNC > float("-inf"), seen):
        return "the rows that see no key"
    # Output and log-sum-exp as merged with other keys: backward must use the given values.
    merged = merge_partials(expected, AttentionOutput(other_out, expected.lse_BNC + 0.5))
    out, lse = merged.out_BNCH.to(requirement.dtype), merged.lse_BNC.to(actual.lse_BNC.dtype)
    given = [dout, q, k, v, out, lse]
    grads = backend.backward(*given, **scores)
    wide = [x.double() for x in given]
    expected_grads = exact.backward(*wide, **scores)
    names = ("output", "log-sum-exp", "dQ", "dK", "dV")
    actual_results = (actual.out_BNCH, actual.lse_BNC[seen], *grads)
    expected_results = (expected.out_BNCH, expected.lse_BNC[seen], *expected_grads)
    for name, one, two in zip(names, actual_results, expected_results, strict=True):
        error = relative_error(one, two)
        if not error <= TOLERANCE[requirement.dtype]:
            return f"{name} (relative error {error:.1e})"
    return None


def _lower_scores(q: Tensor, k: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Shift random queries and keys so that all scaled scores are near `_LOW_SCORE`."""
    head_size = q.shape[3]
    # The scaled product of two opposite vectors of signs times `shift` is -shift^2 * sqrt(H).
    shift = (-_LOW_SCORE / head_size**0.5) ** 0.5
    drawn_H = torch.randint(2, (head_size,), generator=generator, device="cpu")
    signs_H = (drawn_H * 2 - 1).to(q.device)
    # Noise is divided by the shift, which keeps the spread of a row's scores.
    moved = (sign * shift * signs_H + x.float() / shift for sign, x in ((1, q), (-1, k)))
    # Few mantissa bits, so that rounding to tf32 in a kernel does not change such large scores.
    new_q, new_k = (x.bfloat16().to(q.dtype) for x in moved)
    return new_q, new_k


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference divided by that of `expected`; NaN stays NaN."""
    if actual.shape != expected.shape:
        return float("inf")
    difference = (actual.to(expected.dtype) - expected).norm()
    return float(difference / expected.norm().clamp_min(torch.finfo(expected.dtype).tiny))
