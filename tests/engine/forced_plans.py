"""Plans whose modes a test chooses, frame by frame, and profiles that are quickly traced."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from sppo_hf.engine import plan_cache as plans
from sppo_hf.engine import trace_profile
from sppo_hf.planning.activation_modes import ActivationMode
from sppo_hf.planning.plan import Plan


def force_modes(
    monkeypatch: pytest.MonkeyPatch, chooser: Callable[[int, int], ActivationMode]
) -> None:
    """Let every engine run plans whose mode of (chunk, layer) is `chooser(chunk, layer)`.

    All else is as planned; the plan's estimate is still that of its own modes.
    """
    make_plan = plans.make_plan

    def forced(*args: Any, **kwargs: Any) -> Plan:
        plan = make_plan(*args, **kwargs)
        modes = tuple(
            tuple(chooser(chunk, layer) for layer in range(plan.num_layers))
            for chunk in range(plan.num_chunks)
        )
        return dataclasses.replace(plan, layer_modes=modes)

    monkeypatch.setattr(plans, "make_plan", forced)


def trace_short_scans(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int] = (64, 128)
) -> None:
    """Let scans be traced over few blocks: what they cost per token is for plans, not made here."""
    for name in ("_SCAN_LENGTHS", "_SCAN_CPU_LENGTHS"):
        monkeypatch.setattr(trace_profile, name, lengths)
