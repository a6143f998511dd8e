"""Which of several backends is the fastest here: a short race over one representative chunk.

Costs one call of each backend, which builds and warms up its kernels, and at most `BUDGET_SECONDS`
of timed calls and one beyond, once per device, versions and requirement: the result is a value that
`planning/race_store.py` keeps. Knows nothing of how candidates are found, or
of what becomes of the order.

[Note: ranks may attend differently]
Every rank of a job times its own device, so noise could let two ranks take different backends. On
one machine (or one shared HF_HOME) they do not: whoever is first to publish a result decides, and
all read what is published before they choose. Where machines share no folder they may differ, and
nothing breaks: a rank runs forward and backward of a (layer, chunk) itself, and attention is never
run again, so no two ranks ever compute two halves of one thing. Backends agree within the rounding
of the dtype (each was compared with the reference), as two data-parallel ranks with different rows
do anyway; replicas stay equal, since all apply the same summed gradients. Chunk bounds do not
depend on the backend. What a user who wants the same bits everywhere sets is a backend's name.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import metadata

import torch

from sppo_hf.attention.backends.base import Backend, Requirement, determinism
from sppo_hf.attention.backends.timing import Clock, device_seconds
from sppo_hf.attention.backends.workload import MadeWorkload, Workload
from sppo_hf.planning.machine import nvidia_driver_version, processor_name
from sppo_hf.planning.race_store import Lap, RaceResult

logger = logging.getLogger(__name__)

BUDGET_SECONDS = 1.2
"""No further timed call is begun once timed calls have taken this long.

What building kernels takes does not count: the slowest to build may be the fastest."""

CHUNK_TOKENS = 4096
PREFIX_TOKENS = 32768
WINDOW_TOKENS = 1024
QUERY_HEADS = 16
"""Enough work to fill a large GPU a few times over, and a few milliseconds for its best kernel."""

_SAMPLES = 3
_NO_TIME = "was not timed, for lack of time"
_MEMORY_SHARE = 0.25

Timer = Callable[[Callable[[], object]], float]
"""Seconds that one call of some work takes."""


def race_key(
    names: Sequence[str], requirement: Requirement, device: torch.device
) -> tuple[str, dict[str, object]]:
    """What the result of a race hangs on, as `race_path` takes it.

    Args:
        names: of the backends that take part, in order.
        requirement: what they have to do.
        device: where.

    Returns:
        The device's name as its driver gives it, and the rest: versions, requirement, names.
    """
    key: dict[str, object] = {
        "torch": torch.__version__,
        "requirement": {**asdict(requirement), "dtype": str(requirement.dtype)},
        "backends": list(names),
        "packages": _package_versions(),
        # Kernels that sum in a fixed order are slower, some much more than others.
        "deterministic": determinism(),
    }
    if device.type != "cuda":
        return processor_name(), key
    key["cuda"] = torch.version.cuda or getattr(torch.version, "hip", None) or "unknown"
    key["cudnn"] = torch.backends.cudnn.version()
    key["driver"] = nvidia_driver_version()
    return torch.cuda.get_device_properties(device).name, key


def _package_versions() -> dict[str, str]:
    """Of the kernels that are installed beside torch."""
    found: dict[str, str] = {}
    for name in ("flash-attn", "flash-attn-3", "flash-attn-4"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def representative(requirement: Requirement, free_bytes: int | None) -> Workload:
    """The chunk that backends race over.

    Args:
        requirement: what a layer asks.
        free_bytes: of the device; the race takes a quarter of it at most. None for no limit.
    """
    groups = requirement.gqa_ratio
    load = Workload(
        requirement=requirement,
        query_heads=max(1, QUERY_HEADS // groups) * groups,
        chunk_tokens=CHUNK_TOKENS,
        # Keys before the window are never looked at.
        prefix_tokens=CHUNK_TOKENS if requirement.window else PREFIX_TOKENS,
        window_tokens=WINDOW_TOKENS if requirement.window else None,
    )
    return load if free_bytes is None else load.shortened(int(_MEMORY_SHARE * free_bytes))


def race(
    backends: Sequence[Backend],
    requirement: Requirement,
    device: torch.device,
    *,
    load: Workload | None = None,
    timer: Timer | None = None,
    clock: Clock = time.perf_counter,
    budget_seconds: float = BUDGET_SECONDS,
) -> RaceResult:
    """Time forward and backward of each backend; call it through `timing.run_apart`.

    Args:
        backends: in the order that decides where none is clearly faster.
        requirement: what all of them can do.
        device: where; on CUDA the current one.
        load: what they do; None for the `representative` one.
        timer: seconds of one call; None times on the device.
        clock: seconds that pass on the host.
        budget_seconds: for the timed calls of all together. The first that works is always timed.

    Returns:
        A lap for each that finished; the others with the reason in `left_out`. A backend that
        raises, out of memory or otherwise, is logged and left out. The result is not a lasting one
        if memory or time was lacking.
    """
    if load is None:
        free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        load = representative(requirement, free_bytes)
    seconds_of = timer or (lambda work: device_seconds(work, device, clock=clock))
    laps: list[Lap] = []
    left_out: dict[str, str] = {}
    transient = False
    left_seconds = budget_seconds
    tensors: MadeWorkload | None = None
    flops = load.forward_flops + load.backward_flops
    for backend in backends:
        if left_seconds <= 0 and laps:
            left_out[backend.name] = _NO_TIME
            transient = True
            continue
        try:
            tensors = tensors or load.make(device)
            samples, took_seconds = _run(tensors, backend, seconds_of, clock, left_seconds)
            left_seconds -= took_seconds
            seconds = statistics.median(samples)
            laps.append(Lap(backend.name, seconds, flops / seconds))
        # Kernels fail with whatever exception they like; none may stop a training that has others.
        except Exception as error:
            first_line = (str(error).strip().splitlines() or [""])[0]
            left_out[backend.name] = f"raised {type(error).__name__} when timed: {first_line}"
            transient |= isinstance(error, torch.OutOfMemoryError)
            logger.warning("attention backend %s %s", backend.name, left_out[backend.name])
            logger.debug("attention backend %s", backend.name, exc_info=True)
    return RaceResult(str(load), tuple(laps), left_out, lasting=not transient)


def _run(
    tensors: MadeWorkload,
    backend: Backend,
    seconds_of: Timer,
    clock: Clock,
    budget_seconds: float,
) -> tuple[list[float], float]:
    """Seconds of forward and backward, at least once, and what timing them took.

    One call goes before that is not timed: kernels are built in it.
    """

    def step() -> None:
        attended = tensors.forward(backend)
        tensors.backward(backend, attended)

    seconds_of(step)
    began = clock()
    samples = [seconds_of(step)]
    while len(samples) < _SAMPLES and clock() - began < budget_seconds:
        samples.append(seconds_of(step))
    return samples, clock() - began
