"""What an Accelerator does differently once an SPPOPlugin is attached: it converts models.

An existing instance is turned into an `SPPOAccelerator` by assigning its class, so that neither a
global patch nor a Trainer subclass is needed. This file knows nothing of the Trainer except that it
switches activation checkpointing on in the model, which the engine must own alone.

Ranks of one pipeline get the same batches and hold different parameters, which neither DDP's nor
tensor parallelism's paths of Accelerate expect; so loaders, optimizers, norms and scalers are
treated here. In `save_state` and `load_state` of a pipeline run, models and optimizers are written
and read by `sppo_hf.pipeline`; schedulers, samplers, counters and registered objects stay
Accelerate's business. Of these, Accelerate unpickles the registered objects
(`register_for_checkpointing`), which may run code; nothing else does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import (
    extract_model_from_parallel,
    gather_object,
    is_compiled_module,
    recursively_apply,
)
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import RandomSampler
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from sppo_hf.engine.convert import check_convertible, convert, get_engine
from sppo_hf.engine.device_facts import bind_to_device
from sppo_hf.engine.engine import Engine, host_resident_predicate
from sppo_hf.engine.structure import disable_gradient_checkpointing
from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.integrations.checkpoints import (
    is_cut,
    load_pipeline_state,
    refuse_partial_save,
    save_pipeline_state,
)
from sppo_hf.integrations.validation import (
    COMPILED_PARTS,
    refuse_device_optimizer,
    states_bytes,
    use_fused_kernel,
    why_on_device,
)
from sppo_hf.pipeline.agreement import make_on_first_rank
from sppo_hf.pipeline.checkpoint import gather_weights, save_weights
from sppo_hf.pipeline.convert import convert_to_shared_sequences, convert_to_stages, shared_mesh
from sppo_hf.pipeline.mesh import PipelineMesh
from sppo_hf.pipeline.pipeline_engine import PipelineEngine
from sppo_hf.pipeline.watchdog import collective_section

if TYPE_CHECKING:
    from sppo_hf.integrations.plugin import SPPOPlugin

logger = logging.getLogger(__name__)


def prepare_loader(accelerator: Accelerator, mesh: PipelineMesh, loader: Any, place: Any) -> Any:
    """Prepare a data loader so that ranks that share batches get the same rows, replicas others.

    `place` says whether to put batches on the device; None for the Accelerator's own setting.

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
        with collective_section("reading a batch"):
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
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        sampler.generator = torch.Generator().manual_seed(make_on_first_rank(mesh, lambda: seed))


