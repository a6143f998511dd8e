"""Making a pipeline of a model: stages chosen, cut, and an engine that runs them.

The entry of this room for those who attach SPPO to something; see `pipeline_engine` for a step.
"""

from __future__ import annotations

import functools
from itertools import accumulate, pairwise
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch import nn
from transformers import PreTrainedModel

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import ConfigError
from sppo_hf.model.convert import convert, get_engine
from sppo_hf.model.facts import model_shape
from sppo_hf.model.guard import check_family
from sppo_hf.model.observer import StepObserver
from sppo_hf.model.stage_loading import load_stages
from sppo_hf.model.stages import StageCut, StagedModel, staged_model_of
from sppo_hf.model.structure import ModelParts, find_parts
from sppo_hf.planning.flops import layer_costs
from sppo_hf.planning.shape import ModelShape
from sppo_hf.planning.stages import split_layers
from sppo_hf.runtime.exchange import refuse_unshareable
from sppo_hf.runtime.mesh import PipelineMesh, check_world, make_mesh
from sppo_hf.runtime.pipeline_engine import PipelineEngine
from sppo_hf.runtime.watchdog import GROUP_MARGIN_SECONDS, Watchdog, watch_launch

ModelT = TypeVar("ModelT", bound=nn.Module)

BALANCE_TOKENS = 32_768
"""Length of the sequences that stages are balanced for; the longer, the less the head weighs."""


def shared_mesh(
    pp_size: int, device: torch.device, timeout_seconds: int, sp_size: int = 1
) -> PipelineMesh:
    """The mesh of this process, formed once: groups are a launch's, not a model's.

    Raises:
        ConfigError: There is no launch, or its size is no multiple of `pp_size * sp_size`.
    """
    # Groups end with the launch's own, which a process may leave and form anew.
    watchdog = launch_watchdog(pp_size, timeout_seconds, sp_size)
    with watchdog.explaining("forming groups of ranks"):
        return _mesh(pp_size, sp_size, device, timeout_seconds, dist.group.WORLD)


def launch_watchdog(pp_size: int, timeout_seconds: int, sp_size: int = 1) -> Watchdog:
    """The watchdog of this process, started if it is not running.

    Raises:
        ConfigError: There is no launch.
    """
    _check_launch(*(("pp_size", pp_size) if sp_size == 1 else ("sp_size", sp_size)))
    return watch_launch(timeout_seconds)


def _check_launch(name: str, size: int) -> None:
    if not dist.is_initialized():
        raise ConfigError(
            f"{name}={size} needs {size} processes, and this is a single one. Allowed: a "
            f"launch of {name} processes or a multiple. Remedy: accelerate launch "
            f"--num_processes {size} script.py (or torchrun --nproc_per_node {size})."
        )


@functools.cache
def _mesh(
    pp_size: int, sp_size: int, device: torch.device, timeout_seconds: int, _: Any
) -> PipelineMesh:
    seconds = timeout_seconds + GROUP_MARGIN_SECONDS
    return make_mesh(pp_size, device, timeout_seconds=seconds, sp_size=sp_size)


def choose_cut(parts: ModelParts, config: SPPOConfig, pp_rank: int) -> StageCut:
    """Which layers each stage has, balanced by FLOPs with the head counted, and which are here.

    Raises:
        ConfigError: There are more stages than layers.
    """
    return cut_of_shape(model_shape(parts), config, pp_rank)


def cut_of_shape(shape: ModelShape, config: SPPOConfig, pp_rank: int) -> StageCut:
    """See `choose_cut`."""
    stages = config.pp_size * config.pp_virtual_stages
    if stages > len(shape.layers):
        raise ConfigError(
            f"pp_size={config.pp_size} x pp_virtual_stages={config.pp_virtual_stages} makes "
            f"{stages} stages, but the model has {len(shape.layers)} layers. Allowed: at most one "
            "stage per layer. Remedy: a smaller pp_size (the other processes become data-parallel "
            "replicas), or fewer pp_virtual_stages."
        )
    if config.pp_layers is not None:
        if sum(config.pp_layers) != len(shape.layers):
            raise ConfigError(
                f"pp_layers={list(config.pp_layers)} are {sum(config.pp_layers)} layers, but the "
                f"model has {len(shape.layers)}. Allowed: numbers that sum to that. Remedy: change "
                "them, or drop pp_layers, which balances the stages."
            )
        ends = list(accumulate(config.pp_layers, initial=0))
        cut = tuple(range(start, end) for start, end in pairwise(ends))
    else:
        layers, head = layer_costs(shape, BALANCE_TOKENS)
        cut = split_layers(layers, stages, last=head)
    return StageCut(cut, tuple(range(pp_rank, stages, config.pp_size)))


