"""SPPOAccelerator: an Accelerator that converts the models it prepares.

`attach` turns an existing Accelerator into one by assigning its class, so neither a global patch
nor a Trainer subclass is needed. Everything that is not overridden here stays Accelerate's.

[Note: what Accelerate assumes]
Accelerate knows two kinds of parallel ranks: those with the same parameters and different rows
(DDP, FSDP), and those of tensor parallelism. Ranks of a pipeline have the same rows and different
parameters. So data loaders, schedules, optimizers, gradient norms, gradient scalers, gathered
metrics and checkpoints are handled here for them; the ranks that share sequences (`sp_size`) need
this of the data loaders, schedules and metrics only.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import (
    extract_model_from_parallel,
    gather_object,
    recursively_apply,
)
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import RandomSampler
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from sppo_hf.engine.convert import check_convertible, convert, get_engine, keep_forward
from sppo_hf.engine.device_facts import bind_to_device
from sppo_hf.engine.engine import Engine
from sppo_hf.engine.model_parts import disable_gradient_checkpointing, is_compiled
from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.integrations.checkpoints import (
    is_cut,
    load_pipeline_state,
    refuse_partial_save,
    save_pipeline_state,
)
from sppo_hf.integrations.validation import COMPILE_REMEDY
from sppo_hf.pipeline.agreement import make_on_first_rank
from sppo_hf.pipeline.checkpoint import gather_weights, save_weights
from sppo_hf.pipeline.convert import convert_over_ranks, shared_mesh
from sppo_hf.pipeline.mesh import PipelineMesh
from sppo_hf.pipeline.pipeline_engine import PipelineEngine
from sppo_hf.pipeline.sequence_parallel import ReplicaEngine
from sppo_hf.pipeline.watchdog import collective_section

if TYPE_CHECKING:
    from sppo_hf.integrations.plugin import SPPOPlugin

logger = logging.getLogger(__name__)

_skipped_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models for which it was logged that they are not converted."""


