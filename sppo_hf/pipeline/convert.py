"""Turning a model into a pipeline: stages chosen, loaded and cut, and an engine that runs them.

`integrations` comes in here; how a step runs is in `pipeline_engine`.

A rank reads the tensors of its own stages from disk and no others. Transformers builds a model on
the meta device, then reads from the checkpoint what the model has a parameter for. So the model is
cut between the two, and all that Transformers does to weights while it loads them (renaming,
joining experts, dtypes, tied weights, quantization) is done to a stage's, too. Training mode, and
moving the model to a device, are left to others.

[Note: mapped or read] Transformers maps files into memory, which costs nothing where a tensor stays
as the file has it: its pages are the file's. Where dtypes are changed or experts are joined, the
pages that were read would stay resident beside the result and double a rank's peak. There, tensors
are read instead, and each is freed once it was converted; experts are read one tensor at a time.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from os import PathLike
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.engine.device_facts import device_facts, model_shape
from sppo_hf.engine.family_guard import check_family
from sppo_hf.engine.foreign_code import check_foreign_code
from sppo_hf.engine.model_parts import ModelParts, find_parts
from sppo_hf.engine.stages import (
    StageCut,
    StagedModel,
    absent_prefixes,
    staged_model_of,
)
from sppo_hf.engine.step_observer import StepObserver
from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.pipeline.agreement import all_true
from sppo_hf.pipeline.checkpoint_files import DTYPE_NAMES
from sppo_hf.pipeline.mesh import (
    PipelineMesh,
    check_nodes,
    check_world,
    make_mesh,
    with_unit_groups,
)
from sppo_hf.pipeline.multiplex import check_shareable_units
from sppo_hf.pipeline.pipeline_engine import PipelineEngine
from sppo_hf.pipeline.sequence_parallel import SequenceParallelEngine, check_shareable_sequences
from sppo_hf.pipeline.watchdog import GROUP_MARGIN_SECONDS, Watchdog, watch_launch
from sppo_hf.planning.model_shape import layer_step_flops
from sppo_hf.planning.stages import split_layers

logger = logging.getLogger(__name__)

ChooseCut = Callable[[ModelParts], StageCut]
"""Chooses the stages of a whole model on the meta device."""

_NO_ASYNC_LOAD = "HF_DEACTIVATE_ASYNC_LOAD"


def load_stages(
    model_class: Any,
    name_or_path: str | PathLike[str],
    choose_cut: ChooseCut,
    *model_args: Any,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load this rank's stages, chosen by `choose_cut`, and nothing else of the model.

    Reads the bytes of these stages once. Peak of host memory: the stages in the requested dtype,
    and a few tensors that are being converted; see [Note: mapped or read]. Arguments are as
    `AutoModelForCausalLM.from_pretrained`, or that of a model class, takes them.

    Returns:
        The model, in evaluation mode as `from_pretrained` returns it, and of the same class.
        `staged_model_of(model)` has the cut.

    Raises:
        ConfigError: An argument does not fit loading a part, the checkpoint lacks a tensor of these
            stages, or the stages do not fit the model.
        UnsupportedModelError: The model cannot be cut into stages, or brings code of its own.
    """
    _refuse_arguments(kwargs)
    if kwargs.get("gguf_file"):
        logger.warning(
            "gguf_file=%r: GGUF files may be unpacked whole on every rank before the rest is let "
            "go. Save the model as safetensors once (save_pretrained) to read only own stages.",
            kwargs["gguf_file"],
        )
    staging_class = _staging_class(model_class, choose_cut)
    loaded, report = staging_class.from_pretrained(
        name_or_path, *model_args, output_loading_info=True, **kwargs
    )
    model: PreTrainedModel = loaded
    if staged_model_of(model) is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} from {name_or_path} brings code of its own "
            "(trust_remote_code), which SPPO cannot load stage by stage. Allowed: models of "
            "Transformers itself. Remedy: load it with from_pretrained as always; it is cut when "
            "it is converted, if every rank's host memory holds the whole."
        )
    model.__class__ = type(model).__mro__[1]
    _check_loaded(model, str(name_or_path), report)
    return model


