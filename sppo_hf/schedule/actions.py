"""Actions: the smallest steps of a schedule, as values with a text form that parses back.

`2F5` is stage 2's forward of unit 5, `0F5.12` is stage 0's for layer 12 alone, `0K5.12#3` is part 3
of the K/V loaded for that, and `2F5#1` is the second rank's share of a unit that several ranks
share. Kinds that torch.distributed.pipelining also has are named as there.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, cast, get_args

from sppo_hf.errors import ScheduleError

# fmt: off
Kind = Literal[
    "F", "B", "I", "W", "D", "H", "S", "L", "K", "O", "P", "G", "U",
    "SEND_F", "RECV_F", "SEND_B", "RECV_B", "SEND_KV", "RECV_KV", "SEND_DKV", "RECV_DKV",
    "REDUCE_GRAD",
]
# fmt: on
"""Kind of an action; `KIND_NAMES` explains each."""

KIND_NAMES: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
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
"""Name of each kind in figures, traces and error messages.

"B" is a whole backward; "I" and "W" are the two halves of a split one. The stage of a send is the
one that sends, that of a receive the one that receives; K/V and their gradients pass between ranks
of one stage. The unit of "REDUCE_GRAD" is the last one whose gradients are in the sum. "S" and "L"
copy between host memory and a tier behind it (a disk).

Copies of K/V beside a unit have a `part`: "K" and "O" have 0 in forward and 1 in backward; "S" and
"L" have 1 in forward and 2 in backward. Beside share n of a shared unit, 3 n is added. "S" and "L"
of that share's saved activations have part 3 n.

"P", "G" and "U" are for host-resident weights, which "U" updates on the host; weights outside of
the layers have the layer number after the last layer's."""

KV_COPY_KINDS: frozenset[Kind] = frozenset({"K", "O"})
"""Kinds that copy K/V to or from the device while a unit runs."""

COMPUTE_KINDS: frozenset[Kind] = frozenset({"F", "B", "I", "W"})
"""Kinds that occupy the device's compute."""

_WAYS = 3
_NUMBER = "(0|[1-9][0-9]*)"
_FORM = re.compile(
    rf"{_NUMBER}({'|'.join(get_args(Kind))}){_NUMBER}(?:\.{_NUMBER})?(?:#{_NUMBER})?", re.ASCII
)


class Action(NamedTuple):
    """One step of one stage on one unit; equal fields mean the same action.

    `str(action)` and `Action.parse(text)` are exact inverses for non-negative numbers.
    """

    kind: Kind
    stage: int
    """Pipeline stage; 0 without a pipeline."""

    unit: int
    """Index of the (micro-batch, chunk): micro-batch times chunks per micro-batch, plus chunk."""

    layer: int | None = None
    """Decoder layer of the action; None for all layers of the stage."""

    part: int | None = None
    """Distinguishes several actions with the same (kind, stage, unit, layer), such as blocks of
    K/V. In a schedule over ranks: the index, from 0, of a rank's share of a unit that several ranks
    compute together, or of a piece of a message between such units."""

    def __str__(self) -> str:
        layer = "" if self.layer is None else f".{self.layer}"
        part = "" if self.part is None else f"#{self.part}"
        return f"{self.stage}{self.kind}{self.unit}{layer}{part}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads an action's text form back.

        Raises:
            ScheduleError: the text is not an action; the message shows it and the expected form.
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
    """Whether an action copies K/V beside a unit."""
    moved_on = action.kind in ("S", "L") and action.part is not None
    return action.kind in KV_COPY_KINDS or (moved_on and kv_copy_pass(action) > 0)


def kv_copy_part(way: int, share: int | None) -> int:
    """Returns the `part` of a copy of K/V beside a unit, or beside a share of it.

    Args:
        way: for "K" and "O" 0 in forward and 1 in backward; for "S" and "L" 1 in forward and 2 in
            backward, and 0 for saved activations.
        share: part of the unit's compute action; None for a whole unit.
    """
    return _WAYS * (share or 0) + way


def kv_copy_pass(action: Action) -> int:
    """Returns the `way` of a copy of K/V beside a unit; see `kv_copy_part`."""
    assert action.part is not None, "what is beside a unit says which way"
    return action.part % _WAYS


def kv_copy_share(action: Action) -> int:
    """Returns the share of a unit that a copy of K/V belongs to; 0 for a whole unit."""
    return (action.part or 0) // _WAYS


def store_part(share: int | None) -> int | None:
    """Returns the `part` of "S" and "L" of a unit's, or a share's, saved activations."""
    return None if share is None else kv_copy_part(0, share)


def unit_share(action: Action) -> int | None:
    """Returns the share that an action other than a K/V copy belongs to; None for a whole unit."""
    part = action.part
    return part // _WAYS if part is not None and action.kind in ("S", "L") else part
