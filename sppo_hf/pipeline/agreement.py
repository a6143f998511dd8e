"""Agreement: ranks that share a batch see that they are about to run the same step.

Ranks that run different steps would wait for messages that never come. A few numbers on the CPU, a
fraction of a millisecond, turn that into an error that says what differs.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch import nn

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.forward_calls import ForwardCall
from sppo_hf.engine.plan_cache import trainable_mask
from sppo_hf.errors import PipelineError, SPPOError
from sppo_hf.pipeline.mesh import PipelineMesh

ValueT = TypeVar("ValueT")
SaidT = TypeVar("SaidT")

_SHARED_SETTINGS = (
    *("num_chunks", "chunk_lengths", "chunk_tokens", "partition", "micro_batch_size"),
    *("pp_size", "pp_schedule", "pp_virtual_stages", "pp_layers", "pp_msp", "sp_size"),
    "correct_plan",
)


def call_facts(call: ForwardCall, config: SPPOConfig) -> dict[str, int]:
    """Numbers of a call that all ranks that share its batch must have alike, for `agree`.

    With the layout, the only read from the device before the first chunk.
    """
    ids, labels = call.tokens.get("input_ids"), call.shift_labels
    return {
        "rows": call.batch_rows,
        "tokens": call.total_tokens,
        "sum of input_ids": 0 if ids is None else int(ids.sum()),
        "sum of labels": 0 if labels is None else int(labels.sum()),
        "training": int(torch.is_grad_enabled()),
        "settings": settings_checksum(config),
    }


def settings_checksum(config: SPPOConfig) -> int:
    """A number for the settings that all ranks that share a batch must have alike."""
    settings = config.to_dict()
    text = json.dumps([settings[name] for name in _SHARED_SETTINGS])
    return zlib.crc32(text.encode())


def agree(mesh: PipelineMesh, facts: Mapping[str, int], *own: int) -> list[tuple[int, ...]]:
    """Compare numbers over the ranks that share a batch; each calls this before every step.

    `facts` have the same names on all ranks, and `own`, which may differ, are as many.

    Returns:
        Each rank's `own`.

    Raises:
        PipelineError: Facts differ; names them, the ranks and their numbers.
    """
    mine = torch.tensor([*facts.values(), *own])
    others = [torch.empty_like(mine) for _ in mesh.sharing_ranks]
    dist.all_gather(others, mine, group=mesh.control_group)
    numbers = [tuple(other.tolist()) for other in others]
    for rank, other in zip(mesh.sharing_ranks, numbers, strict=True):
        differ = [
            f"{name} ({theirs} on rank {rank}, {ours} on rank {mesh.rank})"
            for (name, ours), theirs in zip(facts.items(), other, strict=False)
            if ours != theirs
        ]
        if differ:
            raise PipelineError(
                f"ranks that share a batch are about to run different steps: {', '.join(differ)}. "
                "All of them must get the same batches and settings, and train the same "
                "parameters. Remedy: prepare the data loader by the Accelerator, shuffle with the "
                "same seed, start all ranks with the same settings file, and freeze and unfreeze "
                "on all of them alike."
            )
    return [other[len(facts) :] for other in numbers]


def all_true(value: bool, *groups: Any) -> bool:
    """Whether all ranks of some groups (None is none) say so; all ask at the same moments."""
    answer = torch.tensor(int(value))
    for group in groups:
        if group is not None:
            dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=group)
    return bool(answer)


def refused(
    mesh: PipelineMesh,
    refusal: Exception | None,
    *,
    summed: Mapping[str, nn.Parameter] | None,
) -> list[str]:
    """Whether any rank cannot run the step that all are about to run; every rank calls this.

    Args:
        mesh: The ranks.
        refusal: Why this rank cannot; None if it can.
        summed: By name, the parameters of which the step sums gradients over replicas; None where
            it sums none. The other replicas, who wait for this one's, are asked too, and all refuse
            where replicas train different ones: they would sum what is of different parameters.

    Returns:
        The reasons of the ranks that cannot, by rank.
    """
    # Through the replicas of a stage first: then the other stages hear what they have found.
    refuses, apart = int(refusal is not None), False
    if summed is not None:
        number = zlib.crc32(trainable_mask(summed.values()))
        most = torch.tensor([refuses, number, -number])
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.replica_control_group)
        refuses, largest, smallest = most[0].item(), most[1].item(), -most[2].item()
        apart = largest != smallest
    answer = torch.tensor(int(refuses or apart))
    dist.all_reduce(answer, op=dist.ReduceOp.MAX, group=mesh.control_group)
    if not answer.item():
        return []
    said = [] if refusal is None else [_words(refusal)]
    if summed is not None:
        trained = {name for name, parameter in summed.items() if parameter.requires_grad}
        everyones = _said_by_all((said, trained if apart else set()), mesh.replica_control_group)
        said = [words for part, _ in everyones.values() for words in part]
        if apart:
            said.append(_differ({rank: trained for rank, (_, trained) in everyones.items()}))
    parts = _said_by_all(said, mesh.control_group).values()
    return sorted({words for part in parts for words in part})


def _said_by_all(said: SaidT, group: Any) -> dict[int, SaidT]:
    """By rank of a group, what each says."""
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, said, group=group)
    return {dist.get_global_rank(group, at): answer for at, answer in enumerate(answers)}


def _differ(trained: Mapping[int, set[str]]) -> str:
    """Which parameters do not train on all ranks that hold them."""
    somewhere = set[str]().union(*trained.values())
    names = sorted(name for name in somewhere if not all(name in one for one in trained.values()))
    train = [str(rank) for rank, one in trained.items() if names[0] in one]
    frozen = [str(rank) for rank, one in trained.items() if names[0] not in one]
    more = f", and {len(names) - 1} more differ" if len(names) > 1 else ""
    return (
        f"replicas train different parameters: {names[0]} trains on rank {', '.join(train)} and is "
        f"frozen on rank {', '.join(frozen)}{more}. "
        "Allowed: the same on all replicas, which sum its gradients. Remedy: freeze and unfreeze "
        "on all ranks alike, by the names in model.named_parameters()"
    )


# [Note: nobody waits for a rank that refuses] What one rank cannot make it raises while the others
# wait for what it says of it. So ranks never exchange a value that was made before, but its making:
# whatever that raises, all are told at the same place, and all raise.


def make_on_first_rank(mesh: PipelineMesh, make: Callable[[], ValueT]) -> ValueT:
    """What the first rank that shares a batch makes of a value that all ranks must have alike.

    Settings and model are the same everywhere, but not what a rank sees of the model: adapters on
    some stages only, say, would balance chunks differently. The value can be pickled. `make` is
    called on the first rank alone.

    Raises:
        Exception: What `make` raised there; on other ranks, if it is none of ours, PipelineError.
    """
    box: list[Any] = [None, None]
    refusal: Exception | None = None
    if mesh.rank == mesh.sharing_ranks[0]:
        try:
            box[0] = make()
        except Exception as error:  # noqa: BLE001 (raised below, when the others have heard)
            refusal = error
            box[1] = PipelineError(refusal_message([_words(error)]))
            if isinstance(error, SPPOError):
                box[1] = type(error)(*error.args)
    dist.broadcast_object_list(box, mesh.sharing_ranks[0], group=mesh.control_group)
    value, told = box
    if told is not None:
        raise told if refusal is None else refusal
    return value


def all_say(mesh: PipelineMesh, make: Callable[[], ValueT]) -> list[ValueT]:
    """What each rank of the pipeline makes, first to last; all of them call this at once.

    The values can be pickled.

    Raises:
        Exception: What `make` raised here.
        PipelineError: It raised on another rank.
    """
    return make_on_all_ranks(make, mesh.control_group, say=lambda made: made)[1]


def make_on_all_ranks(
    make: Callable[[], ValueT], group: Any, *, say: Callable[[ValueT], SaidT]
) -> tuple[ValueT, list[SaidT]]:
    """Let every rank of a group make a value, and hear what each `say`s of its own.

    What is said can be pickled.

    Raises:
        Exception: What `make` or `say` raised here.
        PipelineError: One of them raised on another rank.
    """
    refusal: Exception | None = None
    said: tuple[Any, str] = None, ""
    made: Any = None
    try:
        made = make()
        said = say(made), ""
    except Exception as error:  # noqa: BLE001 (raised below, when the others have heard)
        refusal = error
        said = None, _words(error)
    answers = _said_by_all(said, group).values()
    if refusal is not None:
        raise refusal
    words = [words for _, words in answers if words]
    if words:
        raise PipelineError(refusal_message(words))
    return made, [answer for answer, _ in answers]


def refusal_message(said: list[str]) -> str:
    """Why a batch is not run, by what the ranks that refuse it said."""
    return f"This batch is run by no rank, because {'; '.join(said)}"


def _words(refusal: Exception) -> str:
    return f"rank {dist.get_rank()} refuses it: {type(refusal).__name__}: {refusal}"