def _refuse_arguments(kwargs: dict[str, Any]) -> None:
    sharding = ("tp_plan", "tp_size", "distributed_config", "device_mesh")
    refused = {
        **dict.fromkeys(sharding, "shards every tensor over the ranks"),
        "state_dict": "is the whole model in memory already",
        "output_loading_info": "is asked for by SPPO itself",
        "ignore_mismatched_sizes": "would leave random weights in a stage",
    }
    for name, effect in refused.items():
        if kwargs.get(name):
            raise ConfigError(
                f"{name}={_shorten(kwargs[name])} {effect}, and with pp_size above 1 each "
                "rank loads its own stages. Allowed: the other arguments of from_pretrained. "
                f"Remedy: drop {name}."
            )
    device_map = kwargs.get("device_map")
    is_one_device = isinstance(device_map, int | torch.device) or (
        isinstance(device_map, str)
        and device_map.partition(":")[0] in ("cpu", "cuda", "xpu", "npu", "mps")
    )
    if isinstance(device_map, dict):
        is_one_device = list(device_map) == [""] and device_map[""] != "disk"
    if device_map is not None and not is_one_device:
        raise ConfigError(
            f"device_map={_shorten(device_map)} spreads a model over devices, and with "
            "pp_size above 1 each rank loads its own stages to one. Allowed: nothing (the CPU) or "
            "one device. Remedy: drop device_map; the Trainer or the Accelerator moves the model."
        )


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- model classes that cut a model when it is built --------------------------------------------


def _staging_class(model_class: Any, choose_cut: ChooseCut) -> Any:
    """Return a class like `model_class` whose models are cut as soon as they are built."""
    if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
        return _staging_model_class(model_class, choose_cut)
    mapping = getattr(model_class, "_model_mapping", None)
    if mapping is None:
        raise ConfigError(
            f"model_class={_shorten(model_class)} cannot load models. Allowed: "
            "AutoModelForCausalLM or a model class of Transformers such as LlamaForCausalLM."
        )
    # Auto classes look up the class to load here, and know remote code by their own name.
    return type(
        model_class.__name__,
        (model_class,),
        {"_model_mapping": _StagingMapping(mapping, choose_cut)},
    )


class _StagingMapping:
    """Mapping of Transformers' auto classes from config classes to `_staging_model_class`."""

    def __init__(self, mapping: Any, choose_cut: ChooseCut) -> None:
        self._mapping = mapping
        self._choose_cut = choose_cut

    def __contains__(self, config_class: object) -> bool:
        return config_class in self._mapping

    def __iter__(self) -> Iterator[type]:
        return iter(self._mapping)

    def __getitem__(self, config_class: type) -> Any:
        found = self._mapping[config_class]
        if isinstance(found, tuple | list):
            return tuple(_staging_model_class(base, self._choose_cut) for base in found)
        return _staging_model_class(found, self._choose_cut)