class SPPOAccelerator(Accelerator):
    """An Accelerator whose models train chunk by chunk.

    Never constructed: `attach` gives this class to an existing Accelerator.

    Some overrides only wrap Accelerate's method in a `collective_section`: all ranks wait for each
    other there, so the watchdog must know what this rank is doing when another one is lost.
    """

    sppo_plugin: SPPOPlugin
    _gathers_metrics = False
    """Whether `gather` runs inside `gather_for_metrics`."""

    @property
    def _in_pipeline(self) -> bool:
        return self.sppo_plugin.config.pp_size > 1

    @property
    def _shares_batches(self) -> bool:
        return self.sppo_plugin.config.sharing_ranks > 1

    @property
    def _mesh(self) -> PipelineMesh:
        return shared_mesh(self.sppo_plugin.config, self.device)

    # -- models and optimizers ---------------------------------------------------------------

    @collective_section("preparing")
    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Convert all models before anything is prepared.

        Overridden beside `prepare_model` because FSDP2 shards models inside `prepare`, without
        calling that, and because optimizers must know their models' engines before models are
        placed.
        """
        models = [arg for arg in args if isinstance(arg, nn.Module)]
        optimizers = [arg for arg in args if isinstance(arg, torch.optim.Optimizer)]
        for model in models:
            self._convert(model)
        if self._in_pipeline:
            for optimizer in optimizers:
                keep_own_parameters(optimizer, [*models, *self._models])
            share_infinity_checks(self.scaler, self._mesh)
        else:
            for optimizer in optimizers:
                self._announce_optimizer(optimizer, models)
        return super().prepare(*args, **kwargs)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Convert the model before it is wrapped, and put its weights where the plan has them."""
        self._convert(model, evaluation_mode)
        engine = get_engine(extract_model_from_parallel(model))
        if isinstance(engine, PipelineEngine):
            engine.syncs_gradients = lambda: self.sync_gradients
            engine.loss_gradient.scaler = self.scaler
            # Without DDP, which would average the gradients of different stages: the pipeline
            # reduces gradients over replicas itself. Accelerate wraps no model in evaluation mode.
            evaluation_mode = True
        elif engine is not None:
            engine.placement.place(self.device)
            engine.placement.move_to_host_if_too_large(self.device)
            if engine.weights is not None:
                device_placement = False  # it would move weights from the host to the device
        return super().prepare_model(model, device_placement, evaluation_mode)

    def _convert(self, model: nn.Module, evaluation_mode: bool = False) -> None:
        frozen = not any(parameter.requires_grad for parameter in model.parameters())
        for_evaluation = evaluation_mode or frozen
        convert_once(model, self.sppo_plugin, self.device, for_evaluation=for_evaluation)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer; where its weights are on the host, its step runs there."""
        config = self.sppo_plugin.config
        on_host = any(config.host_resident)
        undecided = "auto" in (config.weights, config.optimizer) and not self._shares_batches
        is_prepared = getattr(optimizer, "_is_accelerate_prepared", False)
        if is_prepared or not (on_host or undecided):
            return super().prepare_optimizer(optimizer, device_placement)
        if on_host:
            check_host_optimizer(optimizer)
        self._announce_optimizer(optimizer, self._models)
        optimizer.register_step_pre_hook(self._before_update)
        optimizer.register_step_post_hook(self._after_update)
        if self._weights_are_managed():
            device_placement = False
        return super().prepare_optimizer(optimizer, device_placement)

    def _announce_optimizer(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
    ) -> None:
        """Tell the engine of the model that an optimizer updates what it keeps and where it works.

        With settings left at "auto" the engine then decides where weights and optimizer are.
        """
        if isinstance(optimizer, AcceleratedOptimizer):  # prepared before, perhaps without a model
            optimizer = optimizer.optimizer
        parameter_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameter_ids.update(map(id, _layerwise_parameters(optimizer)))
        for engine in engines_of(models):
            if any(id(p) in parameter_ids for p in engine.parts.causal_lm.parameters()):
                reason = reason_against_host(self, optimizer)
                engine.placement.register_optimizer(
                    optimizer, optimizer_state_bytes(optimizer), reason
                )

    def _weights_are_managed(self) -> bool:
        """Whether an engine moves weights between host and device."""
        return any(engine.weights is not None for engine in engines_of(self._models))

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for engine in engines_of(self._models):
            engine.placement.begin_update()
        if self._weights_are_managed():
            use_fused_kernel(optimizer)

    def _after_update(self, *_: object) -> None:
        for engine in engines_of(self._models):
            engine.placement.end_update()

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a learning rate scheduler; it steps for each replica, not for each process."""
        prepared: Any = super().prepare_scheduler(scheduler)
        if self._shares_batches and not prepared.split_batches:
            prepared.replicas, prepared.split_batches = self._mesh.dp_size, True
            prepared.__class__ = ReplicaScheduler
        return prepared

    # -- data and gradients ------------------------------------------------------------------

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare a data loader; ranks that share batches get the same rows."""
        is_prepared = getattr(data_loader, "_is_accelerate_prepared", False)
        if is_prepared or not self._shares_batches:
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        loader = prepare_shared_loader(self, self._mesh, data_loader, device_placement)
        self._dataloaders.append(loader)
        return loader

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward, in which ranks that share a sequence exchange tokens."""
        # The executor of a pipeline tells the watchdog each action itself.
        in_pipeline = self._in_pipeline
        with contextlib.nullcontext() if in_pipeline else collective_section("in backward"):
            super().backward(loss, **kwargs)

    @collective_section("clipping gradients")
    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: Any = 2) -> Any:
        """Clip gradients by their norm, in a pipeline by the norm over all of its stages.

        Returns:
            The norm before clipping, shape `[]`.
        """
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        engine = pipeline_engine_of(self._models, parameters) if self._in_pipeline else None
        if engine is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self.unscale_gradients()
        norm = total_norm(engine, parameters, float(norm_type))
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    # -- metrics -----------------------------------------------------------------------------

    @collective_section()
    def gather(self, tensor: Any) -> Any:
        """Gather over all ranks; inside `gather_for_metrics` once per batch that ranks share."""
        gathered = super().gather(tensor)
        return keep_one_per_batch(self._mesh, gathered) if self._gathers_metrics else gathered

    @collective_section("gathering metrics")
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather for metrics: every row of the dataset once, also where ranks share batches."""
        if not self._shares_batches:
            return super().gather_for_metrics(input_data, use_gather_object)
        if use_gather_object or not _holds_only_tensors(input_data):
            gathered = gather_objects(self._mesh, input_data)
            # As Accelerate does: the last batch may have been filled up with rows of the first.
            remainder = self.gradient_state.remainder
            is_filled_up = self.gradient_state.end_of_dataloader and remainder > 0
            return gathered[:remainder] if is_filled_up else gathered
        self._gathers_metrics = True
        try:
            return super().gather_for_metrics(input_data)
        finally:
            self._gathers_metrics = False

    # -- checkpoints -------------------------------------------------------------------------

    @collective_section("saving the state")
    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save everything; in a pipeline every process calls this and writes what it holds."""
        if not self._in_pipeline:
            return super().save_state(*args, **kwargs)
        return save_pipeline_state(self, super().save_state, *args, **kwargs)

    @collective_section("loading the state")
    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load everything; in a pipeline every process reads what it holds."""
        if self._in_pipeline:
            load_pipeline_state(self, super().load_state, input_dir, *args, **kwargs)
        else:
            super().load_state(input_dir, *args, **kwargs)

    @collective_section("saving the model")
    def save_model(
        self, model: nn.Module, save_directory: Any, max_shard_size: Any = "10GB", **kwargs: Any
    ) -> None:
        """Save weights; all processes write a pipeline's, as one ordinary Hugging Face folder."""
        if is_cut(inner := self.unwrap_model(model)):
            save_weights(inner, save_directory, max_shard_size=max_shard_size)
        else:
            super().save_model(model, save_directory, max_shard_size, **kwargs)

    @collective_section("gathering the weights")
    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return the weights; a pipeline's on the first rank, and nothing on the others."""
        if is_cut(inner := self.unwrap_model(model)):
            return gather_weights(inner)
        return super().get_state_dict(model, unwrap)

    # -- others ------------------------------------------------------------------------------

    @collective_section()
    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Reduce over all ranks."""
        return super().reduce(*args, **kwargs)

    @collective_section("waiting for all ranks")
    def wait_for_everyone(self) -> None:
        """Wait for all ranks."""
        super().wait_for_everyone()

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Take off Accelerate's wrappers, but not the conversion.

        Accelerate finds a model's original forward by following `__wrapped__` to its end, which
        would go through the converted forward too; so its mixed-precision wrapper is taken off
        here.
        """
        inner = super().unwrap_model(model, True, keep_torch_compile)
        return inner if keep_fp32_wrapper else remove_mixed_precision_wrapper(inner)


