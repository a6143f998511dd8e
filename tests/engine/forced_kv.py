"""Plans whose keys and values are where a test wants them."""

import dataclasses

import pytest

from sppo_hf.engine import plan_cache as plans
from sppo_hf.planning.plan import Plan, PlanRequest
from sppo_hf.planning.tiers import Tier


def force_kv(monkeypatch: pytest.MonkeyPatch, *, block_tokens: int, tier: Tier = "host") -> None:
    """Let every engine stream keys and values in blocks of `block_tokens`; all else as planned."""
    make_plan = plans.make_plan

    def forced(request: PlanRequest) -> Plan:
        # By layer keys and values are not streamed.
        by_chunk = request.config.replace(order="by_chunk")
        plan = make_plan(dataclasses.replace(request, config=by_chunk))
        return dataclasses.replace(plan, kv_tier=tier, kv_block_tokens=block_tokens)

    monkeypatch.setattr(plans, "make_plan", forced)
