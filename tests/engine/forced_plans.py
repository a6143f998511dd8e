"""Plans whose modes and places of K/V a test chooses, and profiles that are quickly traced."""

import dataclasses
from collections.abc import Callable

import pytest

from sppo_hf.engine import plan_cache as plans
from sppo_hf.engine import trace_profile
from sppo_hf.planning.activation_modes import ActivationMode
from sppo_hf.planning.plan import Plan, PlanRequest
from sppo_hf.planning.tiers import Tier


def change_plans(monkeypatch: pytest.MonkeyPatch, change: Callable[[Plan], Plan]) -> None:
    """Let every engine run `change(plan)` in place of each plan that it makes.

    The plan's estimate should stay that of its own modes.
    """
    make_plan = plans.make_plan
    monkeypatch.setattr(plans, "make_plan", lambda request: change(make_plan(request)))


def force_modes(
    monkeypatch: pytest.MonkeyPatch, chooser: Callable[[int, int], ActivationMode]
) -> None:
    """Let every engine run plans whose mode of (chunk, layer) is `chooser(chunk, layer)`."""

    def forced(plan: Plan) -> Plan:
        modes = tuple(
            tuple(chooser(chunk, layer) for layer in range(plan.num_layers))
            for chunk in range(plan.num_chunks)
        )
        return dataclasses.replace(plan, layer_modes=modes)

    change_plans(monkeypatch, forced)


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


def trace_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let profiles be traced over few tokens: they are the same but for scans' costs."""
    trace_short_scans(monkeypatch)
    monkeypatch.setattr(trace_profile, "_LENGTHS", trace_profile._CPU_LENGTHS)
