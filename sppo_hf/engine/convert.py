"""Convert a model in place, and take everything back.

Conversion puts a stand-in for `forward` on the causal language model and pre/post hooks on its
decoder layers (and on rotary modules that need the sequence's length). Class, parameters, names,
config and checkpoint stay as they are. Nothing about it is global: other models in the process are
not touched.

[Note: rotary tables that know the length] "dynamic" and "longrope" choose their frequencies by the
largest position they are shown, so a chunk shown alone would get the short table. While a sequence
runs, hooks on those rotary modules append the sequence's last position to every call and cut its
row off the result: the module's own code then chooses, for every chunk, exactly what it would have
chosen for the whole. All other kinds (default, linear, yarn, llama3 ...) depend on each position
alone and are left as they are.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.engine import Engine
from sppo_hf.engine.family_guard import check_family
from sppo_hf.engine.sliced_calls import InnermostHook
from sppo_hf.engine.stages import AbsentLayer, staged_model_of
from sppo_hf.engine.step_observer import StepObserver
from sppo_hf.engine.structure import find_causal_lm, find_parts
from sppo_hf.errors import ConfigError, UnsupportedModelError


def _depends_on_length(module: nn.Module) -> bool:
    """Whether a module is a rotary embedding whose table depends on the sequence's length."""
    kind = getattr(module, "rope_type", None)
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return any("dynamic" in str(name) or name == "longrope" for name in kinds)