def convert_to_stages(
    model: ModelT,
    config: SPPOConfig,
    *,
    device: torch.device | None = None,
    observer: StepObserver | None = None,
) -> ModelT:
    """Cut `model` to this rank's stages, in place, and let it run in the pipeline.

    Every process of the launch calls this with the same model and settings. What other ranks hold
    is freed. `model(**batch)` then runs the whole pipeline and returns the loss on every rank.

    Args:
        model: A Transformers causal language model, bare or in PEFT, whole or cut already.
        config: The settings, with `pp_size` above 1.
        device: Where it will run; where it is, by default.
        observer: Is told about plans, units and records.

    Raises:
        ConfigError: The launch or the settings do not fit.
        UnsupportedModelError: The model cannot be cut, or not trained exactly.
    """
    engine = get_engine(model)
    if engine is not None and engine.enabled:
        return convert(model, config, observer=observer)  # says so if settings differ
    parts = find_parts(model)
    check_family(parts)
    device = next(parts.causal_lm.parameters()).device if device is None else device
    if config.sp_size > 1:
        refuse_unshareable(parts, config.sp_size)
    mesh = shared_mesh(config.pp_size, device, config.pp_timeout_seconds, config.sp_size)
    staged = staged_model(parts, config, mesh.pp_rank)
    make_engine = functools.partial(
        PipelineEngine,
        staged=staged,
        mesh=mesh,
        watchdog=launch_watchdog(config.pp_size, config.pp_timeout_seconds),
    )
    return convert(model, config, observer=observer, make_engine=make_engine)


def staged_model(parts: ModelParts, config: SPPOConfig, pp_rank: int) -> StagedModel:
    """The stages of a rank: as they were loaded, or cut out of `parts` in place now.

    Raises:
        ConfigError: There are more stages than layers, or the model was cut for another rank or
            other settings.
    """
    staged = staged_model_of(parts.causal_lm)
    if staged is None:
        return StagedModel(parts, choose_cut(parts, config, pp_rank))
    stages = config.pp_size * config.pp_virtual_stages
    own = tuple(range(pp_rank, stages, config.pp_size))
    if staged.cut.num_stages != stages or staged.cut.own != own:
        raise ConfigError(
            f"{parts.name} holds stages {list(staged.cut.own)} of {staged.cut.num_stages}, but "
            f"pp_size={config.pp_size} x pp_virtual_stages={config.pp_virtual_stages} makes "
            f"{stages}, of which rank {pp_rank} of the pipeline runs {list(own)}. Allowed: a model "
            "that was loaded by the same rank with the same settings. Remedy: load it again with "
            "the settings that it is to run with."
        )
    return staged


def load_model_stages(
    model_class: Any, name_or_path: str | PathLike[str], config: SPPOConfig, **kwargs: Any
) -> PreTrainedModel:
    """Load this rank's stages of a model, reading nothing else of it; see `load_stages`.

    Args:
        model_class: `AutoModelForCausalLM` or a model class.
        name_or_path: A hub id or a folder.
        config: The settings, with `pp_size` above 1.
        **kwargs: Of `from_pretrained`.

    Raises:
        ConfigError: There is no launch, or its size, the settings, an argument or the checkpoint
            does not fit.
        UnsupportedModelError: The model cannot be cut.
    """
    launch_watchdog(config.pp_size, config.pp_timeout_seconds)
    check_world(config.pp_size, dist.get_world_size(), config.sp_size)
    pp_rank = dist.get_rank() // config.sp_size % config.pp_size
    return load_stages(
        model_class, name_or_path, lambda parts: choose_cut(parts, config, pp_rank), **kwargs
    )