def _staging_model_class(base: Any, choose_cut: ChooseCut) -> Any:
    class StagingModel(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            _cut(self, choose_cut)

        @staticmethod
        def _load_pretrained_model(
            model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, **kwargs: Any
        ) -> Any:
            with contextlib.ExitStack() as stack:
                if state_dict is None:
                    state_dict = _open_slices(checkpoint_files or (), load_config, stack)
                if _joins_tensors(load_config):
                    # Else Transformers' readers would have all parts of all experts in memory
                    # before many are joined.
                    stack.enter_context(_without_async_load())
                return base._load_pretrained_model(
                    model, state_dict, checkpoint_files, load_config, **kwargs
                )

        def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
            super()._adjust_missing_and_unexpected_keys(loading_info)
            # Unknown tensors of other stages are reported by their ranks.
            prefixes = absent_prefixes(self)
            # A checkpoint of the base model has names without its prefix.
            base_prefix = f"{self.base_model_prefix}."
            prefixes += tuple(prefix.removeprefix(base_prefix) for prefix in prefixes)
            loading_info.unexpected_keys = {
                key for key in loading_info.unexpected_keys if not key.startswith(prefixes)
            }

    # Transformers looks up conversions of checkpoints by the class's name, and shows it.
    StagingModel.__name__, StagingModel.__qualname__ = base.__name__, base.__qualname__
    StagingModel.__module__ = base.__module__
    return StagingModel


def _cut(model: Any, choose_cut: ChooseCut) -> None:
    """Cut a model that was just built, on the meta device, with weights not tied yet."""
    for target, source in model.all_tied_weights_keys.items():
        parent, _, name = target.rpartition(".")
        setattr(model.get_submodule(parent), name, model.get_parameter(source))
    parts = find_parts(model)
    # Costs of layers, by which to cut, are measured on models of this class, which must stay whole.
    staging_class, model.__class__ = type(model), type(model).__mro__[1]
    try:
        with torch.device("cpu"):  # the measurement computes
            cut = choose_cut(parts)
    finally:
        model.__class__ = staging_class
    StagedModel(parts, cut)


def _open_slices(
    files: Any, load_config: Any, stack: contextlib.ExitStack
) -> dict[str, Any] | None:
    """Open safetensors files so that each tensor is read when it is converted.

    Returns:
        Slices by tensor name; None to let Transformers map the files, where their dtype is kept
        (see [Note: mapped or read]), or where they are of other formats.
    """
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        return None
    slices: dict[str, Any] = {}
    for path in files:
        file = stack.enter_context(safe_open(path, "pt", device="cpu", backend="pread"))
        slices |= {name: file.get_slice(name) for name in file.offset_keys()}
    is_converted = load_config.hf_quantizer is not None or _joins_tensors(load_config)
    dtype = DTYPE_NAMES.get(load_config.dtype)
    if is_converted or any(part.get_dtype() != dtype for part in slices.values()):
        return slices
    return None


def _joins_tensors(load_config: Any) -> bool:
    """Whether tensors of the model are joined from several in the files, as experts are."""
    mapping = load_config.weight_mapping or ()
    return any(isinstance(change, WeightConverter) for change in mapping)


@contextlib.contextmanager
def _without_async_load() -> Iterator[None]:
    """Keep Transformers from reading ahead, by its environment variable."""
    previous = os.environ.get(_NO_ASYNC_LOAD)
    os.environ[_NO_ASYNC_LOAD] = "1"
    try:
        yield
    finally:
        del os.environ[_NO_ASYNC_LOAD]
        if previous is not None:
            os.environ[_NO_ASYNC_LOAD] = previous


def _check_loaded(model: PreTrainedModel, name_or_path: str, report: dict[str, Any]) -> None:
    missing = sorted(report["missing_keys"])
    if missing:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise ConfigError(
            f"{name_or_path} lacks {len(missing)} tensors of this rank's stages of "
            f"{type(model).__name__}: {shown}. Allowed: checkpoints with every tensor, because "
            "ranks must not start from random weights. Remedy: give a complete checkpoint; or load "
            "it with from_pretrained, on a machine that holds the whole model, and save it again."
        )


ModelT = TypeVar("ModelT", bound=nn.Module)

BALANCE_TOKENS = 32_768
"""Sequence length to balance stages for; the longer, the smaller the head's share of FLOPs."""


def shared_mesh(config: SPPOConfig, device: torch.device) -> PipelineMesh:
    """Return the mesh of this process, formed once for a launch, not for each model.

    Raises:
        ConfigError: See `join_launch`.
    """
    sizes = config.pp_size, config.sp_size, config.pp_timeout_seconds
    # The cache is by the launch's group, which a process may destroy and form again.
    with join_launch(config).collective_section("forming groups of ranks"):
        return _mesh(*sizes, device, dist.group.WORLD)


def join_launch(config: SPPOConfig) -> Watchdog:
    """Return the watchdog of this process, started if it is not running.

    Raises:
        ConfigError: There is no launch, its size is no multiple of `pp_size * sp_size`, or ranks of
            one sequence are on several machines.
    """
    check_world(config, dist.get_world_size() if dist.is_initialized() else 1)
    check_nodes(config)
    return watch_launch(config.pp_timeout_seconds)


@functools.cache
def _mesh(
    pp_size: int, sp_size: int, timeout_seconds: int, device: torch.device, _: Any
) -> PipelineMesh:
    seconds = timeout_seconds + GROUP_MARGIN_SECONDS
    return make_mesh(pp_size, device, timeout_seconds=seconds, sp_size=sp_size)


def choose_cut(parts: ModelParts, config: SPPOConfig, pp_rank: int) -> StageCut:
    """Choose the layers of each stage, balanced by FLOPs with the head's, and this rank's stages.

    Raises:
        ConfigError: There are more stages than layers.
        UnsupportedModelError: Layers exchange more than hidden states.
    """
    shape = model_shape(parts)
    if (refusal := shape.stages_refusal) is not None:
        raise UnsupportedModelError(
            f"{parts.name} cannot be cut into stages: {refusal}, and only hidden states are sent "
            "from one stage to the next. Train it with pp_size=1; DDP and FSDP2 share the work "
            "between GPUs."
        )
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
        layers, head = layer_step_flops(shape, BALANCE_TOKENS)
        cut = split_layers(layers, stages, last=head)
    return StageCut(cut, tuple(range(pp_rank, stages, config.pp_size)))


def convert_over_ranks(
    model: ModelT,
    config: SPPOConfig,
    *,
    device: torch.device | None = None,
    observer: StepObserver | None = None,
) -> ModelT:
    """Convert a causal language model, in place, to train on batches that ranks share.

    Every process of the launch calls this with the same model, bare or in PEFT, whole or already
    cut, and the same settings, with `pp_size` or `sp_size` above 1. `model(**batch)` then returns
    the loss of the whole batch on every rank; `observer` is told about plans, units and records.
    With `pp_size` the model is cut to this rank's stages and layers of other ranks are freed; it
    runs on `device` (by default where the model is). With `sp_size` alone, average gradients over
    all ranks, as DDP and FSDP2 do.

    Raises:
        ConfigError: The launch or the settings do not fit, heads cannot be divided, or ranks of one
            sequence are on several machines.
        UnsupportedModelError: The model cannot be cut, or not trained exactly.
    """
    if (engine := get_engine(model)) is not None and engine.enabled:
        return convert(model, config, observer=observer)  # raises if settings differ
    parts = find_parts(model)
    check_family(parts)
    check_foreign_code(parts, one_chunk=config.num_chunks == config.sp_size == 1)
    device = next(parts.causal_lm.parameters()).device if device is None else device
    if config.sp_size > 1:
        check_shareable_sequences(parts, config.sp_size)
    if config.pp_msp == "on":
        check_shareable_units(parts, model_shape(parts).layers, config.pp_size)
    mesh, watchdog = shared_mesh(config, device), join_launch(config)
    if config.pp_size == 1:
        make_engine = functools.partial(SequenceParallelEngine, mesh=mesh, watchdog=watchdog)
        return convert(model, config, observer=observer, make_engine=make_engine)
    may_share = _may_share_units(parts, config, mesh)
    if may_share:
        with watchdog.collective_section("forming sets"):
            mesh = _mesh_with_unit_groups(mesh, config.pp_timeout_seconds)
    staged = staged_model(parts, config, mesh.pp_rank, borrows_stages=may_share)
    make_engine = functools.partial(PipelineEngine, staged=staged, mesh=mesh, watchdog=watchdog)
    return convert(model, config, observer=observer, make_engine=make_engine)


@functools.cache
def _mesh_with_unit_groups(mesh: PipelineMesh, timeout_seconds: int) -> PipelineMesh:
    return with_unit_groups(mesh, timeout_seconds=timeout_seconds + GROUP_MARGIN_SECONDS)


def _may_share_units(parts: ModelParts, config: SPPOConfig, mesh: PipelineMesh) -> bool:
    """Whether ranks may share units, so that each keeps the layers of all stages; a collective."""
    loaded = staged_model_of(parts.causal_lm)
    if config.pp_msp == "on" and loaded is not None and not loaded.borrows_stages:
        raise ConfigError(
            f"pp_msp='on' lets every rank run units of all stages, but {parts.name} was loaded "
            "stage by stage for other settings. Allowed: a model that is whole when it is "
            "converted. Remedy: load it with from_pretrained, or by a plugin that has pp_msp='on'."
        )
    if loaded is not None or config.pp_msp != "auto":
        return config.pp_msp != "off" and (loaded is None or loaded.borrows_stages)
    if config.pp_schedule != "auto" or config.sp_size > 1 or config.pp_size == 1:
        return False
    possible = device_facts(mesh.device, config).profile is not None
    try:
        check_shareable_units(parts, model_shape(parts).layers, config.pp_size)
    except (ConfigError, UnsupportedModelError):
        possible = False
    return all_true(possible, mesh.control_group, mesh.replica_control_group)


def staged_model(
    parts: ModelParts, config: SPPOConfig, pp_rank: int, *, borrows_stages: bool = False
) -> StagedModel:
    """Return the stages of a rank: as they were loaded, or cut out of `parts` in place now.

    Raises:
        ConfigError: There are more stages than layers, or the model was cut for another rank or
            other settings.
        UnsupportedModelError: The model cannot be cut, or layers share weights that train.
    """
    staged = staged_model_of(parts.causal_lm)
    if staged is None:
        return StagedModel(parts, choose_cut(parts, config, pp_rank), borrows_stages=borrows_stages)
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
    staged.note_adapters()
    return staged


def load_model_stages(
    model_class: Any, name_or_path: str | PathLike[str], config: SPPOConfig, **kwargs: Any
) -> PreTrainedModel:
    """Load this rank's stages of a model, for settings with `pp_size` above 1; see `load_stages`.

    With pp_msp="on" all of it, because ranks run units of all stages.

    Raises:
        ConfigError: There is no launch, or its size, the settings, an argument or the checkpoint
            does not fit.
        UnsupportedModelError: The model cannot be cut.
    """
    join_launch(config)
    if config.pp_msp == "on":  # ranks run units of all stages
        return model_class.from_pretrained(name_or_path, **kwargs)
    pp_rank = dist.get_rank() // config.sp_size % config.pp_size
    return load_stages(
        model_class, name_or_path, lambda parts: choose_cut(parts, config, pp_rank), **kwargs
    )
