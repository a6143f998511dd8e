"""Convert a model in place, and revert it.

Conversion replaces the causal language model's `forward` and registers hooks on its decoder layers,
its final norm, and rotary modules that depend on the sequence's length. Class, parameters, names,
config and checkpoint stay the same. Other models in the process are not touched.

[Note: rotary tables that depend on the length] "dynamic" and "longrope" choose their frequencies by
the largest position of the call, so a chunk would get the table of a short sequence. In a chunked
forward, hooks on these modules append the sequence's last position to every call and remove its row
from the result, so that the module's own code makes the same choice as for the whole sequence. All
other kinds (default, linear, yarn, llama3, ...) depend on each position only and have no hooks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.engine import Engine
from sppo_hf.engine.family_guard import check_family
from sppo_hf.engine.foreign_code import check_foreign_code, check_forward
from sppo_hf.engine.model_parts import all_modules, depends_on_length, find_causal_lm, find_parts
from sppo_hf.engine.sliced_calls import InnermostHook, LengthHook, is_of_a_copy
from sppo_hf.engine.stages import AbsentLayer, staged_model_of
from sppo_hf.engine.step_observer import StepObserver
from sppo_hf.errors import ConfigError, UnsupportedModelError


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
            "position_ids, so it cannot be exact in chunks. Train this model without sppo_hf."
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
    """What `revert` needs to undo one conversion."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.instance_forward: Any = None
        """The `forward` in the model's `__dict__` before the conversion, if there was one."""
        self.chunked_forward: Any = None
        """The `forward` that the conversion put there."""
        self.handles: list[RemovableHandle] = []


MakeEngine = Callable[..., Engine]
"""Creates an engine; takes the arguments of `Engine`."""


