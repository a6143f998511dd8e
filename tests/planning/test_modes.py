"""Modes have names, and equal answers are one object."""

import pytest

from sppo_hf.planning.modes import (
    ALL_MODES,
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    RECOMPUTE_OFFLOAD,
    FrameMode,
    mode_of,
)


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (KEEP, "keep"),
        (OFFLOAD, "offload"),
        (RECOMPUTE, "recompute"),
        (RECOMPUTE_OFFLOAD, "recompute+offload"),
    ],
)
def test_text(mode: FrameMode, text: str) -> None:
    assert str(mode) == text


def test_mode_of_returns_the_shared_constant() -> None:
    assert len({str(mode) for mode in ALL_MODES}) == 4
    for mode in ALL_MODES:
        assert mode_of(recompute=mode.recompute, offload=mode.offload) is mode
