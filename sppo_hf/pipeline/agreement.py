"""Agreement: ranks that share a batch check that they are about to run the same step.

Ranks that run different steps would wait for messages that never come. A few numbers on the CPU, a
fraction of a millisecond, turn that into an error that says what differs.

[Note: who may raise when]
A rank that raises while others wait in a collective for it leaves them waiting until a timeout. So
for each part of a call there is a rule:

1. *What all ranks see alike* (a batch without labels, a setting) every rank refuses by itself,
   before the first collective of the call.
2. *What only one rank may see* before the step (its budget, its memory, adapters in its stages, a
   kernel that fails) is raised at a collective. Ranks never exchange a value that was made before:
   they exchange the making of it (`make_on_all_ranks`, `make_on_first_rank`). Whatever that raises,
   all ranks are told by the same collective, and all raise. The last such collective of a step is
   `gather_refusals`, so `PipelineEngine._prepare` collects an exception of any part of the
   preparation and passes it on there.
   The number and order of collectives must be the same on all ranks up to that point. A function
   that has one after a condition may depend only on what all ranks have alike: settings, shapes,
   and what earlier collectives returned.
3. *What is refused by all ranks before anything of the step was sent* is nobody's failure: every
   rank raises, no process ends, and a script may catch the error and go on with the next batch.
   Caches must be the same on all ranks afterwards, so values are cached after the last collective
   that makes them.
4. *Whatever a rank raises later*, in the middle of the schedule, ends all ranks: the watchdog tells
   the others (`Watchdog.reporting_failures`), whose pending messages then fail.
5. *An error of a connection* is never a refusal, because a collective that failed cannot tell
   others anything. It is raised at once, and the watchdog replaces it by an error that names the
   rank that was lost (`Watchdog.collective_section`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.forward_calls import CLASSIFIER_LABELS, ForwardCall
from sppo_hf.engine.plan_cache import trainable_mask
from sppo_hf.errors import PipelineError, SPPOError
from sppo_hf.pipeline.mesh import PipelineMesh
from sppo_hf.planning.decisions import Order

ValueT = TypeVar("ValueT")
SharedT = TypeVar("SharedT")

_SHARED_SETTINGS = (
    *("num_chunks", "chunk_lengths", "chunk_tokens", "partition", "micro_batch_size"),
    *("pp_size", "pp_schedule", "pp_virtual_stages", "pp_layers", "pp_msp", "sp_size"),
    "correct_plan",
)


def call_facts(call: ForwardCall, config: SPPOConfig) -> dict[str, int]:
    """Return numbers of a call that must be equal on all ranks that share its batch, by name.

    Of tokens, labels, masks and packing these are checksums: copied to the host, whole (8 MB for a
    million tokens). Beside the layout this is the only read from the device before the first chunk.
    """
    number = call.num_items_in_batch
    of_classifier = (call.head_arguments.get(name) for name in CLASSIFIER_LABELS)
    return {
        "rows": call.batch_rows,
        "tokens": call.total_tokens,
        "input_ids": _checksum(call.tokens.get("input_ids")),
        "labels": _checksum(call.shift_labels, *of_classifier),
        "num_items_in_batch": 0 if number is None else int(number),
        "attention_mask": _checksum(call.attention_mask),
        "position_ids": _checksum(call.position_ids),
        "cu_seq_lens": _checksum(call.cu_seq_lens, call.cu_seq_lens_k),
        "training": int(torch.is_grad_enabled()),
        "router loss": int(call.router_loss),
        "images or sound": _encoder_checksum(call.encoder_inputs),
        "settings": settings_checksum(config),
    }


def _checksum(*tensors: Tensor | None) -> int:
    """Return a checksum of the values of tensors, in their order; 0 if there are none."""
    checksum = 0
    for x in tensors:
        if x is not None:
            values = x.detach().cpu().contiguous().view(-1).view(torch.uint8)
            checksum = zlib.crc32(values.numpy().data, checksum)
    return checksum


def _encoder_checksum(inputs: Mapping[str, Any]) -> int:
    """Return a checksum of arguments, by the sum of tensors' bytes and the text of others."""
    seen = [
        (name, int(x.contiguous().view(-1).view(torch.uint8).sum()) if isinstance(x, Tensor) else x)
        for name, x in sorted(inputs.items())
    ]
    return zlib.crc32(repr(seen).encode()) if seen else 0


