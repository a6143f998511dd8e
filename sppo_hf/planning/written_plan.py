"""What a written plan was made for: the line in `sppo.yaml` that `sppo plan --write` puts there.

A run that is given other settings than were planned for it is slower, or does not fit; it is told
so, with what to write anew. Settings of one's own have no such line.
"""

from __future__ import annotations

from collections.abc import Iterator

from sppo_hf.config import PLAN_VERSION, SPPOConfig
from sppo_hf.planning.model_shape import ModelShape


def planned_for(shape: ModelShape, total_tokens: int) -> str:
    """Returns the line of a model and a length."""
    return f"plan {PLAN_VERSION}: {_model(shape)}; {total_tokens} tokens"


def other_plan_warnings(
    config: SPPOConfig, shape: ModelShape, total_tokens: int, *, training: bool
) -> Iterator[str]:
    """Says where a written plan is another model's, or that of rows of another length.

    Evaluation may have rows of other lengths.
    """
    if config.planned_for is None:
        return
    made, _, length = config.planned_for.partition(": ")[2].rpartition("; ")
    again = "Remedy: write it again with `sppo plan MODEL --seq-len N --write`"
    if made != _model(shape):
        yield (
            f"the plan in these settings is of a model of {made}; this one has {_model(shape)}. "
            + again
        )
    if training and length != f"{total_tokens} tokens":
        yield (
            f"the plan in these settings is of rows of {length}; these have {total_tokens} tokens. "
            + again
        )


def _model(shape: ModelShape) -> str:
    return f"{shape.num_layers} layers of {shape.hidden_size}, vocabulary {shape.vocab_size}"