# -- attaching and converting ----------------------------------------------------------------


def attach(accelerator: Accelerator, plugin: SPPOPlugin) -> None:
    """Turn an Accelerator, of any subclass, into an `SPPOAccelerator`; does nothing if it is one.

    From here on the process runs on the processors next to its GPU, so that host memory which it
    pins is next to the GPU too.

    Raises:
        ConfigError: Another plugin is attached to this Accelerator.
    """
    attached: SPPOPlugin | None = getattr(accelerator, "sppo_plugin", None)
    if attached is not None and attached is not plugin and attached != plugin:
        raise ConfigError(
            f"{attached!r} is attached to this Accelerator, so {plugin!r} cannot be. Allowed: one "
            "plugin per Accelerator. Remedy: make a new Accelerator."
        )
    if not isinstance(accelerator, SPPOAccelerator):
        accelerator.__class__ = _sppo_subclass(type(accelerator))
    cast(SPPOAccelerator, accelerator).sppo_plugin = plugin
    if bind_to_device(accelerator.device) is not None:
        logger.info("bound to the processors next to %s", accelerator.device)


@functools.cache
def _sppo_subclass(kind: type[Accelerator]) -> type[SPPOAccelerator]:
    """Return the class that adds SPPO to `kind` and keeps whatever `kind` overrides."""
    if kind is Accelerator:
        return SPPOAccelerator
    return type(f"SPPO{kind.__name__}", (SPPOAccelerator, kind), {"__module__": kind.__module__})