def settings_checksum(config: SPPOConfig) -> int:
    """Return a checksum of the settings that must be equal on all ranks that share a batch."""
    settings = config.to_dict()
    text = json.dumps([settings[name] for name in _SHARED_SETTINGS])
    return zlib.crc32(text.encode())


def check_agreement(
    mesh: PipelineMesh, facts: Mapping[str, int], *own: int
) -> list[tuple[int, ...]]:
    """Compare numbers over the ranks that share a batch; each calls this before every step.

    `facts` have the same names on all ranks; of `own`, which may differ, each has as many.

    Returns:
        Each rank's `own`.

    Raises:
        PipelineError: Facts differ; names them, the ranks and their numbers.
    """
    local = torch.tensor([*facts.values(), *own], device="cpu")
    gathered = [torch.empty_like(local) for _ in mesh.sharing_ranks]
    dist.all_gather(gathered, local, group=mesh.control_group)
    by_rank = [tuple(numbers.tolist()) for numbers in gathered]
    for rank, numbers in zip(mesh.sharing_ranks, by_rank, strict=True):
        differences = [
            f"{name} ({number} on rank {rank}, {local_number} on rank {mesh.rank})"
            for (name, local_number), number in zip(facts.items(), numbers, strict=False)
            if local_number != number
        ]
        if differences:
            raise PipelineError(
                "ranks that share a batch are about to run different steps: "
                f"{', '.join(differences)}. "
                "All of them must get the same batches and settings, and train the same "
                "parameters. Remedy: prepare the data loader by the Accelerator, shuffle with the "
                "same seed, start all ranks with the same settings file, and freeze and unfreeze "
                "on all of them alike."
            )
    return [numbers[len(facts) :] for numbers in by_rank]


def all_true(value: bool, *groups: Any) -> bool:
    """Return whether `value` is true on all ranks of the groups, of which None has no others.

    A collective: all ranks call this at the same moment.
    """
    smallest = torch.tensor(int(value), device="cpu")
    for group in groups:
        if group is not None:
            dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
    return bool(smallest)


def gather_refusals(
    mesh: PipelineMesh,
    refusal: Exception | None,
    *,
    averaged: Mapping[str, nn.Parameter] | None,
) -> list[str]:
    """Gather why ranks cannot run the step that all are about to run; every rank calls this.

    `averaged` are, by name, the parameters whose gradients the step averages over replicas. The
    other replicas, who wait for these, are then asked too, and all refuse where replicas train
    different parameters: they would add gradients of different ones.

    Returns:
        The refusing ranks' reasons; empty if all ranks can run it.
    """
    # The replicas of a stage first: then the other stages hear what they have found.
    refuses, trained_differ = int(refusal is not None), False
    if averaged is not None:
        checksum = zlib.crc32(trainable_mask(averaged.values()))
        largest = torch.tensor([refuses, checksum, -checksum], device="cpu")
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.replica_control_group)
        refuses = largest[0].item()
        trained_differ = largest[1].item() != -largest[2].item()
    any_refuses = torch.tensor(int(refuses or trained_differ), device="cpu")
    dist.all_reduce(any_refuses, op=dist.ReduceOp.MAX, group=mesh.control_group)
    if not any_refuses.item():
        return []
    reasons = [] if refusal is None else [_reason(refusal)]
    if averaged is not None:
        trained = {name for name, parameter in averaged.items() if parameter.requires_grad}
        by_rank = gather(
            (reasons, trained if trained_differ else set()), mesh.replica_control_group
        )
        reasons = [reason for part, _ in by_rank.values() for reason in part]
        if trained_differ:
            reasons.append(_describe_trained({rank: names for rank, (_, names) in by_rank.items()}))
    parts = gather(reasons, mesh.control_group).values()
    return sorted({reason for part in parts for reason in part})


