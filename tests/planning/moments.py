"""Bytes of the device and the host where forwards and backwards begin and end."""

from __future__ import annotations

from typing import NamedTuple

from sppo_hf.planning.memory import MemoryBreakdown, MemoryEstimate, Points
from sppo_hf.schedule.timeline import Timeline


class Moment(NamedTuple):
    name: str
    device: MemoryBreakdown
    host: MemoryBreakdown


def moments_of(predicted: MemoryEstimate) -> list[Moment]:
    """The end of each chunk's (or layer's) forward, and both ends of its backward."""
    return [
        Moment(predicted.points.name(at), predicted.at(at, "device"), predicted.at(at, "host"))
        for at in ends_of(predicted.points)
    ]


def peak_by_cause(timeline: Timeline, tier: str) -> dict[str, int]:
    """The bytes of a tier's simulated peak by cause; causes of 0 left out."""
    at_seconds = timeline.peak(tier).seconds
    held: dict[str, int] = {}
    for seconds, num_bytes, cause in timeline.events.get(tier, ()):
        if seconds <= at_seconds:
            held[cause] = held.get(cause, 0) + num_bytes
    return {cause: num_bytes for cause, num_bytes in held.items() if num_bytes}


def ends_of(points: Points) -> list[int]:
    chunks, layers = range(points.num_chunks), range(points.num_layers)
    last_chunk, last_layer = points.num_chunks - 1, points.num_layers - 1
    if points.by_layer:
        shown = [points.forward(last_chunk, layer) for layer in (*layers, points.num_layers)]
        ends = [(chunk, layer) for layer in layers[::-1] for chunk in (last_chunk, 0)]
    else:
        shown = [points.forward(chunk, points.num_layers) for chunk in chunks]
        ends = [(chunk, layer) for chunk in chunks[::-1] for layer in (last_layer, 0)]
    if points.training:
        shown += dict.fromkeys(points.backward(*unit) for unit in ends)
    return shown