def convert_once(
    model: nn.Module,
    plugin: SPPOPlugin,
    device: torch.device | None = None,
    *,
    for_evaluation: bool = False,
) -> None:
    """Convert a model unless it is converted, and switch its own activation checkpointing off.

    Left alone are modules without a Transformers model in them (a loss, a value head), and models
    that are only evaluated (a reward model, a teacher) and cannot be converted.

    Args:
        model: Bare, or wrapped by PEFT or an Accelerator.
        plugin: Settings, and the observer that the engine reports to.
        device: Device of ranks that share batches; by default where the model is.
        for_evaluation: Whether the model is never trained.

    Raises:
        ConfigError: The model is compiled, or was converted with other settings.
        UnsupportedModelError: The model cannot be run chunk by chunk exactly.
    """
    obstacle = _find_obstacle(model) if for_evaluation else None
    if obstacle is not None:
        if model not in _skipped_models:  # logged once, though `prepare` calls `prepare_model`
            _skipped_models.add(model)
            logger.warning(
                "SPPO leaves %s alone, which is only evaluated: %s", type(model).__name__, obstacle
            )
        return
    compiled = _compiled_layers(model)
    if compiled is not None:
        raise ConfigError(
            f"{type(compiled).__name__} is compiled, which SPPO cannot look into. Allowed: "
            "uncompiled models, and compiled parts without attention. Remedy: drop "
            f"torch.compile; instead, {COMPILE_REMEDY}."
        )
    model = extract_model_from_parallel(model)
    if not _has_transformers_model(model):
        logger.info("SPPO leaves %s alone: no Transformers model is in it", type(model).__name__)
        return
    disable_gradient_checkpointing(model)
    engine, config, observer = get_engine(model), plugin.config, plugin.observer
    if engine is not None and engine.enabled:
        _check_same_settings(model, engine, plugin)
        engine.report_to(observer)
        keep_forward(model)
    elif config.sharing_ranks > 1:
        convert_over_ranks(model, config, device=device, observer=observer)
        if config.pp_size > 1:
            refuse_partial_save(model)
    else:
        convert(model, config, observer=observer, make_engine=ReplicaEngine)


def _check_same_settings(model: nn.Module, engine: Engine, plugin: SPPOPlugin) -> None:
    """Refuse a second plugin with other settings for a converted model."""
    if engine.config == plugin.config:
        return
    before, now = engine.config, plugin.config
    values = ((f.name, getattr(before, f.name), getattr(now, f.name)) for f in fields(before))
    changes = ", ".join(f"{name}={old!r} (now {new!r})" for name, old, new in values if old != new)
    raise ConfigError(
        f"{type(model).__name__} was converted with {changes}, so another SPPOPlugin cannot be "
        "attached to it as well. Allowed: one set of settings per model. Remedy: revert the "
        "model first, or use the plugin that converted it."
    )


def _find_obstacle(model: nn.Module) -> str | None:
    """Return in one sentence why a Transformers model cannot be converted; None if it can."""
    if _compiled_layers(model) is not None:
        return "it is compiled"
    model = extract_model_from_parallel(model)
    if not _has_transformers_model(model):
        return None
    try:
        check_convertible(model)
    except UnsupportedModelError as error:
        return str(error).split(". ")[0]
    return None


def _has_transformers_model(model: nn.Module) -> bool:
    return any(isinstance(module, PreTrainedModel) for module in model.modules())


def _compiled_layers(model: nn.Module) -> nn.Module | None:
    """Return a compiled module that holds decoder layers, whose hooks would not run; else None."""
    for module in model.modules():
        layers = (isinstance(m, GradientCheckpointingLayer) for m in module.modules())
        if is_compiled(module) and any(layers):
            return module
    return None