def keep_own_parameters(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> None:
    """Take parameters of other stages out of an optimizer that was made before models were cut.

    The groups stay.
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

    A frozen reference model may be among them: `parameters` pick the model that they belong to; the
    last one where they belong to none.
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
    """Norm of the gradients of all stages together; tied weights count once, shape `[]`.

    `norm_type` is 2, another p, or infinity.
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
        both, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=mesh.pp_group
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
    shared.sppo_group = mesh.pp_group


def only_tensors(nest: Any) -> bool:
    """Whether a nest of lists, tuples and dicts holds tensors alone."""
    try:
        recursively_apply(lambda x: x, nest, error_on_other_type=True)
    except TypeError:
        return False
    return True


def once_per_pipeline(mesh: PipelineMesh, gathered: Any) -> Any:
    """Of what was gathered from all ranks, keep one's part of those that share batches.

    That is tensors `[ranks * n, ...]`, or a nest of them; or lists of `ranks * n` objects.
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


_left_alone: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models of which it was said that they are not converted."""


class SPPOAccelerator(Accelerator):
    """An Accelerator whose models train chunk by chunk; everything else is Accelerate's.

    Never constructed: `attach` gives this class to an Accelerator that exists.
    """

    sppo_plugin: SPPOPlugin
    _gathers_metrics = False

    @property
    def _in_pipeline(self) -> bool:
        return self.sppo_plugin.config.pp_size > 1

    @property
    def _shares_batches(self) -> bool:
        return self.sppo_plugin.config.sharing_ranks > 1

    @property
    def _mesh(self) -> PipelineMesh:
        config = self.sppo_plugin.config
        seconds = config.pp_timeout_seconds
        return shared_mesh(config.pp_size, self.device, seconds, config.sp_size)

    @collective_section("preparing")
    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Convert every model among the arguments, then prepare as always.

        FSDP2 shards inside `prepare` without calling `prepare_model`, so conversion starts here.
        """
        modules = [module for module in args if isinstance(module, nn.Module)]
        for module in modules:
            frozen = not any(parameter.requires_grad for parameter in module.parameters())
            convert_once(module, self.sppo_plugin, self.device, evaluated=frozen)
        if self._in_pipeline:
            for optimizer in (arg for arg in args if isinstance(arg, torch.optim.Optimizer)):
                keep_own_parameters(optimizer, [*modules, *self._models])
            agree_on_infinities(self.scaler, self._mesh)
        else:
            # Before the models are placed, which depends on it.
            for optimizer in (arg for arg in args if isinstance(arg, torch.optim.Optimizer)):
                self._offer_host(optimizer, modules)
        return super().prepare(*args, **kwargs)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Convert the model, for training and for evaluation, before it is wrapped.

        One that is only evaluated (a reward model, a teacher) need not be convertible.
        """
        frozen = not any(parameter.requires_grad for parameter in model.parameters())
        convert_once(model, self.sppo_plugin, self.device, evaluated=evaluation_mode or frozen)
        engine = engine_of([model])
        if engine is not None:
            engine.syncs_gradients = lambda: self.sync_gradients
            engine.loss_scaler = self.scaler
        converted = _engine_inside(model)
        if converted is not None and engine is None:
            converted.place_weights(self.device)
            converted.move_to_host_if_too_large(self.device)
            if converted.weights is not None:
                # What rests on the host would be moved to the device with all else.
                device_placement = False
        # A pipeline reduces gradients by itself; DDP, which evaluation goes without, would average
        # those of different stages.
        evaluation_mode = evaluation_mode or engine is not None
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer; one of weights that rest on the host works there."""
        config = self.sppo_plugin.config
        rests = host_resident_predicate(config) is not None
        is_open = "auto" in (config.weights, config.optimizer) and not self._shares_batches
        done = getattr(optimizer, "_is_accelerate_prepared", False)
        if done or not (rests or is_open):
            return super().prepare_optimizer(optimizer, device_placement)
        if rests:
            refuse_device_optimizer(optimizer)
        self._offer_host(optimizer, self._models)
        optimizer.register_step_pre_hook(self._begin_update)
        optimizer.register_step_post_hook(lambda *_: self._each_engine(Engine.end_update))
        if any(engine.weights is not None for engine in self._engines(self._models)):
            device_placement = False
        return super().prepare_optimizer(optimizer, device_placement)

    def _offer_host(self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> None:
        """Tell the engine whose weights an optimizer updates what it keeps, and where it works."""
        if isinstance(optimizer, AcceleratedOptimizer):  # prepared before, perhaps without a model
            optimizer = optimizer.optimizer
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for engine in self._engines(models):
            if any(id(p) in held for p in engine.parts.causal_lm.parameters()):
                why_not = why_on_device(self, optimizer)
                engine.register_optimizer(optimizer, states_bytes(optimizer), why_not)

    def _begin_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._each_engine(Engine.begin_update)
        if any(engine.weights is not None for engine in self._engines(self._models)):
            use_fused_kernel(optimizer)

    @staticmethod
    def _engines(models: Sequence[nn.Module]) -> Iterator[Engine]:
        found = (_engine_inside(model) for model in models)
        yield from (engine for engine in found if engine is not None)

    def _each_engine(self, act: Callable[[Engine], None]) -> None:
        for engine in self._engines(self._models):
            act(engine)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare a data loader; ranks that share batches get the same ones."""
        prepared = getattr(data_loader, "_is_accelerate_prepared", False)
        if prepared or not self._shares_batches:
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        loader = prepare_loader(self, self._mesh, data_loader, device_placement)
        self._dataloaders.append(loader)
        return loader

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward; where ranks share a sequence, they exchange tokens in it."""
        # A pipeline's backward says more itself.
        with contextlib.nullcontext() if self._in_pipeline else collective_section("in backward"):
            super().backward(loss, **kwargs)

    @collective_section("clipping gradients")
    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: Any = 2) -> Any:
        """Clip by the norm of all gradients; in a pipeline that is over all its stages.

        Returns:
            The norm before clipping, shape `[]`.
        """
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        engine = engine_of(self._models, parameters) if self._in_pipeline else None
        if engine is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self.unscale_gradients()
        norm = total_norm(engine, parameters, float(norm_type))
        clip_to(parameters, norm, max_norm)
        return norm

    @collective_section()
    def gather(self, tensor: Any) -> Any:
        """Gather over all ranks; while metrics are gathered, one's of those that share batches."""
        gathered = super().gather(tensor)
        return once_per_pipeline(self._mesh, gathered) if self._gathers_metrics else gathered

    @collective_section("gathering metrics")
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather for metrics: every row of the dataset once, also where ranks share batches."""
        if not self._shares_batches:
            return super().gather_for_metrics(input_data, use_gather_object)
        if use_gather_object or not only_tensors(input_data):
            return self._gather_objects(input_data)
        self._gathers_metrics = True
        try:
            return super().gather_for_metrics(input_data)
        finally:
            self._gathers_metrics = False

    def _gather_objects(self, objects: Any) -> list[Any]:
        """As Accelerate does with objects, but every row of the dataset once."""
        gathered = once_per_pipeline(self._mesh, gather_object(objects))
        remainder = self.gradient_state.remainder
        last = self.gradient_state.end_of_dataloader and remainder > 0
        return gathered[:remainder] if last else gathered

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
        """Save weights; a pipeline's as a whole Hugging Face folder, by every process."""
        if is_cut(inner := self.unwrap_model(model)):
            save_weights(inner, save_directory, max_shard_size=max_shard_size)
        else:
            super().save_model(model, save_directory, max_shard_size, **kwargs)

    @collective_section("gathering the weights")
    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return the weights; a pipeline's on the first rank, and nothing on all others."""
        if is_cut(inner := self.unwrap_model(model)):
            return gather_weights(inner)
        return super().get_state_dict(model, unwrap)

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
        """Take off Accelerate's wrappers and leave the conversion in place.

        Accelerate finds a model's own forward by following `__wrapped__` to its end, which would
        go through ours too; so its mixed-precision wrapper is taken off here.
        """
        inner = super().unwrap_model(model, True, keep_torch_compile)
        return inner if keep_fp32_wrapper else without_mixed_precision_wrapper(inner)


def attach(accelerator: Accelerator, plugin: SPPOPlugin) -> None:
    """Turn an Accelerator, of any subclass, into an `SPPOAccelerator`; again is fine.

    From here on the process runs on the processors next to its GPU, where what it pins will lie.

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
        accelerator.__class__ = _class_for(type(accelerator))
    cast(SPPOAccelerator, accelerator).sppo_plugin = plugin
    if bind_to_device(accelerator.device) is not None:
        logger.info("bound to the processors next to %s", accelerator.device)


@functools.cache
def _class_for(kind: type[Accelerator]) -> type[SPPOAccelerator]:
    """Return the class that adds SPPO to `kind` and keeps whatever `kind` overrides."""
    if kind is Accelerator:
        return SPPOAccelerator
    return type(f"SPPO{kind.__name__}", (SPPOAccelerator, kind), {"__module__": kind.__module__})


def convert_once(
    model: nn.Module,
    plugin: SPPOPlugin,
    device: torch.device | None = None,
    *,
    evaluated: bool = False,
) -> None:
    """Convert a model unless that was done, and take recomputation over from it.

    A module that holds no Transformers model at all (a loss, a value head) is none of our business
    and is left alone; so is a model that is only evaluated, where it could not be converted. A
    pipeline runs on `device`; where the model is, by default.

    Raises:
        ConfigError: The model is compiled, or was converted with other settings.
        UnsupportedModelError: The model cannot be run chunk by chunk exactly.
    """
    reason = _obstacle(model) if evaluated else None
    if reason is not None:
        # Accelerate prepares a model by two methods, one of which calls the other.
        if model not in _left_alone:
            _left_alone.add(model)
            logger.warning(
                "SPPO leaves %s alone, which is only evaluated: %s", type(model).__name__, reason
            )
        return
    _refuse_compiled(model)
    model = extract_model_from_parallel(model)
    if not any(isinstance(module, PreTrainedModel) for module in model.modules()):
        logger.info("SPPO leaves %s alone: no Transformers model is in it", type(model).__name__)
        return
    disable_gradient_checkpointing(model)
    engine = get_engine(model)
    if engine is None:
        if plugin.config.pp_size > 1:
            convert_to_stages(model, plugin.config, device=device, observer=plugin.observer)
            refuse_partial_save(model)
        elif plugin.config.sp_size > 1:
            convert_to_shared_sequences(
                model, plugin.config, device=device, observer=plugin.observer
            )
        else:
            convert(model, plugin.config, observer=plugin.observer)
        return
    if engine.config != plugin.config:
        differ = ", ".join(
            f"{field.name}={getattr(engine.config, field.name)!r} "
            f"(now {getattr(plugin.config, field.name)!r})"
            for field in dataclasses.fields(engine.config)
            if getattr(engine.config, field.name) != getattr(plugin.config, field.name)
        )
        raise ConfigError(
            f"{type(model).__name__} was converted with {differ}, so another SPPOPlugin cannot be "
            "attached to it as well. Allowed: one set of settings per model. Remedy: revert the "
            "model first, or use the plugin that converted it."
        )
    engine.observer = plugin.observer


def _engine_inside(model: nn.Module) -> Engine | None:
    """The engine of what is prepared or was; None where nothing in it is converted."""
    return get_engine(extract_model_from_parallel(model))


def _obstacle(model: nn.Module) -> str | None:
    """Why a model with a Transformers model in it cannot be converted, in one sentence, or None."""
    if _compiled_part(model) is not None:
        return "it is compiled"
    model = extract_model_from_parallel(model)
    if not any(isinstance(module, PreTrainedModel) for module in model.modules()):
        return None
    try:
        check_convertible(model)
    except UnsupportedModelError as error:
        return str(error).split(". ")[0]
    return None


def _compiled_part(model: nn.Module) -> nn.Module | None:
    """What torch.compile has hidden from the engine: the layers, or what calls them."""
    for module in model.modules():
        # The second is what `module.compile()` leaves, in place.
        compiled = is_compiled_module(module) or module._compiled_call_impl is not None
        if compiled and any(isinstance(m, GradientCheckpointingLayer) for m in module.modules()):
            return module
    return None


def _refuse_compiled(model: nn.Module) -> None:
    part = _compiled_part(model)
    if part is not None:
        raise ConfigError(
            f"{type(part).__name__} is compiled, which SPPO cannot look into. Allowed: "
            "uncompiled models, and compiled parts without attention. Remedy: drop "
            f"torch.compile; instead, {COMPILED_PARTS}."
        )


def without_mixed_precision_wrapper(model: nn.Module) -> nn.Module:
    """Take off the autocast wrapper that `Accelerator.prepare_model` put around `forward`.

    The model is without distributed wrappers; it is returned.
    """
    # Accelerate leaves the forward that it wrapped in this attribute.
    forward = model.__dict__.pop("_original_forward", None)
    if forward is not None:
        model.forward = forward
        if getattr(forward, "__func__", None) is type(model).forward:
            del model.forward
    return model
