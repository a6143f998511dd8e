"""SPPOPlugin: the one object that a user hands to Transformers or Accelerate.

It is a `ParallelismConfig`, because that is what both of them accept, keep, serialise and call when
an Accelerator is made. What an attached Accelerator does differently is in `accelerator.py`, what
changes on a Trainer in `trainer.py`, `evaluation.py`, `checkpoints.py` and `callback.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import torch
from accelerate import ParallelismConfig, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import extract_model_from_parallel
from transformers import AutoModelForCausalLM

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import revert
from sppo_hf.engine.model_parts import find_causal_lm
from sppo_hf.engine.step_observer import ObserverHub
from sppo_hf.errors import ConfigError
from sppo_hf.integrations.accelerator import attach, convert_once, remove_mixed_precision_wrapper
from sppo_hf.integrations.callback import install_callback
from sppo_hf.integrations.progress import ProgressReporter
from sppo_hf.integrations.trainer import (
    find_calling_trainer,
    report_sharing_ranks,
    set_model_placement,
)
from sppo_hf.integrations.validation import (
    check_accelerator,
    check_host_placement,
    check_parallel_sizes,
    check_shared_launch,
    sp_size_from_environment,
)
from sppo_hf.pipeline.convert import join_launch, load_model_stages
from sppo_hf.pipeline.watchdog import watch_launch_when_joined
from sppo_hf.planning.machine import set_max_connections
from sppo_hf.registry import import_entry_points
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

    Sizes of `ParallelismConfig` are accepted too: `dp_shard_size` and `dp_replicate_size` shape
    FSDP2 and hybrid sharding. By default all processes replicate (DDP) or, under FSDP2, all shard.
    The `sp_size` ranks that share a sequence are among those that replicate or shard.

    One plugin may serve several Trainers or Accelerators, in turn or side by side.

    While a Trainer trains, Python's full garbage collections, which would stall steps, pass over
    all objects that the process had after the first step (`gc.freeze`), unless it froze some
    itself. A loop of your own can call `gc.collect(); gc.freeze()` there, and later `gc.unfreeze`.

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
        import_entry_points()  # their names are allowed in settings
        sizes = {name: settings.pop(name) for name in list(settings) if name in _OWN_FIELDS}
        base = config if isinstance(config, SPPOConfig) else SPPOConfig.from_dict(config or {})
        # A field of both. Accelerate must not see it: it would expect DeepSpeed to share sequences.
        sp_size = sizes.pop("sp_size", None)
        if sp_size is None and base.sp_size == 1:
            sp_size = sp_size_from_environment()
        if sp_size is not None:
            settings["sp_size"] = sp_size
        self.config = base.replace(**settings) if settings else base
        check_parallel_sizes(sizes)
        try:
            super().__init__(**sizes, sp_size=1)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"Accelerate's ParallelismConfig refuses {show(sizes)}: {error}. Allowed: "
                "dp_shard_size and dp_replicate_size. Remedy: drop its other fields."
            ) from error
        self._given_sizes = dict(self._sizes)
        self._make_observers()
        install_callback()
        shared_state: Any = AcceleratorState._shared_state
        if shared_state.get("parallelism_config", self) is None:
            shared_state["parallelism_config"] = _NoPluginYet(
                dp_replicate_size=1, dp_shard_size=1, tp_size=1, cp_size=1, sp_size=1
            )
        if not torch.cuda.is_initialized():  # CUDA reads the variable once, when it starts
            set_max_connections(os.environ)
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
        """Make a plugin from the settings file named by the environment variable SPPO_CONFIG.

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

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """Return Accelerate's mesh of devices.

        Raises:
            ConfigError: An Accelerator was given the class instead of a plugin.
        """
        if not isinstance(self, SPPOPlugin):  # pyright: ignore[reportUnnecessaryIsInstance]
            # This is the first method that an Accelerator calls, here on the class.
            raise ConfigError(
                "parallelism_config is the class SPPOPlugin. Allowed: a plugin. Remedy: call it, "
                "as in parallelism_config=SPPOPlugin()."
            )
        return super().get_device_mesh(device_type)

    def convert(self, model: ModelT) -> ModelT:
        """Make a model train chunk by chunk, in place.

        Args:
            model: A causal language model, multimodal model or classifier of Transformers, bare or
                wrapped by PEFT.

        Returns:
            The same model.

        Raises:
            UnsupportedModelError: The model cannot be run chunk by chunk exactly.
            ConfigError: This is no model but its name, say; or the model was converted before, with
                other settings.
        """
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                f"convert was given {show(model)} ({type(model).__name__}). Allowed: a loaded "
                "causal language model. Remedy: load it first, with "
                "AutoModelForCausalLM.from_pretrained(...) or plugin.load_model(...)."
            )
        # Process groups on GPUs need the rank's own device, where the model may not be yet.
        device = PartialState().device if self.config.sharing_ranks > 1 else None
        convert_once(model, self, device)
        # The Accelerator also prepares losses and value heads, which `convert_once` leaves alone;
        # whoever calls this expects a converted model.
        find_causal_lm(model)
        return model

    def load_model(
        self,
        name_or_path: str | os.PathLike[str],
        *,
        model_class: Any = AutoModelForCausalLM,
        **kwargs: Any,
    ) -> PreTrainedModel:
        """Load a model; in a pipeline, only the layers of this rank's stages.

        With pp_size=1 it is `model_class.from_pretrained(name_or_path, **kwargs)`. With more, every
        rank reads its own tensors alone, onto the CPU or the one device that `device_map` names.
        The result has its usual class, and its parameters their usual names: pass it to PEFT's
        `get_peft_model`, the Trainer, the Accelerator or `convert` like a whole model.

        Args:
            name_or_path: A hub id or a folder.
            model_class: `AutoModelForCausalLM`, or a model class of Transformers.
            **kwargs: Those of `from_pretrained`: dtype, revision, attn_implementation and so on.

        Returns:
            The model, not converted yet.

        Raises:
            ConfigError: With pp_size above 1: the number of processes is no multiple of pp_size,
                an argument contradicts loading a part, or the checkpoint is not complete.
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
            The original model, as it was. A model that was never converted is returned unchanged.
        """
        inner: Any = extract_model_from_parallel(model)
        return revert(cast("ModelT", remove_mixed_precision_wrapper(inner)))

    # -- equality, pickling, logging ---------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return all settings and sizes as JSON types; the Trainer stores and logs these."""
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
        """Keep what the user gave: no mesh, no observers, no sizes that this launch has set.

        The Trainer pickles its arguments, with this object in them, into every checkpoint.
        """
        skipped = {"device_mesh", "observer", "progress"}
        state = {name: value for name, value in self.__dict__.items() if name not in skipped}
        state["_sizes"] = dict(self._given_sizes)
        state |= {f"{name}_size": size for name, size in self._given_sizes.items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_observers()
        install_callback()

    def _make_observers(self) -> None:
        self.progress = ProgressReporter(
            show_plan=self.config.show_plan, show_progress=self.config.show_progress
        )
        """Prints the plan and draws the progress bar."""
        # It outlives the plugin, which SPPOPlugin().convert(model) drops at once.
        self.observer = ObserverHub(self.progress)
        """Receives the reports of all engines of this plugin."""

    # -- attaching to an Accelerator ---------------------------------------------------------

    @property
    def tp_enabled(self) -> bool:
        """Whether Accelerate should shard tensors: never; see [Note: why tp_size is reported]."""
        return False

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        """Attach to an Accelerator: Accelerate calls this hook in the Accelerator's constructor."""
        requested = _requested_by_caller(default=self)
        if not isinstance(requested, SPPOPlugin):
            # [Note: Accelerators share their state]
            # Accelerate keeps the first parallelism config of a process for all its Accelerators.
            # So this is also called for one that was made without a plugin, which must stay plain.
            super()._validate_accelerator(accelerator)
            return
        if requested is not self and requested != self:
            raise ConfigError(
                f"This process's Accelerators already use {self!r}, so {requested!r} would be "
                "ignored by Accelerate. Allowed: one plugin at a time. Remedy: pass the same "
                "plugin, or make new TrainingArguments right before their Trainer."
            )
        check_accelerator(accelerator)
        check_host_placement(accelerator, self.config)
        if self.config.sharing_ranks > 1:
            check_shared_launch(accelerator, self.config)
            join_launch(self.config)
        if self.config.pp_size > 1:
            self._set_pipeline_sizes(accelerator)
            self._attach(accelerator)
            return
        self._set_size("tp", 1)  # as Accelerate must see it; an earlier attachment has set sp_size
        if accelerator.is_fsdp2 and self.total_size == 1 and accelerator.num_processes > 1:
            # Accelerate would fall back to plain replication here, over which FSDP2 cannot shard.
            self._set_size("dp_shard", accelerator.num_processes)
            self.device_mesh = None
            state: Any = accelerator.state
            state.device_mesh = self.get_device_mesh(accelerator.device.type)
        super()._validate_accelerator(accelerator)
        self._set_size("tp", self.config.sp_size)
        self._attach(accelerator)

    def _set_pipeline_sizes(self, accelerator: Accelerator) -> None:
        """Tell Accelerate and the Trainer how many ranks share a batch, and how many replicate.

        [Note: why tp_size is reported]
        The Trainer divides batch sizes, label counts and losses by `tp_size`, which for it is the
        number of ranks that get the same rows. So ranks of a pipeline, and ranks that share
        sequences, are reported as `tp_size`, while `tp_enabled` stays False and Accelerate leaves
        the tensors alone.
        """
        given = {k: v for k, v in self._given_sizes.items() if v > 1}
        replicas = accelerator.num_processes // self.config.sharing_ranks
        if given not in ({}, {"dp_replicate": replicas}):
            raise ConfigError(
                f"pp_size={self.config.pp_size} with "
                f"{', '.join(f'{k}_size={v}' for k, v in given.items())} "
                f"over {accelerator.num_processes} processes. Allowed: dp_replicate_size={replicas}"
                " or none. Remedy: drop the other sizes; what pp_size leaves over replicates."
            )
        self._set_size("tp", self.config.sharing_ranks)
        self._set_size("dp_replicate", replicas)

    def _attach(self, accelerator: Accelerator) -> None:
        """Attach to an Accelerator, and prepare the Trainer that is making it, if one is.

        All else of the Trainer is changed when it has been made: see `SPPOCallback`.
        """
        attach(accelerator, self)
        trainer = find_calling_trainer(self)
        if trainer is not None:
            set_model_placement(trainer, self.config)
            report_sharing_ranks(trainer, self.config)


class _NoPluginYet(ParallelismConfig):
    """Takes the place of None where Accelerate's state was set up without a config.

    See [Note: Accelerators share their state]: it would ignore a plugin that comes later.
    """

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        """Give the place to the plugin that an Accelerator is made with, if it is."""
        requested = _requested_by_caller(default=None)
        if isinstance(requested, SPPOPlugin):
            state: Any = accelerator.state
            state.parallelism_config = requested
            state.device_mesh = requested.get_device_mesh(accelerator.device.type)
            requested._validate_accelerator(accelerator)


def _requested_by_caller(default: SPPOPlugin | None) -> ParallelismConfig | None:
    """Return the `parallelism_config` argument of the Accelerator that is being made.

    Accelerate does not pass it to this hook, and the config it calls may be an earlier one, see
    [Note: Accelerators share their state]. So it is read from the constructor's stack frame; where
    that is not found, `default` is taken.
    """
    frame = sys._getframe(2)
    if frame.f_code.co_name != "__init__" or "parallelism_config" not in frame.f_locals:
        return default
    requested: ParallelismConfig | None = frame.f_locals["parallelism_config"]
    return requested