def engines_of(models: Iterable[nn.Module]) -> Iterator[Engine]:
    """Yield the engines of those models that are converted; wrapped models are looked into."""
    for model in models:
        engine = get_engine(model)
        if engine is not None:
            yield engine


def remove_mixed_precision_wrapper(model: nn.Module) -> nn.Module:
    """Take off the autocast wrapper that `Accelerator.prepare_model` put around `forward`.

    The model is one without distributed wrappers, and is returned.
    """
    # Accelerate keeps the forward that it wrapped in this attribute.
    forward = model.__dict__.pop("_original_forward", None)
    if forward is not None:
        model.forward = forward
        if getattr(forward, "__func__", None) is type(model).forward:
            del model.forward
    return model


# -- ranks that share batches ----------------------------------------------------------------


def prepare_shared_loader(
    accelerator: Accelerator, mesh: PipelineMesh, loader: Any, device_placement: bool | None
) -> Any:
    """Prepare a data loader: the same rows for ranks that share batches, others for replicas.

    The Accelerator's settings hold, that of `device_placement` only where None is given.

    Raises:
        ConfigError: Rank 0 was to dispatch batches, each rank other rows.
    """
    if accelerator.dispatch_batches:
        raise ConfigError(
            "dispatch_batches=True hands every process other rows, but ranks that share batches "
            f"(pp_size={mesh.pp_size}, sp_size={mesh.sp_size}) need the same ones. Allowed: "
            "dispatch_batches=False or None. Remedy: drop dispatch_batches; every rank then reads "
            "the dataset itself."
        )
    if mesh.dp_size == 1:
        _share_shuffling(loader, mesh)
    rng_types: Any = accelerator.rng_types
    on_device = accelerator.device_placement if device_placement is None else device_placement
    prepared: Any = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=mesh.dp_size,
        process_index=mesh.dp_rank,
        split_batches=accelerator.split_batches,
        put_on_device=on_device,
        rng_types=None if rng_types is None else list(rng_types),
        dispatch_batches=False,
        even_batches=accelerator.even_batches,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed,
        non_blocking=accelerator.non_blocking,
        use_stateful_dataloader=accelerator.use_stateful_dataloader,
    )
    # Accelerate's loader calls `base_dataloader.__iter__()` by name, so the instance's is used.
    inner = prepared.base_dataloader
    inner.__iter__ = functools.partial(_report_reading, inner.__iter__)
    return prepared


