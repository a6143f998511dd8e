"""Plans whose modes and places of K/V a test chooses, and profiles that are quickly traced."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from sppo_hf.engine import plan_cache as plans
from sppo_hf.engine import trace_profile
from sppo_hf.planning.activation_modes import ActivationMode
from sppo_hf.planning.plan import Plan, PlanRequest
from sppo_hf.planning.tiers import Tier


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


def force_kv(monkeypatch: pytest.MonkeyPatch, *, block_tokens: int, tier: Tier = "host") -> None:
    """Let every engine stream K/V from `tier` in blocks; all else is as planned."""
    make_plan = plans.make_plan

    def forced(request: PlanRequest) -> Plan:
        # By layer keys and values are not streamed.
        by_chunk = request.config.replace(order="by_chunk")
        plan = make_plan(dataclasses.replace(request, config=by_chunk))
        return dataclasses.replace(plan, kv_tier=tier, kv_block_tokens=block_tokens)

    monkeypatch.setattr(plans, "make_plan", forced)


def trace_short_scans(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int] = (64, 128)
) -> None:
    """Let scans be traced over few blocks: what they cost per token is for plans, not made here."""
    for name in ("_SCAN_LENGTHS", "_SCAN_CPU_LENGTHS"):
        monkeypatch.setattr(trace_profile, name, lengths)