def convert(
    model: ModelT,
    config: SPPOConfig,
    *,
    observer: StepObserver | None = None,
    make_engine: MakeEngine = Engine,
) -> ModelT:
    """Convert a causal language model, bare or wrapped by PEFT, to train in chunks, in place.

    `observer` receives plans, units and records of steps; `make_engine` creates the engine.

    Returns:
        `model` itself. Converting again with equal settings changes nothing.

    Raises:
        UnsupportedModelError: The model cannot be trained exactly.
        ConfigError: It is already converted with other settings, or has an adapter that needs
            `return_logits`.
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
    _refuse_readers_of_logits(model, config)
    staged = staged_model_of(causal_lm)
    with contextlib.nullcontext() if staged is None else staged.whole():
        # A disabled engine was reverted while a wrapper held our forward, so it is still in place.
        _attach(causal_lm, config, observer, engine, make_engine)
    return model


def revert(model: ModelT) -> ModelT:
    """Undo `convert`: restore attributes, hooks and forward.

    Returns:
        `model` itself, unchanged if it is not converted. A model that was cut into stages stays
        cut, and refuses to run until it is converted again.
    """
    causal_lm = find_causal_lm(model)
    conversion: _Conversion | None = causal_lm.__dict__.get(_ATTRIBUTE)
    if conversion is None:
        return model
    for handle in conversion.handles:
        handle.remove()
    conversion.handles.clear()
    for module in all_modules(causal_lm):
        _remove_copied_hooks(module)
    conversion.engine.enabled = False
    conversion.engine.close()
    if staged_model_of(causal_lm) is not None:
        # The model's own forward would silently run the part of the model that is here.
        return model
    if causal_lm.__dict__.get("forward") is not conversion.chunked_forward:
        # A wrapper, such as Accelerate's for mixed precision, holds our forward, which cannot be
        # removed. The disabled engine passes calls on to the original forward.
        return model
    if conversion.instance_forward is None:
        del causal_lm.__dict__["forward"]
    else:
        causal_lm.__dict__["forward"] = conversion.instance_forward
    del causal_lm.__dict__[_ATTRIBUTE]
    return model


def keep_forward(model: nn.Module) -> None:
    """Put the forward of a converted model back where Liger's patch has replaced it since.

    With `use_liger_kernel` the Trainer patches its model at the beginning of every training.
    """
    causal_lm = find_causal_lm(model)
    conversion: _Conversion = causal_lm.__dict__[_ATTRIBUTE]
    function = getattr(causal_lm.forward, "__func__", causal_lm.forward)
    if not str(getattr(function, "__module__", "")).startswith("liger_kernel."):
        return
    while function not in (None, conversion.chunked_forward.__func__):
        function = getattr(function, "__wrapped__", None)  # Accelerate's, for mixed precision
    if function is None:
        causal_lm.__dict__["forward"] = conversion.chunked_forward


def check_convertible(model: nn.Module) -> None:
    """Check that `convert` would accept `model`, without changing it.

    Raises:
        UnsupportedModelError: The model cannot be trained exactly.
    """
    if get_engine(model) is None:
        parts = find_parts(model)
        check_family(parts)
        check_forward(parts)
        check_foreign_code(parts)


def is_converted(model: nn.Module) -> bool:
    """Whether `model` (or the model that it wraps) is converted."""
    engine = get_engine(model)
    return engine is not None and engine.enabled


def holds_converted(model: object) -> bool:
    """Whether a module is converted, or one in it; False for anything else. Calls no method of it.

    For modules that nobody has handed to SPPO, whose methods may do anything.
    """
    return isinstance(model, nn.Module) and any(_ATTRIBUTE in vars(m) for m in model.modules())


def get_engine(model: nn.Module) -> Engine | None:
    """The engine of a converted model; None for any other module."""
    try:
        conversion = find_causal_lm(model).__dict__.get(_ATTRIBUTE)
    except UnsupportedModelError:
        return None
    return None if conversion is None else conversion.engine


def _refuse_readers_of_logits(model: Any, config: SPPOConfig) -> None:
    """Refuse adapters of PEFT that compute a loss of their own from logits, without logits."""
    adapters = getattr(model, "peft_config", None) or {}
    kinds = {str(getattr(adapter, "peft_type", "")) for adapter in adapters.values()}
    if any("CPT" in kind for kind in kinds) and not config.return_logits:
        raise ConfigError(
            "return_logits=False with a CPTConfig of PEFT, which computes its loss from logits of "
            "whole sequences. Allowed with it: True. Remedy: SPPOPlugin(return_logits=True), or "
            "prompt tuning instead."
        )


def _attach(
    causal_lm: Any,
    config: SPPOConfig,
    observer: StepObserver | None,
    old: Engine | None,
    make_engine: MakeEngine,
) -> None:
    parts = find_parts(causal_lm)
    check_family(parts)
    if old is None:
        check_forward(parts)
    check_foreign_code(parts, one_chunk=config.one_chunk)
    if old is not None:
        conversion: _Conversion = causal_lm.__dict__[_ATTRIBUTE]
        observer = observer or old.observer
        conversion.engine = make_engine(parts, config, observer, old.original_forward)
    else:
        observer = observer or StepObserver()
        conversion = _Conversion(make_engine(parts, config, observer, causal_lm.forward))
        conversion.instance_forward = causal_lm.__dict__.get("forward")
        causal_lm.__dict__[_ATTRIBUTE] = conversion
        conversion.chunked_forward = causal_lm.__dict__["forward"] = _chunked_forward(causal_lm)
    engine = conversion.engine
    hooked = [*enumerate(parts.layers), (None, parts.final_norm())]
    for index, module in hooked:
        if module is None or isinstance(module, AbsentLayer):
            continue
        before, after = (InnermostHook(hook, engine, index) for hook in (_before, _after))
        conversion.handles += [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, always_call=True),
        ]
    for rotary in filter(depends_on_length, parts.base.modules()):
        conversion.handles += [
            rotary.register_forward_pre_hook(LengthHook(_append_last, engine), with_kwargs=True),
            rotary.register_forward_hook(LengthHook(_cut_last, engine)),
        ]
    engine.remember_modules(all_modules(causal_lm))


def _remove_copied_hooks(module: nn.Module) -> None:
    """Remove hooks that a module was copied with (PEFT copies modules that it saves)."""
    for hooks, *more in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (
            module._forward_hooks,
            module._forward_hooks_with_kwargs,
            module._forward_hooks_always_called,
        ),
    ):
        for key in [key for key, hook in hooks.items() if is_of_a_copy(hook)]:
            for table in (hooks, *more):
                table.pop(key, None)  # type: ignore[attr-defined]


def _chunked_forward(causal_lm: Any) -> types.MethodType:
    original = causal_lm.forward

    # torch.compile around a converted model would fail on the engine's code. This one, unlike
    # `torch.compiler.disable`, imports the compiler at the first call.
    @torch._disable_dynamo
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[_ATTRIBUTE].engine.forward(*args, **kwargs)

    # The Trainer reads the signature to decide which columns of a dataset to keep.
    signature = inspect.signature(original)
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[self_parameter, *signature.parameters.values()]
    )
    # A bound method, so that a deep copy of the model uses the copy's engine.
    return types.MethodType(forward, causal_lm)


def _before(
    engine: Engine,
    index: int | None,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Hook before layer `index`, or before the final norm."""
    runner = engine.running
    if index is None:
        return None if runner is None else runner.before_norm(module, args, kwargs)
    if runner is not None:
        return runner.before_layer(index, module, args, kwargs)
    engine.before_unchunked_layer(index)
    return None


def _after(engine: Engine, index: int | None, module: nn.Module, _: Any, output: Any) -> Any:
    """Hook after layer `index`, or after the final norm."""
    runner = engine.running
    if runner is None:
        return None
    failed = output is None  # the module (or a hook before this one) raised
    if index is None:
        return runner.after_norm(module, output, failed=failed)
    return runner.after_layer(index, module, output, failed=failed)