def _report_reading(iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Iterate over a data loader, and have the watchdog know while this rank waits for a batch."""
    batches, ended = iterate(), object()
    while True:
        with collective_section("reading a batch"):
            batch = next(batches, ended)
        if batch is ended:
            return
        yield batch


def _share_shuffling(loader: Any, mesh: PipelineMesh) -> None:
    """Have all ranks that share batches shuffle alike, also where the script sets no seed.

    Accelerate does this for processes that divide a dataset among them, of which it sees one here.
    """
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        sampler.generator = torch.Generator().manual_seed(make_on_first_rank(mesh, lambda: seed))


class ReplicaScheduler(AcceleratedScheduler):
    """A scheduler that steps as often as there are replicas.

    Accelerate's steps once for every process, as if each had other rows: a script counts the
    batches of one process. It steps once where batches are split, of which this makes use.
    """

    replicas: int

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step once for each replica, if the optimizer stepped."""
        follows = self.step_with_optimizer and self.gradient_state.sync_gradients
        for _ in range(self.replicas if follows else 1):
            # As Accelerate: a schedule of so many steps may be over before the last batch.
            total_steps = getattr(self.scheduler, "total_steps", None)
            if total_steps is None or self.scheduler._step_count <= total_steps:
                super().step(*args, **kwargs)


def keep_own_parameters(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> None:
    """Remove other stages' parameters from an optimizer that was made before models were cut.

    Parameter groups stay, also those that become empty.
    """
    own = {id(p) for model in models for p in model.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in own:
                optimizer.state.pop(parameter, None)
        group["params"] = [p for p in group["params"] if id(p) in own]


def pipeline_engine_of(
    models: Iterable[nn.Module], parameters: Iterable[Tensor] | None = None
) -> PipelineEngine | None:
    """Return the engine of the prepared pipeline that `parameters` belong to.

    Several pipelines may be prepared, a frozen reference model for one. Without parameters the
    first counts; where they belong to none, the last.
    """
    wanted = None if parameters is None else {id(p) for p in parameters}
    found = None
    for model in models:
        engine = get_engine(model)
        if isinstance(engine, PipelineEngine):
            found = engine
            if wanted is None or any(id(p) in wanted for p in model.parameters()):
                break
    return found


@torch.no_grad()
def total_norm(
    engine: PipelineEngine, parameters: Sequence[nn.Parameter], norm_type: float
) -> Tensor:
    """Norm of the gradients of all stages together, shape `[]`; tied weights count once.

    Args:
        engine: Of the pipeline.
        parameters: Those of this rank.
        norm_type: 2, another p, or infinity.
    """
    mesh = engine.mesh
    # A tied weight is on the first and the last rank; the first one's copy counts.
    skipped = set() if mesh.is_first else {id(p) for p in engine.shared_parameters()}
    grads = [p.grad for p in parameters if p.grad is not None and id(p) not in skipped]
    is_double = any(g.dtype == torch.float64 for g in grads)
    dtype = torch.float64 if is_double else torch.float32
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=dtype) for g in grads]
    own_norms = torch.stack(norms).to(mesh.device) if norms else torch.zeros(1, device=mesh.device)
    own = torch.linalg.vector_norm(own_norms, norm_type).double()
    is_max_norm = math.isinf(norm_type)
    # The dtype is reduced too: a rank without gradients does not know it, and all ranks must return
    # the same norm, for any may log it.
    partial = own if is_max_norm else own**norm_type
    reduced = torch.stack([partial, own.new_tensor(float(is_double))])
    operation = dist.ReduceOp.MAX if is_max_norm else dist.ReduceOp.SUM
    dist.all_reduce(reduced, op=operation, group=mesh.pp_group)
    norm = reduced[0] if is_max_norm else reduced[0] ** (1.0 / norm_type)
    return norm if reduced[1] else norm.float()


class PipelineGradScaler(torch.amp.GradScaler):
    """A gradient scaler whose ranks agree on whether a gradient was infinite.

    Stages hold different gradients; if each decided by itself, some would step and others not.
    """

    sppo_group: Any

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = super()._unscale_grads_(*args, **kwargs)  # type: ignore[misc]
        if not found:  # a stage without gradients takes part in the reduction too
            found_inf: Tensor = kwargs["found_inf"] if "found_inf" in kwargs else args[2]
            found = {found_inf.device: found_inf}
        for found_inf in found.values():
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=self.sppo_group)
        return found


def share_infinity_checks(scaler: Any, mesh: PipelineMesh) -> None:
    """Turn an Accelerator's gradient scaler into a `PipelineGradScaler`, if it is not one."""
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
    shared.sppo_group = mesh.pp_group


def _holds_only_tensors(nest: Any) -> bool:
    """Whether all leaves of nested lists, tuples and dicts are tensors."""
    try:
        recursively_apply(lambda x: x, nest, error_on_other_type=True)
    except TypeError:
        return False
    return True


def keep_one_per_batch(mesh: PipelineMesh, gathered: Any) -> Any:
    """Keep one rank's part of each shared batch in values that were gathered from all ranks.

    Args:
        mesh: The ranks of this launch.
        gathered: Tensors `[ranks * n, ...]`, or nested lists, tuples or dicts of them.
    """
    sharing = len(mesh.sharing_ranks)
    num_parts = mesh.dp_size * sharing
    return recursively_apply(lambda x: torch.cat(x.chunk(num_parts)[::sharing]), gathered)


