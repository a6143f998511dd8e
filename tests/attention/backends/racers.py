"""Fake backends that compute nothing: they advance a fake clock, or raise."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sppo_hf.attention.backends.base import AttentionOutput, AttentionSpec, Backend, Gradients


class FakeClock:
    """A clock that only `Racer` advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Racer(Backend):
    """Forward takes one part of `seconds` and backward three; `fails` runs before each forward."""

    def __init__(
        self,
        name: str,
        clock: FakeClock,
        seconds: float = 1e-3,
        *,
        first_seconds: float | None = None,
        fails: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self.clock = clock
        self.seconds = seconds
        self.first_seconds = first_seconds
        self.fails = fails
        self.forwards = 0
        self.seen: list[tuple[tuple[int, ...], int, int | None, float | None]] = []

    def reason_unsupported(self, requirement: AttentionSpec) -> str | None:
        return None

    def forward(self, q_BNCH, k_BKTH, v_BKTH, *, band, scale, softcap=None):  # type: ignore[no-untyped-def]
        self.fails()
        warming = self.first_seconds is not None and not self.forwards
        self.clock.now += (self.first_seconds if warming else self.seconds) / 4
        self.forwards += 1
        self.seen.append((tuple(k_BKTH.shape), band.q_start, band.window, softcap))
        return AttentionOutput(torch.empty_like(q_BNCH), torch.empty(q_BNCH.shape[:3]))

    def backward(self, dout, q, k, v, out, lse, *, band, scale, softcap=None):  # type: ignore[no-untyped-def]
        self.clock.now += self.seconds * 3 / 4
        return Gradients(q, k, v)


def raising(error: Exception) -> Callable[[], object]:
    """Return a function that raises `error` in every call."""

    def fail() -> None:
        raise error

    return fail