def gather(value: SharedT, group: Any) -> dict[int, SharedT]:
    """Gather a picklable value over a group; returns the values by global rank.

    `group` is None where there is one process.
    """
    if group is None:
        return {0: value}
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return {dist.get_global_rank(group, at): value for at, value in enumerate(values)}


def gather_of_sharded(numbers: tuple[int, ...], parameter: Any) -> dict[int, tuple[int, ...]]:
    """Gather numbers over the ranks that FSDP2 shards a parameter over; returns them by rank.

    Waits for the parameter's device.
    """
    mesh = parameter.device_mesh
    # Over one axis after the other, the last first: rows come in the order of the mesh.
    gathered = torch.tensor([numbers], device=mesh.device_type)
    for axis in reversed(range(mesh.ndim)):
        parts = [torch.empty_like(gathered) for _ in range(mesh.size(axis))]
        dist.all_gather(parts, gathered, group=mesh.get_group(axis))
        gathered = torch.cat(parts)
    ranks = mesh.mesh.flatten().tolist()
    return {rank: tuple(row) for rank, row in zip(ranks, gathered.tolist(), strict=True)}


def gather_reasons(refusal: Exception | None, groups: Sequence[Any]) -> list[str]:
    """Gather over groups, one after the other, why ranks refuse a batch; each of them calls this.

    `refusal` is this rank's, if it refuses.
    """
    reasons = [] if refusal is None else [_reason(refusal)]
    for group in groups:
        reasons = [reason for part in gather(reasons, group).values() for reason in part]
    return sorted({*reasons})


def check_replicas(by_rank: Mapping[int, tuple[int, ...]], *, order: Order) -> int:
    """Refuse batches and plans for which FSDP2 would gather weights more often on some ranks.

    By chunk all are gathered for every chunk, layer by layer for every group of rows. Calls of the
    final norm and of the head, which may be gathered together, pair up in FSDP2's bookkeeping. So
    where there are several chunks or groups, ranks must call the head as often in each, too.

    Args:
        by_rank: Each rank's number of chunks, the number of groups of rows that it runs in, the
            number of tiles of its loss in the chunk that has most, and whether it runs sharded
            encoders of images or sound.
        order: The plan's.

    Returns:
        The number of tiles that the loss of each chunk must have.

    Raises:
        PipelineError: They differ, as all ranks that have gathered them see.
    """
    encoding = [str(rank) for rank, (*_, encodes) in by_rank.items() if encodes]
    if 0 < len(encoding) < len(by_rank):
        others = ", ".join(str(rank) for rank in by_rank if str(rank) not in encoding)
        raise PipelineError(
            "FSDP2 gathers the weights of encoders where they run, for which all ranks wait, and "
            f"there are images or sound on rank {', '.join(encoding)}, but not on rank {others}. "
            "Allowed: on all ranks, or on none. Remedy: sort or mix the rows so, or leave the "
            "encoders' layers out of those that FSDP2 wraps (transformer_layer_cls_to_wrap)."
        )
    groups = {rank: count for rank, (_, count, *_) in by_rank.items()}
    if order == "by_layer" and len({*groups.values()}) > 1:
        seen = ", ".join(f"{count} on rank {rank}" for rank, count in groups.items())
        raise PipelineError(
            "FSDP2 gathers the weights of every layer once for each group of rows, for which all "
            f"ranks wait, and they are about to run different numbers of groups: {seen}. Allowed: "
            "the same number. Remedy: as many rows for each rank, or no micro_batch_size."
        )
    if len({chunks * count for chunks, count, *_ in by_rank.values()}) == 1:
        return max(tiles for _, _, tiles, _ in by_rank.values())
    most = max(chunks for chunks, *_ in by_rank.values())
    remedy = (
        f"Remedy: num_chunks={most} instead of chunk_tokens or 'auto', which cuts rows of all "
        "lengths into as many"
    )
    if order == "by_layer":
        seen = ", ".join(f"{chunks} on rank {rank}" for rank, (chunks, *_) in by_rank.items())
        raise PipelineError(
            "with micro_batch_size FSDP2 gathers the weights of the head once for each chunk of a "
            f"group of rows, for which all ranks wait, and they are about to cut their rows into "
            f"different numbers of chunks: {seen}. Allowed: the same number. {remedy}; or no "
            "micro_batch_size, with which alone they count."
        )
    seen = ", ".join(f"{c * count} on rank {rank}" for rank, (c, count, *_) in by_rank.items())
    raise PipelineError(
        "FSDP2 gathers the weights of every layer once for each chunk, for which all ranks "
        f"wait, and they are about to run different numbers of chunks: {seen}. Allowed: the "
        f"same number. {remedy}; with micro_batch_size, as many rows for each rank."
    )


