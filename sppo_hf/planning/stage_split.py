"""Cutting a model into stages: runs of decoder layers of about the same cost, and what each holds.

Embedding, head and loss count. Knows shapes and costs; nothing of ranks, schedules or time lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from sppo_hf.errors import ConfigError
from sppo_hf.planning.chunk_bounds import Bounds
from sppo_hf.planning.cost import ModelCost
from sppo_hf.planning.memory import OPTIMIZER_BYTES_PER_PARAMETER
from sppo_hf.planning.model_shape import ModelShape


def split_layers(
    layer_costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0
) -> tuple[range, ...]:
    """Cuts layers into stages so that the most expensive stage costs as little as possible.

    Of cuts that are equal in that, the one with the least sum of squares.

    Args:
        layer_costs: of each layer, in any unit.
        num_stages: how many runs of at least one layer.
        first: what the first stage has beside its layers: the embedding.
        last: what the last has: head and loss.

    Raises:
        ConfigError: fewer than one stage, or more stages than layers.
    """
    return _split(tuple(layer_costs), num_stages, first, last)


# Layouts that differ in what they keep or send away ask for the same stages.
@lru_cache(maxsize=256)
def _split(
    layer_costs: tuple[float, ...], num_stages: int, first: float, last: float
) -> tuple[range, ...]:
    num_layers = len(layer_costs)
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"{num_stages} stages were asked for of a model with {num_layers} layers. Allowed: 1 "
            f"to {num_layers}; each stage has a layer at least. Remedy: use fewer stages."
        )
    sums = [0.0, *accumulate(layer_costs)]

    def cost(start: int, end: int) -> float:
        ends = (first if start == 0 else 0.0) + (last if end == num_layers else 0.0)
        return sums[end] - sums[start] + ends

    # By end of the stages so far: (highest cost, sum of squares), and where the last one begins.
    best = {end: ((cost(0, end), cost(0, end) ** 2), 0) for end in range(1, num_layers + 1)}
    begins: list[dict[int, int]] = []
    for stage in range(1, num_stages):
        longer: dict[int, tuple[tuple[float, float], int]] = {}
        for end in range(stage + 1, num_layers + 1):
            longer[end] = min(
                ((most if most > run else run, squares + run**2), cut)
                for cut in range(stage, end)
                for ((most, squares), _), run in ((best[cut], cost(cut, end)),)
            )
        begins.append({end: cut for end, (_, cut) in longer.items()})
        best = longer
    bounds = [num_layers]
    for cuts in reversed(begins):
        bounds.append(cuts[bounds[-1]])
    return tuple(range(start, end) for start, end in pairwise([0, *reversed(bounds)]))


def balanced_stages(cost: ModelCost, bounds: Bounds, num_stages: int) -> tuple[range, ...]:
    """Cuts a model so that stages take the same time for a whole sequence, head and loss counted.

    Args:
        cost: seconds of every unit.
        bounds: the chunks of a sequence.
        num_stages: how many stages.

    Raises:
        ConfigError: fewer than one stage, or more than layers.
    """
    seconds = [
        sum(cost.forward_seconds(i, *b) + cost.backward_seconds(i, *b) for b in bounds)
        for i in range(cost.shape.num_layers)
    ]
    head = sum(cost.head_seconds(end - start) for start, end in bounds)
    return split_layers(seconds, num_stages, last=head)


@dataclass(frozen=True, slots=True)
class StageWeights:
    """What a stage holds from step to step, in bytes."""

    weights: int
    """Parameters; tied embeddings are on the first stage and on the last."""

    gradients: int
    """Gradients of those that train."""

    optimizer: int
    """Two float32 states of each, as AdamW keeps."""

    @classmethod
    def of(cls, shape: ModelShape, layers: range) -> StageWeights:
        """Counts the parameters of a run of layers, and of what stands at the model's ends."""
        works = [shape.work(layer) for layer in range(shape.num_layers)]
        held = [works[layer] for layer in layers]
        first, last = layers.start == 0, layers.stop == shape.num_layers
        table = shape.vocab_size * shape.hidden_size
        adapters = sum(work.adapter_weights for work in held)
        own = sum(work.total_weights for work in held)
        if last:
            own += shape.hidden_size + (0 if shape.tied and first else table)
        if first:
            # Positions and the like stand beside the embedding.
            own += _ends(shape) - shape.hidden_size - (0 if shape.tied else table)
        all_adapters = sum(work.adapter_weights for work in works)
        # Not the dtype's size, for quantised weights.
        size = (shape.weight_bytes - shape.lora_bytes) / (shape.total_parameters - all_adapters)
        weights = round(own * size)
        if shape.lora is not None:
            adapter_bytes = adapters * shape.lora.dtype_bytes
            optimizer = OPTIMIZER_BYTES_PER_PARAMETER * adapters
            return cls(weights + adapter_bytes, adapter_bytes, optimizer)
        share = shape.trainable_fraction
        optimizer = round(OPTIMIZER_BYTES_PER_PARAMETER * own * share)
        return cls(weights, round(weights * share), optimizer)


def _ends(shape: ModelShape) -> int:
    """Parameters outside decoder layers: embedding, positions, final norm, head."""
    works = [shape.work(layer) for layer in range(shape.num_layers)]
    inside = sum(work.total_weights + work.adapter_weights for work in works)
    return shape.total_parameters - inside
