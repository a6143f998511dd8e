"""What an Accelerator does differently in a pipeline run: data, optimizers, norms, scalers.

Ranks of one pipeline get the same batches and hold different parameters, which neither DDP's nor
tensor parallelism's paths of Accelerate expect. Knows Accelerate's classes; how a pipeline runs is
the business of `sppo_hf.pipeline`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DistributedType, recursively_apply
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import RandomSampler

from sppo_hf.engine.convert import get_engine
from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.pipeline.agreement import first_rank_says
from sppo_hf.pipeline.mesh import PipelineMesh
from sppo_hf.pipeline.pipeline_engine import PipelineEngine
from sppo_hf.pipeline.watchdog import explaining

if TYPE_CHECKING:
    from accelerate import Accelerator

_ALLOWED = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def refuse_for_pipeline(accelerator: Accelerator, pp_size: int) -> None:
    """Refuse launches in which a pipeline cannot run.

    Raises:
        ConfigError: One process, or FSDP.
    """
    kind = accelerator.distributed_type
    if kind not in _ALLOWED:
        raise ConfigError(
            f"pp_size={pp_size} and the Accelerator runs {kind.value}. Allowed: several processes "
            "without FSDP (data-parallel replicas of the pipeline replicate). Remedy: accelerate "
            f"launch --multi_gpu --num_processes {pp_size} (or a multiple), without --use_fsdp; on "
            f"CPUs torchrun --nproc_per_node {pp_size} and use_cpu=True in TrainingArguments."
        )


def refuse_for_shared_sequences(accelerator: Accelerator, sp_size: int) -> None:
    """Refuse launches in which no ranks can share a sequence.

    Raises:
        ConfigError: One process.
    """
    kind = accelerator.distributed_type
    if kind == DistributedType.NO:
        raise ConfigError(
            f"sp_size={sp_size} and the Accelerator runs a single process. Allowed: sp_size "
            "processes or a multiple, with DDP or FSDP2. Remedy: accelerate launch --multi_gpu "
            f"--num_processes {sp_size}; on CPUs torchrun --nproc_per_node {sp_size} and "
            "use_cpu=True in TrainingArguments."
        )


def prepare_loader(accelerator: Accelerator, mesh: PipelineMesh, loader: Any, place: Any) -> Any:
    """Prepare a data loader so that ranks that share batches get the same rows, replicas others.

    Args:
        accelerator: Its settings hold.
        mesh: This rank's place.
        loader: A `torch.utils.data.DataLoader`.
        place: Whether to put batches on the device; None for the Accelerator's own setting.

    Raises:
        ConfigError: Rank 0 was to hand the data out.
    """
    if accelerator.dispatch_batches:
        raise ConfigError(
            "dispatch_batches=True hands every process other rows, but ranks that share batches "
            f"(pp_size={mesh.pp_size}, sp_size={mesh.sp_size}) need the same ones. Allowed: "
            "dispatch_batches=False or None. Remedy: drop dispatch_batches; every rank then reads "
            "the dataset itself."
        )
    if mesh.dp_size == 1:
        _shuffle_alike(loader, mesh)
    rng_types: Any = accelerator.rng_types
    prepared: Any = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=mesh.dp_size,
        process_index=mesh.dp_rank,
        split_batches=accelerator.split_batches,
        put_on_device=accelerator.device_placement if place is None else place,
        rng_types=None if rng_types is None else list(rng_types),
        # Every rank reads for itself: dispatching would give each another part.
        dispatch_batches=False,
        even_batches=accelerator.even_batches,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed,
        non_blocking=accelerator.non_blocking,
        use_stateful_dataloader=accelerator.use_stateful_dataloader,
    )
    # Accelerate's loaders ask for the iterator of the one that they wrap by this name.
    inner = prepared.base_dataloader
    inner.__iter__ = functools.partial(_tell_reading, inner.__iter__)
    return prepared


def _tell_reading(read: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Iterate over what a loader reads, and let other ranks hear that this one is reading."""
    batches, ended = read(), object()
    while True:
        with explaining("reading a batch"):
            batch = next(batches, ended)
        if batch is ended:
            return
        yield batch


def _shuffle_alike(loader: Any, mesh: PipelineMesh) -> None:
    """Have all ranks of a pipeline shuffle alike, also where the script has set no seed.

    Accelerate does so over the processes that share a dataset; to it, these are one.
    """
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        seed = first_rank_says(mesh, int(torch.empty((), dtype=torch.int64).random_().item()))
        sampler.generator = torch.Generator().manual_seed(seed)