def _describe_trained(trained: Mapping[int, set[str]]) -> str:
    """Say which parameters do not train on all ranks that hold them, by names per rank."""
    anywhere = set[str]().union(*trained.values())
    names = sorted(name for name in anywhere if not all(name in one for one in trained.values()))
    train = [str(rank) for rank, one in trained.items() if names[0] in one]
    frozen = [str(rank) for rank, one in trained.items() if names[0] not in one]
    more = f", and {len(names) - 1} more differ" if len(names) > 1 else ""
    return (
        f"replicas train different parameters: {names[0]} trains on rank {', '.join(train)} and is "
        f"frozen on rank {', '.join(frozen)}{more}. "
        "Allowed: the same on all replicas, which sum its gradients. Remedy: freeze and unfreeze "
        "on all ranks alike, by the names in model.named_parameters()"
    )


def make_on_first_rank(mesh: PipelineMesh, make: Callable[[], ValueT]) -> ValueT:
    """Make a value on the first rank that shares a batch, and return it on all of them.

    For values that must be equal on all ranks although these see different parts of the model:
    adapters on some stages only, say, would balance chunks differently. The value can be pickled.
    `make` is called on the first rank alone; see [Note: who may raise when].

    Raises:
        Exception: What `make` raised there; on other ranks, unless it is an SPPOError,
            PipelineError.
    """
    shared: list[Any] = [None, None]
    """The value, and the exception that other ranks raise."""
    refusal: Exception | None = None
    if mesh.rank == mesh.sharing_ranks[0]:
        try:
            shared[0] = make()
        except Exception as error:  # noqa: BLE001 (raised below, when the others have heard)
            refusal = error
            shared[1] = PipelineError(refusal_message([_reason(error)]))
            if isinstance(error, SPPOError):
                shared[1] = type(error)(*error.args)
    dist.broadcast_object_list(shared, mesh.sharing_ranks[0], group=mesh.control_group)
    value, exception = shared
    if exception is not None:
        raise exception if refusal is None else refusal
    return value


def make_on_all_ranks(
    make: Callable[[], ValueT], group: Any, *, share: Callable[[ValueT], SharedT]
) -> tuple[ValueT, list[SharedT]]:
    """Make a value on each rank of a group; see [Note: who may raise when].

    Returns:
        This rank's value, and what `share` returned for each rank's, which can be pickled.

    Raises:
        Exception: What `make` or `share` raised here.
        PipelineError: One of them raised on another rank.
    """
    refusal: Exception | None = None
    shared: tuple[Any, str] = None, ""
    """The value of `share`, and its error message if it raised."""
    made: Any = None
    try:
        made = make()
        shared = share(made), ""
    except Exception as error:  # noqa: BLE001 (raised below, when the others have heard)
        refusal = error
        shared = None, _reason(error)
    by_rank = gather(shared, group).values()
    if refusal is not None:
        raise refusal
    reasons = [reason for _, reason in by_rank if reason]
    if reasons:
        raise PipelineError(refusal_message(reasons))
    return made, [value for value, _ in by_rank]


def refusal_message(reasons: list[str]) -> str:
    """Say that no rank runs a batch, and why."""
    return f"This batch is run by no rank, because {'; '.join(reasons)}"


def _reason(refusal: Exception) -> str:
    return f"rank {dist.get_rank()} refuses it: {type(refusal).__name__}: {refusal}"
