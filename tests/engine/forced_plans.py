"""Plans whose modes a test chooses, frame by frame."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from sppo_hf.engine import plan_cache as plans
from sppo_hf.planning.activation_modes import FrameMode
from sppo_hf.planning.plan import Plan


def force_modes(monkeypatch: pytest.MonkeyPatch, chooser: Callable[[int, int], FrameMode]) -> None:
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
