"""Actions: the smallest steps of a schedule, as values with a text form that parses back.

`2F5` is stage 2's forward of unit 5, `0F5.12` stage 0's for layer 12 alone, `0K5.12#3` part 3 of
what streams in for that, `2F5#1` the second rank's share of a unit that several ranks share. Names
of kinds that torch.distributed.pipelining has too are its names.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, cast, get_args

from sppo_hf.errors import ScheduleError

# fmt: off
Kind = Literal[
    "F", "B", "I", "W", "R", "D", "H", "S", "L", "K", "O", "P", "G", "U",
    "SEND_F", "RECV_F", "SEND_B", "RECV_B", "SEND_KV", "RECV_KV", "SEND_DKV", "RECV_DKV",
    "REDUCE_GRAD",
]
# fmt: on
"""What an action does; see `KIND_NAMES`."""

KIND_NAMES: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "R": "recompute",
    "D": "device to host",
    "H": "host to device",
    "S": "store",
    "L": "load",
    "K": "K/V in",
    "O": "K/V out",
    "P": "weights in",
    "G": "gradients out",
    "U": "optimizer's update",
    "SEND_F": "send activation",
    "RECV_F": "receive activation",
    "SEND_B": "send gradient",
    "RECV_B": "receive gradient",
    "SEND_KV": "send K/V",
    "RECV_KV": "receive K/V",
    "SEND_DKV": "send dK/dV",
    "RECV_DKV": "receive dK/dV",
    "REDUCE_GRAD": "reduce gradients",
}
"""Each kind in words, as pictures, traces and errors show it. "B" is a whole backward, "I" and "W"
the two halves of one that is split; a send names the stage that sends, a receive the one that
receives, but K/V and their gradients pass between ranks of one stage; the unit of "REDUCE_GRAD" is
the last one whose gradients are in the sum. "S" and "L" are between host memory and a tier behind
it (a disk). What keys and values do beside a unit has a part: 0 for "K" and "O" of its forward, 1
of its backward, and one more for "S" and "L" of the same; beside share n of a unit that ranks share
3 n more. "S" and "L" of that share's own saved activations are 3 n. "P", "G" and "U" are of weights
that rest on the host, where "U" updates them; what is outside of the layers counts as the layer
behind the last."""

KV_COPY_KINDS: frozenset[Kind] = frozenset({"K", "O"})
"""Kinds of keys and values that come and go beside units."""

COMPUTE_KINDS: frozenset[Kind] = frozenset({"F", "B", "I", "W", "R"})
"""Kinds that occupy the device's compute."""

_WAYS = 3
_NUMBER = "(0|[1-9][0-9]*)"
_FORM = re.compile(
    rf"{_NUMBER}({'|'.join(get_args(Kind))}){_NUMBER}(?:\.{_NUMBER})?(?:#{_NUMBER})?", re.ASCII
)


class Action(NamedTuple):
    """One step of one stage on one unit; equal fields mean the same action.

    `str(action)` and `Action.parse(text)` are exact inverses for numbers from zero on.
    """

    kind: Kind
    """What is done."""

    stage: int
    """Stage that does it; 0 where there is only one."""

    unit: int
    """Micro-batch times chunks per micro-batch, plus chunk."""

    layer: int | None = None
    """Decoder layer, where the action is one layer's; None: all layers of the stage."""

    part: int | None = None
    """Tells apart what one (kind, stage, unit, layer) does in several goes, such as K/V blocks; and
    in a schedule over ranks the shares of a unit that several ranks compute together, from 0 on,
    and the pieces of what passes between such units."""

    def __str__(self) -> str:
        layer = "" if self.layer is None else f".{self.layer}"
        part = "" if self.part is None else f"#{self.part}"
        return f"{self.stage}{self.kind}{self.unit}{layer}{part}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads an action's text form back.

        Raises:
            ScheduleError: the text is none; the message shows it and the form.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            kinds = ", ".join(f"{kind} {name}" for kind, name in KIND_NAMES.items())
            raise ScheduleError(
                f"{text!r} is no action. Write stage, kind and unit, then '.layer' and '#part' "
                "where there is one, without spaces or leading zeros: '2F5', '0F5.12', "
                f"'0K5.12#3'. Kinds: {kinds}."
            )
        stage, kind, unit, layer, part = match.groups()
        return cls(
            cast(Kind, kind),
            int(stage),
            int(unit),
            None if layer is None else int(layer),
            None if part is None else int(part),
        )


def is_kv_copy(action: Action) -> bool:
    """Whether an action is of keys and values beside a unit."""
    moved_on = action.kind in ("S", "L") and action.part is not None
    return action.kind in KV_COPY_KINDS or (moved_on and kv_copy_pass(action) > 0)


def kv_copy_part(way: int, share: int | None) -> int:
    """The part of what keys and values do beside a unit, or beside a share of it.

    Args:
        way: 0 of forward and 1 of backward for "K" and "O", one more for "S" and "L", which have 0
            for saved activations.
        share: The unit's own part.
    """
    return _WAYS * (share or 0) + way


def kv_copy_pass(action: Action) -> int:
    """`way` of an action of keys and values beside a unit; see `kv_copy_part`."""
    assert action.part is not None, "what is beside a unit says which way"
    return action.part % _WAYS


def kv_copy_share(action: Action) -> int:
    """`share` of it, 0 for a whole unit."""
    return (action.part or 0) // _WAYS


def store_part(share: int | None) -> int | None:
    """The part of "S" and "L" of saved activations: of a unit, or of a share of it."""
    return None if share is None else kv_copy_part(0, share)


def unit_share(action: Action) -> int | None:
    """The share of its unit that an action which is no stream is of; None for a whole unit."""
    part = action.part
    return part // _WAYS if part is not None and action.kind in ("S", "L") else part