def keep_own_parameters(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> None:
    """Take parameters of other stages out of an optimizer's groups; the groups stay.

    Args:
        optimizer: Made before the models were cut.
        models: What this rank is left with.
    """
    own = {id(p) for model in models for p in model.parameters()}
    for group in optimizer.param_groups:
        foreign = [p for p in group["params"] if id(p) not in own]
        group["params"] = [p for p in group["params"] if id(p) in own]
        for parameter in foreign:
            optimizer.state.pop(parameter, None)


def engine_of(
    models: Iterable[nn.Module], parameters: Iterable[Tensor] | None = None
) -> PipelineEngine | None:
    """The pipeline engine among the prepared models, if there is one.

    Args:
        models: What an Accelerator has prepared; a frozen reference model may be among them.
        parameters: Picks the model that they belong to; the last one where they belong to none.
    """
    wanted = None if parameters is None else {id(p) for p in parameters}
    found = None
    for model in models:
        try:
            engine = get_engine(model)
        except UnsupportedModelError:  # a loss, a value head: anything may be prepared
            continue
        if isinstance(engine, PipelineEngine):
            found = engine
            if wanted is None or any(id(p) in wanted for p in model.parameters()):
                break
    return found


@torch.no_grad()
def total_norm(
    engine: PipelineEngine, parameters: Sequence[nn.Parameter], norm_type: float
) -> Tensor:
    """Norm of the gradients of all stages together; tied weights count once, shape `[]`.

    Args:
        engine: Of this rank.
        parameters: Those of this rank whose gradients count.
        norm_type: 2, another p, or infinity.
    """
    mesh = engine.mesh
    # The first rank's copy of a tied weight stands for both.
    twice = set() if mesh.is_first else {id(p) for p in engine.shared_parameters()}
    grads = [p.grad for p in parameters if p.grad is not None and id(p) not in twice]
    double = any(g.dtype == torch.float64 for g in grads)
    wide = torch.float64 if double else torch.float32
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=wide) for g in grads]
    kept = torch.stack(norms).to(mesh.device) if norms else torch.zeros(1, device=mesh.device)
    own = torch.linalg.vector_norm(kept, norm_type).double()
    infinite = math.isinf(norm_type)
    # A rank without a gradient cannot know what the others' are: it must hear of the dtype too,
    # or its norm, which may be the one that is logged, is another one than theirs.
    both = torch.stack([own if infinite else own**norm_type, own.new_tensor(float(double))])
    dist.all_reduce(
        both, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=mesh.pipeline
    )
    norm = both[0] if infinite else both[0] ** (1.0 / norm_type)
    return norm if both[1] else norm.float()


@torch.no_grad()
def clip_to(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients down so that their norm, which is `norm`, is at most `max_norm`."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad))


class PipelineGradScaler(torch.amp.GradScaler):
    """A gradient scaler whose ranks agree on whether a gradient was infinite.

    Stages hold different gradients; if each decided by itself, some would step and others not.
    """

    sppo_group: Any

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = super()._unscale_grads_(*args, **kwargs)  # type: ignore[misc]
        if not found:  # a stage without a gradient has a say as well, and must hear the others
            infinite: Tensor = kwargs["found_inf"] if "found_inf" in kwargs else args[2]
            found = {infinite.device: infinite}
        for infinite in found.values():
            dist.all_reduce(infinite, op=dist.ReduceOp.MAX, group=self.sppo_group)
        return found


def agree_on_infinities(scaler: Any, mesh: PipelineMesh) -> None:
    """Turn an Accelerator's gradient scaler into one that all stages share; again is fine."""
    if scaler is None or isinstance(scaler, PipelineGradScaler):
        return
    if not isinstance(scaler, torch.amp.GradScaler):
        raise ConfigError(
            f"The gradient scaler {type(scaler).__name__} cannot be shared by the stages of a "
            "pipeline. Allowed: torch.amp.GradScaler. Remedy: mixed_precision='bf16', which needs "
            "none."
        )
    shared: Any = scaler
    shared.__class__ = PipelineGradScaler
    shared.sppo_group = mesh.pipeline


def only_tensors(nest: Any) -> bool:
    """Whether a nest of lists, tuples and dicts holds tensors alone."""
    try:
        recursively_apply(lambda x: x, nest, error_on_other_type=True)
    except TypeError:
        return False
    return True


def once_per_pipeline(mesh: PipelineMesh, gathered: Any) -> Any:
    """Of what was gathered from all ranks, keep one's part of those that share batches.

    Args:
        mesh: Sizes.
        gathered: Tensors `[ranks * n, ...]`, or a nest of them; lists of `ranks * n` objects.
    """
    if isinstance(gathered, Tensor):
        parts = gathered.chunk(mesh.dp_size * len(mesh.sharing_ranks))
        return torch.cat(parts[:: len(mesh.sharing_ranks)])
    if isinstance(gathered, dict):
        return type(gathered)({k: once_per_pipeline(mesh, v) for k, v in gathered.items()})
    if isinstance(gathered, list) and not any(isinstance(x, Tensor) for x in gathered):
        sharing = len(mesh.sharing_ranks)
        size = len(gathered) // (mesh.dp_size * sharing)
        runs = range(0, len(gathered), size * sharing) if size else ()
        return [x for start in runs for x in gathered[start : start + size]]
    if isinstance(gathered, list | tuple):
        return type(gathered)(once_per_pipeline(mesh, x) for x in gathered)
    return gathered