def _append_last(
    engine: Engine, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    last = engine.last_position()
    if last is None:
        return None
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": _with_last(kwargs["position_ids"], last)}
    if len(args) < 2:
        raise UnsupportedModelError(
            "a rotary embedding that depends on the sequence length is called without "
            "position_ids; its table cannot be kept right chunk by chunk."
        )
    return (args[0], _with_last(args[1], last), *args[2:]), kwargs


def _with_last(position_ids: Tensor, last: Tensor) -> Tensor:
    return torch.cat([position_ids, last.expand(*position_ids.shape[:-1], 1)], dim=-1)


def _cut_last(engine: Engine, _: nn.Module, __: Any, output: Any) -> Any:
    if engine.last_position() is None:
        return None
    if isinstance(output, Tensor):
        return output[..., :-1, :]
    return tuple(_cut_last(engine, _, __, part) for part in output)


ModelT = TypeVar("ModelT", bound=nn.Module)
_ATTRIBUTE = "_sppo_conversion"


class _Conversion:
    """What was done to one model, so that it can be undone."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.own_forward: Any = None
        self.stand_in: Any = None
        self.handles: list[RemovableHandle] = []


MakeEngine = Callable[..., Engine]
"""Makes the engine of a model; takes the arguments of `Engine`."""


def convert(
    model: ModelT,
    config: SPPOConfig,
    *,
    observer: StepObserver | None = None,
    make_engine: MakeEngine = Engine,
) -> ModelT:
    """Make a causal language model, bare or wrapped by PEFT, train chunk by chunk, in place.

    `observer` is told about plans, units and records; `make_engine` makes what runs the model.

    Returns:
        `model` itself. Converting again with equal settings changes nothing.

    Raises:
        UnsupportedModelError: If the model could not be trained exactly.
        ConfigError: If it is already converted with other settings.
    """
    causal_lm = find_causal_lm(model)
    engine = get_engine(model)
    if engine is not None and engine.enabled:
        if engine.config != config:
            raise ConfigError(
                f"{type(causal_lm).__name__} is already converted with other settings. Call "
                "plugin.revert(model) first; one model takes one SPPOPlugin."
            )
        return model
    staged = staged_model_of(causal_lm)
    with contextlib.nullcontext() if staged is None else staged.whole():
        # An engine that is not enabled was reverted while somebody's wrapper stood around our
        # forward: it is still in place.
        _attach(causal_lm, config, observer, engine, make_engine)
    return model


def revert(model: ModelT) -> ModelT:
    """Undo `convert`: the object has the attributes, hooks and forward it had before.

    Returns:
        `model` itself; a model that is not converted is left alone. One that was cut into stages
        stays cut, and refuses to run until it is converted again.
    """
    causal_lm = find_causal_lm(model)
    conversion: _Conversion | None = causal_lm.__dict__.get(_ATTRIBUTE)
    if conversion is None:
        return model
    for handle in conversion.handles:
        handle.remove()
    conversion.handles.clear()
    conversion.engine.enabled = False
    conversion.engine.close()
    if staged_model_of(causal_lm) is not None:
        # Only a part of the model is here, which its own forward would run without a word.
        return model
    if causal_lm.__dict__.get("forward") is not conversion.stand_in:
        # Accelerate's mixed-precision wrapper (or another) stands around our forward. We cannot
        # take ours out of the middle; disabled, it passes every call on unchanged.
        return model
    if conversion.own_forward is None:
        del causal_lm.__dict__["forward"]
    else:
        causal_lm.__dict__["forward"] = conversion.own_forward
    del causal_lm.__dict__[_ATTRIBUTE]
    return model


def check_convertible(model: nn.Module) -> None:
    """Find out whether `convert` would take `model`, and change nothing; a converted one passes.

    Raises:
        UnsupportedModelError: If the model could not be trained exactly.
    """
    if get_engine(model) is None:
        check_family(find_parts(model))


def is_converted(model: nn.Module) -> bool:
    """Whether `model` (or what it wraps) trains chunk by chunk now."""
    engine = get_engine(model)
    return engine is not None and engine.enabled


def get_engine(model: nn.Module) -> Engine | None:
    """The engine of a converted model; None of any other module, a loss or a value head, say."""
    try:
        conversion = find_causal_lm(model).__dict__.get(_ATTRIBUTE)
    except UnsupportedModelError:
        return None
    return None if conversion is None else conversion.engine


def _attach(
    causal_lm: Any,
    config: SPPOConfig,
    observer: StepObserver | None,
    old: Engine | None,
    make_engine: MakeEngine,
) -> None:
    parts = find_parts(causal_lm)
    check_family(parts)
    if old is not None:
        conversion: _Conversion = causal_lm.__dict__[_ATTRIBUTE]
        observer = observer or old.observer
        conversion.engine = make_engine(parts, config, observer, old.original_forward)
    else:
        observer = observer or StepObserver()
        conversion = _Conversion(make_engine(parts, config, observer, causal_lm.forward))
        conversion.own_forward = causal_lm.__dict__.get("forward")
        causal_lm.__dict__[_ATTRIBUTE] = conversion
        conversion.stand_in = causal_lm.__dict__["forward"] = _stand_in(causal_lm)
    engine = conversion.engine
    for index, layer in enumerate(parts.layers):
        if isinstance(layer, AbsentLayer):
            continue
        conversion.handles += [
            layer.register_forward_pre_hook(
                InnermostHook(_before_layer, engine, index), with_kwargs=True
            ),
            layer.register_forward_hook(
                InnermostHook(_after_layer, engine, index), always_call=True
            ),
        ]
    norm = parts.final_norm()
    if norm is not None:
        conversion.handles += [
            norm.register_forward_pre_hook(InnermostHook(_before_norm, engine), with_kwargs=True),
            norm.register_forward_hook(InnermostHook(_after_norm, engine), always_call=True),
        ]
    for rotary in filter(_depends_on_length, parts.base.modules()):
        conversion.handles += [
            rotary.register_forward_pre_hook(partial(_append_last, engine), with_kwargs=True),
            rotary.register_forward_hook(partial(_cut_last, engine)),
        ]


def _stand_in(causal_lm: Any) -> types.MethodType:
    original = causal_lm.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[_ATTRIBUTE].engine.forward(*args, **kwargs)

    # The Trainer reads the parameters' names to decide which columns of a dataset to keep.
    signature = inspect.signature(original)
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[self_parameter, *signature.parameters.values()]
    )
    # A bound method, so that a deep copy of the model is bound to the copy's engine.
    return types.MethodType(forward, causal_lm)


def _before_layer(
    engine: Engine, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    runner = engine.running
    if runner is not None:
        return runner.before_layer(index, layer, args, kwargs)
    engine.before_unchunked_layer(index)
    return None


def _after_layer(engine: Engine, index: int, layer: nn.Module, _: Any, output: Any) -> Any:
    runner = engine.running
    if runner is None:
        return None
    # Called with None when the layer (or another hook before it) raised.
    return runner.after_layer(index, layer, output, failed=output is None)


def _before_norm(
    engine: Engine, norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    runner = engine.running
    return None if runner is None else runner.before_norm(norm, args, kwargs)


def _after_norm(engine: Engine, norm: nn.Module, _: Any, output: Any) -> Any:
    runner = engine.running
    return None if runner is None else runner.after_norm(norm, output, failed=output is None)
