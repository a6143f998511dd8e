"""Finds the backend of a GPU test: skips the test where the backend is not supported, else fails.

A backend that says that it is supported but raises or gives wrong results fails the test. Excused
are only gaps of cards and releases that a backend cannot know, which `known_gap` lists.
"""

import pytest
import torch

from sppo_hf.attention.backends.base import AttentionSpec, Backend
from sppo_hf.attention.backends.select import BACKENDS, find_backend, select_backend


def usable_backend(name: str, requirement: AttentionSpec) -> Backend:
    """Return the backend of this name, or the one that "auto" chooses.

    Raises:
        Skipped: It says itself that it cannot, or is not installed, or raised where `known_gap`
            has a reason for that.
        Failed: It was refused for anything else, such as a result that differs.
    """
    if name == "auto":
        return select_backend(name, requirement).backend
    reason = BACKENDS[name][0]().reason_unsupported(requirement)
    if reason is not None:
        pytest.skip(f"{name} {reason}")
    found = find_backend(name, requirement)
    if isinstance(found, Backend):
        return found
    gap = None
    if requirement.device_type == "cuda" and found.startswith("raised "):
        capability = torch.cuda.get_device_capability()
        gap = known_gap(name, requirement, capability, torch.backends.cudnn.version() or 0)
    if gap is None:
        pytest.fail(f"{name} was refused for {requirement}: it {found}")
    pytest.skip(f"{name}: {gap}; it {found}")


def known_gap(
    name: str, requirement: AttentionSpec, capability: tuple[int, int], cudnn_version: int
) -> str | None:
    """Why the backend may raise here although it says that it can; None if there is no reason.

    Args:
        name: key of `BACKENDS`.
        requirement: what was asked of it.
        capability: compute capability of the card, such as (9, 0).
        cudnn_version: as PyTorch gives it, such as 91900 for 9.19.0.
    """
    head_size = max(requirement.qk_head_size, requirement.v_head_size)
    if name == "cudnn" and head_size > 128 and capability != (9, 0):
        return "cuDNN's backward takes head sizes above 128 on Hopper only"
    if name == "cudnn" and head_size > 192 and cudnn_version < 92000:
        return "backward with head size 256 needs a newer cuDNN than 9.19"
    if name == "flash_attention_3" and capability[0] != 9:
        return "flash-attn-3 is for Hopper only"
    if name == "flash_attention_4":
        return "flash-attn-4 is a beta: cards, head sizes and windows differ between its releases"
    return None
