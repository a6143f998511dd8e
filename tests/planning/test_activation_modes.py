"""Modes have names, and equal answers are one object."""

import pytest

from sppo_hf.planning.activation_modes import KEEP, ActivationMode, all_modes, mode_of
from tests.planning.modes import OFFLOAD, RECOMPUTE, RECOMPUTE_OFFLOAD


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (KEEP, "keep"),
        (OFFLOAD, "offload"),
        (RECOMPUTE, "recompute"),
        (RECOMPUTE_OFFLOAD, "recompute+offload"),
        (mode_of("matmuls", "device"), "recompute elementwise"),
        (mode_of("inputs", "disk"), "recompute+disk"),
        (mode_of("whole", "disk"), "disk"),
        (mode_of("hidden", "host"), "recompute with attention+offload"),
    ],
)
def test_text(mode: ActivationMode, text: str) -> None:
    assert str(mode) == text


def test_mode_of_returns_the_shared_constant() -> None:
    assert len({str(mode) for mode in all_modes()}) == 12
    for mode in all_modes():
        assert mode_of(mode.saved, mode.tier) is mode
