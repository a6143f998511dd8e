"""Records of the actions that a rank ran, and their timeline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from sppo_hf.schedule.actions import COMPUTE_KINDS, Action, Kind
from sppo_hf.schedule.messages import SENDS
from sppo_hf.schedule.timeline import Timeline


class ActionRecord(NamedTuple):
    """Times of an action that a rank ran, in seconds of the host's clock."""

    action: Action
    start_seconds: float
    """Time at which the rank started it; waiting for a message follows."""

    end_seconds: float
    ready_seconds: float
    """Time at which the message that it waited for had arrived; `start_seconds` if it waited for
    none."""

    tier: str = ""
    """Of writes and reads behind the host, the tier; several are joined by "+"."""


def rank_timeline(rank: int, executed: Sequence[ActionRecord]) -> Timeline:
    """Returns the timeline of one rank's actions: compute without waiting, copies, messages.

    Args:
        rank: the rank, with which names of resources begin: "0.compute", "0.d2h", "0.send", ...
        executed: the rank's records in order; those of asynchronous actions have the times of their
            start calls.
    """
    resources: dict[str, list[ActionRecord]] = {}
    for one in executed:
        name = _RESOURCE_NAMES[one.action.kind]
        if one.tier:
            name = f"{one.tier} {name}"
        resources.setdefault(f"{rank}.{name}", []).append(one)
    zero = executed[0].start_seconds if executed else 0.0
    done = [one for resource in resources.values() for one in resource]
    bounds = accumulate(map(len, resources.values()), initial=0)
    starts = [one.ready_seconds - zero for one in done]
    return Timeline(
        actions=[one.action for one in done],
        positions={one.action: position for position, one in enumerate(done)},
        ranges={name: range(*span) for name, span in zip(resources, pairwise(bounds), strict=True)},
        starts=starts,
        ends=[one.end_seconds - zero for one in done],
        readies=starts,
        # What each waited for is not known; it is taken to be the action before on its resource.
        latest=[max(position - 1, 0) for position in range(len(done))],
        events={},
    )


_RESOURCE_NAMES: dict[Kind, str] = {
    **dict.fromkeys(COMPUTE_KINDS, "compute"),
    **{"D": "d2h", "O": "d2h", "H": "h2d", "K": "h2d", "S": "write", "L": "read"},
    **{"P": "h2d", "G": "d2h", "U": "host compute"},
    **dict.fromkeys(SENDS, "send"),
    **dict.fromkeys(SENDS.values(), "recv"),
    "REDUCE_GRAD": "reduce",
}