def gather_objects(mesh: PipelineMesh, objects: Any) -> Any:
    """Gather the objects of each replica in one list; of one replica they are returned as they are.

    Replicas may have different numbers of them, and they may be tensors of any shape.
    """
    if mesh.dp_size == 1:
        return objects
    by_rank = gather_object([list(objects)])
    return [x for part in by_rank[:: len(mesh.sharing_ranks)] for x in part]


# -- optimizers that update weights on the host ----------------------------------------------

_DEVICE_ONLY_MODULES = (
    "bitsandbytes",
    "apex",
    "torchao",
    "transformer_engine",
    "deepspeed.ops.adam.fused",
)
"""Modules whose optimizers have kernels for GPUs only."""

_STATES_PER_PARAMETER: dict[str, float] = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax"), 2.0),
    **{"Adagrad": 1.0, "Adafactor": 0.0},
}
"""Tensors of a parameter's size and dtype that torch's optimizers keep for it."""


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """Bytes of state that an optimizer keeps after its first step; None if that is not known."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return None
    total = 0.0
    for group in optimizer.param_groups:
        num_states = _STATES_PER_PARAMETER.get(kind.__name__)
        if kind.__name__ == "SGD":
            num_states = float(bool(group["momentum"]))
        if num_states is None:
            return None
        num_states += bool(group.get("amsgrad"))
        total += num_states * sum(parameter.nbytes for parameter in group["params"])
    return int(total)


def reason_against_host(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> str:
    """Why the weights that an optimizer updates cannot be on the host; "" where they can.

    For settings left at "auto". `check_host_placement` and `check_host_optimizer` refuse the same
    for "host", except optimizers whose state has an unknown size.
    """
    if accelerator.num_processes > 1:
        return f"{accelerator.num_processes} processes reduce gradients on their devices"
    if accelerator.mixed_precision == "fp16":
        return "the gradient scaler of mixed_precision='fp16' works on the device only"
    if reason := _reason_against_host_memory(optimizer):
        return reason
    if optimizer_state_bytes(optimizer) is None:
        return (
            f"it is not known what {_full_name(optimizer)} keeps (optimizer='host' puts it on the "
            "host)"
        )
    return ""


def check_host_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot work in host memory.

    Raises:
        ConfigError: Its kernels are for GPUs only, it was made with `capturable=True`, or it
            updates each weight during backward.
    """
    if reason := _reason_against_host_memory(optimizer):
        raise ConfigError(
            f"The optimizer cannot be on the host: {reason}. Allowed with optimizer='host': "
            "torch's optimizers (optim='adamw_torch_fused' is the fastest) and DeepSpeed's "
            "CPUAdam. Remedy: choose one of these, or optimizer='device' and weights='device'."
        )


def _reason_against_host_memory(optimizer: torch.optim.Optimizer) -> str:
    """Why an optimizer cannot work in host memory; "" where it can."""
    if any(group.get("capturable") for group in optimizer.param_groups):
        return "capturable=True works on a GPU only"
    name = _full_name(optimizer)
    if name.startswith(_DEVICE_ONLY_MODULES):
        return f"{name} works on a GPU only"
    if _layerwise_parameters(optimizer):
        return f"{name} stands for optimizers that update each weight during backward"
    return ""


def _layerwise_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The weights that hooks update during backward, for which the Trainer has a stand-in.

    Transformers makes it for GaLore and APOLLO by layer (`optim="galore_adamw_layerwise"`). Its own
    parameter groups hold a tensor of no model.
    """
    return list(getattr(optimizer, "optimizer_dict", None) or ())


def _full_name(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__name__}"


def use_fused_kernel(optimizer: torch.optim.Optimizer) -> None:
    """Let torch's Adam and AdamW update host memory with their fused kernel, if left open.

    It passes over memory once, where the default passes over each parameter about ten times. Other
    optimizers, DeepSpeed's CPUAdam among them, have a kernel of their own, or none.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        is_open = group.get("fused") is None and group.get("foreach") is None
        excluded = group.get("differentiable") or group.get("capturable")
        supported = all(p.device.type == "cpu" and p.is_floating_point() for p in group["params"])
        if is_open and supported and not excluded:
            group["fused"] = True
