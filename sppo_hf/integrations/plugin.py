"""SPPOPlugin: the one object a user hands to Transformers or Accelerate.

It is a `ParallelismConfig`, because that is what both of them take, keep, serialise and call back.
What an attached Accelerator does differently is in `accelerator.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import torch
from accelerate import ParallelismConfig, PartialState
from accelerate.utils import extract_model_from_parallel
from transformers import AutoModelForCausalLM

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import revert
from sppo_hf.engine.engine import host_resident_predicate
from sppo_hf.engine.step_observer import ObserverHub
from sppo_hf.errors import ConfigError
from sppo_hf.integrations.accelerator import attach, convert_once, without_mixed_precision_wrapper
from sppo_hf.integrations.callback import offer_callback
from sppo_hf.integrations.checkpoints import TrainerCheckpoints
from sppo_hf.integrations.evaluation import TrainerEvaluation
from sppo_hf.integrations.progress import ProgressReporter
from sppo_hf.integrations.trainer import TrainerStep, calling_trainer, tell_sharing_ranks
from sppo_hf.integrations.validation import (
    environment_sp_size,
    move_if_it_fits,
    refuse_accelerator,
    refuse_for_pipeline,
    refuse_for_shared_sequences,
    refuse_host_weights,
    refuse_sizes,
)
from sppo_hf.pipeline.convert import launch_watchdog, load_model_stages
from sppo_hf.pipeline.mesh import check_nodes, check_world
from sppo_hf.pipeline.watchdog import watch_launch_when_joined
from sppo_hf.planning.machine import connect_all_streams
from sppo_hf.rules import show

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn
    from transformers import PreTrainedModel

ModelT = TypeVar("ModelT", bound="nn.Module")

CONFIG_VARIABLE = "SPPO_CONFIG"
"""Environment variable that names a settings file."""

_OWN_FIELDS = frozenset(field.name for field in fields(ParallelismConfig))


class SPPOPlugin(ParallelismConfig):
    """Chunk-by-chunk training for a Trainer, an Accelerator or a bare model.

        TrainingArguments(..., parallelism_config=SPPOPlugin(num_chunks=8))
        Accelerator(parallelism_config=SPPOPlugin(num_chunks=8))
        model = SPPOPlugin(num_chunks=8).convert(model)

    The sizes of `ParallelismConfig` are taken too: `dp_shard_size` and `dp_replicate_size` shape
    FSDP2 and hybrid sharding. Left out, all processes replicate (DDP) or, under FSDP2, all shard.
    `sp_size` ranks share every sequence beside that: they are among those that replicate or shard.

    One plugin may serve several Trainers or Accelerators, one after the other or side by side.

    Args:
        config: Settings, as an `SPPOConfig` or a mapping of its fields.
        **settings: Fields of `SPPOConfig`, which take precedence over `config`, and sizes of
            `ParallelismConfig`.

    Raises:
        ConfigError: A setting is unknown or wrong, a size is no whole number above zero, or a
            tensor or context parallel size is above 1.
    """

    def __init__(
        self, config: SPPOConfig | Mapping[str, Any] | None = None, /, **settings: Any
    ) -> None:
        sizes = {name: settings.pop(name) for name in list(settings) if name in _OWN_FIELDS}
        base = config if isinstance(config, SPPOConfig) else SPPOConfig.from_dict(config or {})
        # Of both: to Accelerate it would mean that DeepSpeed shares sequences.
        sp_size = sizes.pop("sp_size", None)
        if sp_size is None and base.sp_size == 1:
            sp_size = environment_sp_size()
        if sp_size is not None:
            settings["sp_size"] = sp_size
        self.config = base.replace(**settings) if settings else base
        refuse_sizes(sizes)
        try:
            super().__init__(**sizes, sp_size=1)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"Accelerate's ParallelismConfig refuses {show(sizes)}: {error}. Allowed: "
                "dp_shard_size and dp_replicate_size. Remedy: drop its other fields."
            ) from error
        self._given_sizes = dict(self._sizes)
        self._make_observers()
        if not torch.cuda.is_initialized():  # which reads it once, at the first model's move
            connect_all_streams(os.environ)
        if self.config.sharing_ranks > 1:
            watch_launch_when_joined(self.config.pp_timeout_seconds)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> Self:
        """Make a plugin from a settings file.

        Raises:
            ConfigError: The file cannot be read or holds a wrong setting.
        """
        return cls(SPPOConfig.from_yaml(path))

    @classmethod
    def from_env(cls) -> Self:
        """Make a plugin from the settings file that the variable SPPO_CONFIG names.

        Raises:
            ConfigError: The variable is not set, or the file cannot be read or holds a wrong
                setting.
        """
        path = os.environ.get(CONFIG_VARIABLE)
        if not path:
            raise ConfigError(
                f"{CONFIG_VARIABLE} is {'not set' if path is None else 'empty'}, but must name a "
                f"settings file. Remedy: export {CONFIG_VARIABLE}=sppo.yaml, or call "
                "SPPOPlugin.from_yaml(path)."
            )
        try:
            return cls.from_yaml(path)
        except ConfigError as error:
            raise ConfigError(f"{CONFIG_VARIABLE}={path[:200]}: {error}") from error

    def convert(self, model: ModelT) -> ModelT:
        """Make a model train chunk by chunk, in place.

        Args:
            model: A causal language model of Transformers, bare or wrapped by PEFT.

        Returns:
            The same model.

        Raises:
            UnsupportedModelError: The model cannot be run chunk by chunk exactly.
            ConfigError: The model was converted before, with other settings.
        """
        # Groups of a launch on GPUs talk only there, and the model may not be there yet.
        device = PartialState().device if self.config.sharing_ranks > 1 else None
        convert_once(model, self, device)
        return model

    def load_model(
        self,
        name_or_path: str | os.PathLike[str],
        *,
        model_class: Any = AutoModelForCausalLM,
        **kwargs: Any,
    ) -> PreTrainedModel:
        """Load a model to train with this plugin: with `pp_size` above 1, this rank's stages alone.

        With pp_size=1 it is `model_class.from_pretrained(name_or_path, **kwargs)`. In a pipeline,
        every rank reads its own tensors and no others, and keeps them on the CPU (or on the one
        device that `device_map` names). What comes back has the class, and its parameters the
        names, that they always have. Give it to PEFT's `get_peft_model`, then to the Trainer, the
        Accelerator or `convert`, as a whole model.

        Args:
            name_or_path: A hub id or a folder.
            model_class: `AutoModelForCausalLM`, or a model class of Transformers.
            **kwargs: Of `from_pretrained`: dtype, revision, attn_implementation and so on.

        Returns:
            The model, not converted yet.

        Raises:
            ConfigError: With pp_size above 1: this is no launch of a multiple of pp_size
                processes, an argument contradicts loading a part, the checkpoint is not complete.
            UnsupportedModelError: With pp_size above 1: the model cannot be cut into stages.
        """
        if self.config.pp_size == 1:
            return model_class.from_pretrained(name_or_path, **kwargs)
        PartialState()  # joins the launch's process group, unless that was done
        return load_model_stages(model_class, name_or_path, self.config, **kwargs)

    def revert(self, model: ModelT) -> ModelT:
        """Undo `convert`, and take off the wrappers that an Accelerator put around the model.

        Args:
            model: What `convert` or `Accelerator.prepare` returned.

        Returns:
            The model itself, as it was before. A model that was never converted is returned as is.
        """
        inner: Any = extract_model_from_parallel(model)
        return revert(cast("ModelT", without_mixed_precision_wrapper(inner)))

    def to_json(self) -> dict[str, Any]:
        """Return all settings and sizes in JSON types; the Trainer stores and logs these."""
        sizes = {f"{name}_size": size for name, size in self._sizes.items() if name != "sp"}
        return {"plugin": "SPPOPlugin", **self.config.to_dict(), **sizes}

    def __repr__(self) -> str:
        defaults = SPPOConfig().to_dict()
        shown = {k: v for k, v in self.config.to_dict().items() if v != defaults[k]}
        shown |= {f"{name}_size": size for name, size in self._sizes.items() if size != 1}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SPPOPlugin):
            return NotImplemented
        return self.config == other.config and self._given_sizes == other._given_sizes

    __hash__ = None  # type: ignore[assignment]  # sizes change when the plugin is attached

    def __getstate__(self) -> dict[str, Any]:
        """Keep what the user gave: no mesh, no observers, no sizes that depend on this launch."""
        skipped = {"device_mesh", "observer", "progress"}
        state = {name: value for name, value in self.__dict__.items() if name not in skipped}
        state["_sizes"] = dict(self._given_sizes)
        state |= {f"{name}_size": size for name, size in self._given_sizes.items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_observers()

    def _make_observers(self) -> None:
        self.observer = ObserverHub()
        """Where the engines of this plugin report to."""
        self.progress = ProgressReporter(
            show_plan=self.config.show_plan, show_progress=self.config.show_progress
        )
        """What shows the plan and the progress inside a step."""
        self.observer.subscribe(self.progress)

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        """Attach to an Accelerator; Accelerate calls this from the Accelerator's constructor."""
        asked_for = _requested_by_caller(default=self)
        if not isinstance(asked_for, SPPOPlugin):
            # [Note: Accelerators share their state]
            # Accelerate keeps the first parallelism config of a process for all its Accelerators.
            # One that was made without a plugin therefore still calls us; it must stay untouched.
            super()._validate_accelerator(accelerator)
            return
        if asked_for is not self and asked_for != self:
            raise ConfigError(
                f"This process's Accelerators already use {self!r}, so {asked_for!r} would be "
                "ignored by Accelerate. Allowed: one plugin at a time. Remedy: pass the same "
                "plugin, or make new TrainingArguments right before their Trainer."
            )
        refuse_accelerator(accelerator)
        refuse_host_weights(accelerator, self.config)
        if self.config.pp_size > 1:
            self._lay_out_pipeline(accelerator)
            self._attach(accelerator)
            return
        if self.config.sp_size > 1:
            self._check_shared_sequences(accelerator)
            self._set_size("tp", 1)
        if accelerator.is_fsdp2 and self.total_size == 1 and accelerator.num_processes > 1:
            # Accelerate would fall back to plain replication here, which FSDP2 cannot shard over.
            self._set_size("dp_shard", accelerator.num_processes)
            self.device_mesh = None
            state: Any = accelerator.state
            state.device_mesh = self.get_device_mesh(accelerator.device.type)
        super()._validate_accelerator(accelerator)
        if self.config.sp_size > 1:
            # Last: to Accelerate all ranks replicate or shard. See [Note: sizes of a pipeline].
            self._set_size("tp", self.config.sp_size)
        self._attach(accelerator)

    def _attach(self, accelerator: Accelerator) -> None:
        """Take part in an Accelerator, and in the Trainer that is making it, if one is."""
        attach(accelerator, self)
        callback = offer_callback(accelerator, self)
        trainer = calling_trainer(self)
        if trainer is None:
            return
        if host_resident_predicate(self.config) is not None:
            # What rests on the host need not fit on the device, not even once.
            trainer._move_model_to_device = lambda model, device: None
        elif "auto" in (self.config.weights, self.config.optimizer):
            move = trainer._move_model_to_device
            trainer._move_model_to_device = lambda model, device: move_if_it_fits(
                move, model, device
            )
        TrainerCheckpoints(trainer).install()
        tell_sharing_ranks(trainer, self.config)
        evaluation = TrainerEvaluation(trainer)
        evaluation.install()
        TrainerStep(trainer).install()
        if callback is not None:
            callback.watch(trainer, evaluation)

    @property
    def tp_enabled(self) -> bool:
        """Whether Accelerate should cut tensors; never, see [Note: sizes of a pipeline]."""
        return False

    def _check_shared_sequences(self, accelerator: Accelerator) -> None:
        """Refuse launches that do not fit `sp_size`."""
        sp_size = self.config.sp_size
        refuse_for_shared_sequences(accelerator, sp_size)
        check_world(1, accelerator.num_processes, sp_size)
        check_nodes(self.config)
        launch_watchdog(1, self.config.pp_timeout_seconds, sp_size)

    def _lay_out_pipeline(self, accelerator: Accelerator) -> None:
        """Tell Accelerate and the Trainer how many ranks share a batch.

        [Note: sizes of a pipeline]
        The Trainer divides batch sizes, label counts and losses by `tp_size`, the one size of ranks
        that see the same rows. So that is what a pipeline's ranks are reported as, while
        `tp_enabled` stays False and Accelerate leaves the tensors alone.
        """
        pp_size, sharing = self.config.pp_size, self.config.sharing_ranks
        refuse_for_pipeline(accelerator, pp_size)
        check_world(pp_size, accelerator.num_processes, self.config.sp_size)
        check_nodes(self.config)
        launch_watchdog(pp_size, self.config.pp_timeout_seconds)
        given = {k: v for k, v in self._given_sizes.items() if v > 1}
        replicas = accelerator.num_processes // sharing
        if given not in ({}, {"dp_replicate": replicas}):
            raise ConfigError(
                f"pp_size={pp_size} with {', '.join(f'{k}_size={v}' for k, v in given.items())} "
                f"over {accelerator.num_processes} processes. Allowed: dp_replicate_size={replicas}"
                " or none. Remedy: drop the other sizes; what pp_size leaves over replicates."
            )
        self._set_size("tp", sharing)
        self._set_size("dp_replicate", replicas)


def _requested_by_caller(default: SPPOPlugin) -> ParallelismConfig | None:
    """Return the `parallelism_config` argument of the Accelerator that is being made.

    Accelerate does not pass it on, and [Note: Accelerators share their state] means that it may
    differ from the config that is called. So it is read from the constructor's frame, and where
    that cannot be found, `default` is taken.
    """
    frame = sys._getframe(2)
    if frame.f_code.co_name != "__init__" or "parallelism_config" not in frame.f_locals:
        return default
    requested: ParallelismConfig | None = frame.f_locals["parallelism_config"]
    return requested
