"""Compare a converted model with the unmodified one: loss and every gradient.

`compare` runs two copies of a model over the same batch, one unmodified and one converted, and
reports the worst difference. The exactness tests, the table of families and `sppo check` use it.

[Note: how an error is measured]
The error of a parameter is ``max|g - r| / max(max|r|, 1e-4 * G)``, where r is the reference
gradient, g ours and G the largest entry of all reference gradients. The floor is for gradients that
are zero in exact arithmetic: the bias of a key projection without rotary embedding adds the same to
all scores of a query, so both of its gradients are rounding noise without a relative error.

[Note: hooks in the harness]
Both models run with hooks on every parameter (see `GradientHooks`), so every comparison also checks
that hooks run once per backward, on the whole gradient.

[Note: why float64 has to be enforced]
A model whose weights are float64 does not compute in float64. Transformers raises norms, rotary
tables, router logits, attention's softmax and the loss to float32 on purpose (`x.float()`,
`x.to(torch.float32)`, `softmax(..., dtype=torch.float32)`), which for a float64 model is a step
*down*: two orders of the same sum then differ by 1e-7, which hides an error of 1e-8 in a chunk.
Under `float64_everywhere` both models stay in float64, so the only differences left are those of
float64 rounding, about 1e-13, and a tolerance of 1e-9 is meaningful.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
import threading
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.engine.model_parts import find_causal_lm
from sppo_hf.engine.step_observer import StepObserver
from sppo_hf.planning.plan import Plan
from sppo_hf.testing.tiny_models import copy_of


class _Torch(types.ModuleType):
    """Replaces the name `torch` in modules under `float64_everywhere`."""

    def __getattr__(self, name: str) -> Any:
        """Look up attributes that torch has got since `copy_torch`."""
        return getattr(sys.modules["torch"], name)

    def copy_torch(self) -> None:
        """Copy torch's attributes, for look-ups as fast as in torch, and replace float32."""
        vars(self).clear()
        vars(self).update(vars(torch), float32=torch.float64, float=torch.float64)


_torch = _Torch("torch")
"""The only instance: torch.compile would compile code again for another one."""

_float64_lock = threading.Lock()
_float64_depth = 0
_leave_float64 = contextlib.ExitStack()


@contextlib.contextmanager
def float64_everywhere() -> Iterator[None]:
    """Context in which requests for float32 yield float64, in backward too.

    Covers `Tensor.float()`, `torch.float32` wherever a module's code names it, including default
    arguments, and the default dtype of new tensors. Integer dtypes and half precision are not
    changed. See [Note: why float64 has to be enforced].

    It affects all threads of the process, several of which may enter it at once. It intercepts no
    calls, but replaces the names `torch` and `float32` in all imported modules, so it does not slow
    anything down. Not covered: torch's own code, functions that import torch when they run, and
    values that were derived from `torch.float32` before.
    """
    global _float64_depth
    with _float64_lock:
        if _float64_depth == 0:
            _enter_float64()
        _float64_depth += 1
    try:
        yield
    finally:
        with _float64_lock:
            _float64_depth -= 1
            if _float64_depth == 0:
                _leave_float64.close()


def _enter_float64() -> None:
    names = _names()
    _leave_float64.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float64)
    Tensor.float = Tensor.double
    _leave_float64.callback(delattr, Tensor, "float")  # it comes from a base class
    _torch.copy_torch()
    _leave_float64.callback(_bind, names, in_float64=False)
    _bind(names, in_float64=True)


class _Name(NamedTuple):
    """A name that has another value under `float64_everywhere`."""

    owner: dict[str, Any] | types.FunctionType
    """A module's namespace, or a function with default arguments."""
    name: str
    usual: Any
    in_float64: Any


def _bind(names: Iterable[_Name], *, in_float64: bool) -> None:
    for owner, name, *values in names:
        if isinstance(owner, dict):
            owner[name] = values[in_float64]
        else:
            setattr(owner, name, values[in_float64])


_modules: dict[str, types.ModuleType] = {}
"""Modules that were searched."""
_found: list[_Name] = []
"""Names that were found in them."""
_was_importing = False
"""Whether a searched module was still being imported by another thread."""


def _names() -> list[_Name]:
    """Names in all modules; only modules imported since the last call are searched."""
    global _was_importing
    # New modules are at the end. In a forked process each search of a module copies a memory page.
    more = len(sys.modules) - len(_modules)
    modules = list(itertools.islice(reversed(sys.modules.items()), max(more, 0) + 1))
    name, module = modules.pop()
    known = _modules
    if _was_importing or more < 0 or known.get(name) is not module:
        modules, known = list(sys.modules.items()), dict(_modules)
        _modules.clear()
    _was_importing = False
    for name, module in modules:
        if known.get(name) is not module:
            _found.extend(_names_of(name, module))
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            _was_importing = True
        else:
            _modules[name] = module
    return _found


def _names_of(module_name: str, module: types.ModuleType) -> list[_Name]:
    namespace = getattr(module, "__dict__", None)
    if namespace is None or module_name.partition(".")[0] == "torch":
        return []
    found = [
        _Name(namespace, name, value, _torch if value is torch else torch.float64)
        for name, value in list(namespace.items())
        if value is torch or value is torch.float32
    ]
    if found:  # else no function of it has either by default
        for value in list(namespace.values()):
            for function in _functions(value, module_name):
                found += _defaults(function)
    return found


def _functions(value: Any, module_name: str) -> Iterator[types.FunctionType]:
    """Functions of a module's `value`, which may be a class, and the functions they wrap."""
    values = [value]
    # Without getattr: some classes import modules when an attribute is looked up.
    if issubclass(type(value), type) and vars(value).get("__module__") == module_name:
        values = list(vars(value).values())
    for function in values:
        if type(function) in (staticmethod, classmethod):
            function = function.__func__
        while type(function) is types.FunctionType:
            yield function
            function = vars(function).get("__wrapped__")


def _defaults(function: types.FunctionType) -> Iterator[_Name]:
    """Default arguments of `function` that include float32."""
    given, by_name = function.__defaults__ or (), function.__kwdefaults__ or {}
    if any(value is torch.float32 for value in given):
        yield _Name(function, "__defaults__", given, tuple(map(_wide, given)))
    if any(value is torch.float32 for value in by_name.values()):
        wide = {name: _wide(value) for name, value in by_name.items()}
        yield _Name(function, "__kwdefaults__", by_name, wide)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


GRADIENT_FLOOR = 1e-4
"""See [Note: how an error is measured]."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest error that counts as exact. In float32 rounding alone reaches 1e-4 in unlucky entries."""

DRIFT_ALLOWANCE = 1.1
"""Largest allowed distance from float32 in low precision, relative to the unmodified model's."""

Batch = Mapping[str, Tensor]


class GradientHooks:
    """Context with two hooks on every trained parameter, which count their calls.

    The tensor hook changes gradients to `g * (1 + |g| / max|g|)`. That is not linear, so the result
    differs if the hook sees only a part of the gradient or runs twice. It keeps the order of
    magnitude, and so relative errors.
    """

    def __init__(self, model: nn.Module, *, after_accumulation: bool = True) -> None:
        """Prepare hooks on `model`; with `after_accumulation` post-accumulate hooks, too."""
        self._after_accumulation = after_accumulation
        self._named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._handles: list[RemovableHandle] = []
        self.calls: dict[str, tuple[int, int]] = {name: (0, 0) for name, _ in self._named}
        """Calls of the tensor hook and of the post-accumulate hook, by parameter name."""

    def __enter__(self) -> GradientHooks:
        for name, p in self._named:
            self._handles.append(p.register_hook(functools.partial(self._change, name)))
            if self._after_accumulation:
                count = functools.partial(self._count, name)
                self._handles.append(p.register_post_accumulate_grad_hook(count))
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _change(self, name: str, grad: Tensor) -> Tensor:
        tensor_calls, other_calls = self.calls[name]
        self.calls[name] = (tensor_calls + 1, other_calls)
        size = grad.abs()
        largest = size.max() if size.numel() else size.sum()
        return grad * (1 + size / largest.clamp_min(torch.finfo(grad.dtype).tiny))

    def _count(self, name: str, _: Tensor) -> None:
        tensor_calls, other_calls = self.calls[name]
        self.calls[name] = (tensor_calls, other_calls + 1)


@dataclass(frozen=True, slots=True)
class ParameterError:
    """Error of one parameter's gradient."""

    name: str
    error: float
    """See [Note: how an error is measured]; inf if NaNs differ."""
    scale: float
    """Largest entry of the reference gradient."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """Loss and gradients of one run."""

    loss: float
    """The loss, summed over the accumulated micro-steps."""
    by_name: Mapping[str, Tensor | None]
    """Gradients of trainable parameters by name; None for those without a gradient."""
    hook_calls: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """See `GradientHooks.calls`; empty for runs without hooks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactnessReport:
    """Outcome of `compare`."""

    model_name: str
    dtype: torch.dtype
    reference_attention: str
    """Attention of the unmodified model: "eager" or "sdpa"."""
    loss: float
    """Loss of the converted model."""
    reference_loss: float
    parameters: tuple[ParameterError, ...] = field(repr=False)
    """All trainable parameters, the worst first."""
    num_chunks: int
    attention_forwards: int
    """Attention forwards that the converted model ran."""
    tolerance: float
    hooks_differ: tuple[str, ...] = ()
    """Parameters whose hooks did not run as often as in the unmodified model."""

    @property
    def loss_error(self) -> float:
        """Relative difference of the losses; 0 if both are NaN, as for a batch without labels."""
        return _relative(self.loss, self.reference_loss)

    @property
    def worst(self) -> ParameterError:
        """The parameter whose gradient differs most."""
        return self.parameters[0]

    @property
    def error(self) -> float:
        """The larger of the loss's and the worst parameter's error."""
        return max(self.loss_error, self.worst.error)

    @property
    def exact(self) -> bool:
        """Whether all errors are within the tolerance, and hooks ran as often as they should."""
        return self.error <= self.tolerance and not self.hooks_differ

    def __str__(self) -> str:
        """One paragraph for a failing test or a log."""
        verdict = "exact" if self.exact else "NOT exact"
        lines = [
            f"{self.model_name}: {verdict} in {str(self.dtype).removeprefix('torch.')}"
            f" (tolerance {self.tolerance:.0e}, {self.num_chunks} chunks,"
            f" {self.attention_forwards} attention forwards,"
            f" reference attention {self.reference_attention})",
            f"  loss {self.loss:.12g}, reference {self.reference_loss:.12g},"
            f" error {self.loss_error:.2e}",
        ]
        lines += [
            f"  {parameter.name}: error {parameter.error:.2e}, scale {parameter.scale:.2e}"
            for parameter in self.parameters[:5]
        ]
        lines += [f"  {name}: its hooks ran another number of times" for name in self.hooks_differ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftReport:
    """Outcome of `compare_drift`: distances from a float32 reference over all gradients."""

    model_name: str
    dtype: torch.dtype
    drift: float
    """Norm of (converted model's gradients minus float32's) over the norm of float32's."""
    unmodified_drift: float
    """The same for the unmodified model in the low precision."""
    loss: float
    """Loss of the converted model in the low precision, mean of the batches."""
    unmodified_loss: float
    reference_loss: float
    """Loss of the unmodified model in float32."""

    @property
    def allowed_drift(self) -> float:
        """The unmodified model's drift times 1.1."""
        return DRIFT_ALLOWANCE * self.unmodified_drift

    @property
    def exact(self) -> bool:
        """Whether the converted model is no farther from float32 than allowed."""
        return self.drift <= self.allowed_drift


class _PlanWatcher(StepObserver):
    """Keeps the number of chunks of the last plan."""

    num_chunks = 0

    def on_plan(self, plan: Plan, model_name: str) -> None:
        self.num_chunks = len(plan.bounds)

    def __deepcopy__(self, memo: dict[int, Any]) -> _PlanWatcher:
        """Observers are shared by copies of a model."""
        return self


def compare(
    model: nn.Module,
    batch: Batch,
    config: SPPOConfig,
    *,
    accumulation: int = 1,
    tolerance: float | None = None,
    reference: Gradients | None = None,
) -> ExactnessReport:
    """Run `model` over `batch` unmodified and converted, and compare loss and gradients.

    Args:
        model: a causal language model, bare or wrapped by PEFT, without gradients. It is copied,
            not changed. Float64 weights are run under `float64_everywhere`.
        batch: keyword arguments of the model's forward; tensors of `[B, T]`.
        config: the settings of the converted model.
        accumulation: micro-steps into which the rows are split. With more than one, each is given
            the label count of all of them as `num_items_in_batch`, as the Trainer does.
        tolerance: largest error that counts as exact; None takes the dtype's from `TOLERANCE`.
        reference: what `run_reference` returned for the same model, batch and accumulation, to
            compare several settings with one run of the unmodified model; None runs it here.

    Raises:
        UnsupportedModelError: the family is refused.
        ConfigError: the settings do not fit the batch.
    """
    dtype = find_causal_lm(model).dtype
    watcher = _PlanWatcher()
    converted = convert(copy_of(model), config, observer=watcher)
    engine = get_engine(converted)
    assert engine is not None, "convert() left no engine behind"
    actual = run_batch(converted, batch, accumulation=accumulation, hooks=True)

    expected = reference or run_reference(model, batch, accumulation=accumulation)
    return ExactnessReport(
        model_name=type(find_causal_lm(model)).__name__,
        dtype=dtype,
        reference_attention=reference_attention(model),
        loss=actual.loss,
        reference_loss=expected.loss,
        parameters=parameter_errors(actual, expected),
        num_chunks=watcher.num_chunks,
        attention_forwards=engine.counters.get("attention_forwards", 0),
        tolerance=TOLERANCE[dtype] if tolerance is None else tolerance,
        hooks_differ=_hooks_differ(actual, expected),
    )


def compare_drift(
    model: nn.Module,
    batches: Sequence[Batch],
    config: SPPOConfig,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> DriftReport:
    """Compare the converted and the unmodified model in `dtype` by their distances from float32.

    Two orders of rounding differ by chance, so give several batches; distances are root mean
    squares over them. If tokens choose experts, rounding may change the choice, and distances are
    not meaningful: use a model with one expert.

    Args:
        model: a float32 model; its weights are rounded to `dtype` for all three runs, so that
            distances show the arithmetic alone. It is copied, not changed.
        batches: keyword arguments of the model's forward, one mapping a batch.
        config: the settings of the converted model.
        dtype: the low precision.

    Raises:
        UnsupportedModelError: the family is refused.
    """
    low = copy_of(model).to(dtype)
    single = copy_of(low).to(torch.float32)
    actual = [run_batch(convert(copy_of(low), config), batch) for batch in batches]
    unmodified = [run_reference(low, batch, hooks=False) for batch in batches]
    exact = [run_reference(single, batch, hooks=False) for batch in batches]
    return DriftReport(
        model_name=type(find_causal_lm(model)).__name__,
        dtype=dtype,
        drift=_drift(actual, exact),
        unmodified_drift=_drift(unmodified, exact),
        loss=_mean_loss(actual),
        unmodified_loss=_mean_loss(unmodified),
        reference_loss=_mean_loss(exact),
    )


def run_reference(
    model: nn.Module, batch: Batch, *, accumulation: int = 1, hooks: bool = True
) -> Gradients:
    """Run an unmodified copy of `model` over `batch`; arguments and hooks as in `compare`."""
    reference = copy_of(model)
    find_causal_lm(reference).set_attn_implementation(reference_attention(model))
    return run_batch(reference, batch, accumulation=accumulation, hooks=hooks)


def reference_attention(model: nn.Module) -> str:
    """Attention implementation that supports all of the unmodified model's features.

    "sdpa" if Transformers allows it, else "eager": SDPA has no soft-capped scores and no attention
    sinks.
    """
    causal_lm = find_causal_lm(model)
    config = causal_lm.config.get_text_config(decoder=True)
    softcap = getattr(config, "attn_logit_softcapping", None) is not None
    return "sdpa" if causal_lm._supports_sdpa and not softcap else "eager"


def run_batch(
    model: nn.Module, batch: Batch, *, accumulation: int = 1, hooks: bool = False
) -> Gradients:
    """Forward and backward of `batch`, in float64 throughout if the weights are float64.

    Args:
        model: in training mode and without gradients; its `.grad`s are left in place.
        batch: keyword arguments of the model's forward.
        accumulation: micro-steps into which the rows are split, see `compare`.
        hooks: whether to run with `GradientHooks`, as `compare` and `run_reference` do.
    """
    is_double = find_causal_lm(model).dtype == torch.float64
    loss = 0.0
    hooked = GradientHooks(model) if hooks else None
    with (
        float64_everywhere() if is_double else contextlib.nullcontext(),
        hooked or contextlib.nullcontext(),
    ):
        for micro_batch in _micro_batches(batch, accumulation):
            output = model(**micro_batch)
            one = output[0] if isinstance(output, tuple) else output["loss"]  # as the Trainer does
            one.backward()
            loss += one.item()
    return Gradients(
        loss,
        {name: p.grad for name, p in model.named_parameters() if p.requires_grad},
        {} if hooked is None else hooked.calls,
    )


def _micro_batches(batch: Batch, accumulation: int) -> Iterator[dict[str, Any]]:
    """Split the rows into parts, each with the label count of all parts."""
    if accumulation == 1:
        yield dict(batch)
        return
    rows = next(iter(batch.values())).shape[0]
    assert rows >= accumulation, f"{rows} rows cannot be split into {accumulation} micro-steps"
    counted: dict[str, Any] = {}
    if "shift_labels" in batch or batch.get("labels", batch["input_ids"][0]).ndim == 2:
        labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][:, 1:]
        counted["num_items_in_batch"] = (labels != -100).sum()
    edges = [rows * index // accumulation for index in range(accumulation + 1)]
    for start, stop in itertools.pairwise(edges):
        part = {name: tensor[start:stop] for name, tensor in batch.items()}
        yield {**part, **counted}


def parameter_errors(actual: Gradients, expected: Gradients) -> tuple[ParameterError, ...]:
    """Errors of all parameters, the worst first; see [Note: how an error is measured]."""
    assert actual.by_name.keys() == expected.by_name.keys(), "conversion changed parameter names"
    largest = max((_scale(grad) for grad in expected.by_name.values()), default=0.0)
    floor = GRADIENT_FLOOR * largest
    errors = [
        ParameterError(name, _error(actual.by_name[name], grad, floor), _scale(grad))
        for name, grad in expected.by_name.items()
    ]
    return tuple(sorted(errors, key=lambda item: item.error, reverse=True))


def _hooks_differ(actual: Gradients, expected: Gradients) -> tuple[str, ...]:
    """Names of parameters with a gradient whose hooks ran another number of times."""
    return tuple(
        name
        for name, grad in expected.by_name.items()
        if grad is not None and actual.hook_calls.get(name) != expected.hook_calls.get(name)
    )


def _scale(grad: Tensor | None) -> float:
    """Largest finite entry; 0 for no gradient."""
    if grad is None or grad.numel() == 0:
        return 0.0
    return torch.nan_to_num(grad.detach(), nan=0.0).abs().max().item()


def _error(actual: Tensor | None, expected: Tensor | None, floor: float) -> float:
    """Error of one gradient; no gradient counts as a gradient of zeros."""
    if actual is None and expected is None:
        return 0.0
    given = actual if actual is not None else expected
    assert given is not None, "one of the two was just seen to be a tensor"
    actual = torch.zeros_like(given) if actual is None else actual
    expected = torch.zeros_like(given) if expected is None else expected
    actual = actual.to(expected.device)  # those of host-resident weights are on the host
    if not torch.equal(actual.isnan(), expected.isnan()):
        return math.inf
    difference = _scale(actual.double() - expected.double())
    scale = max(_scale(expected), floor)
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0.0 else math.inf


def _relative(actual: float, expected: float) -> float:
    if math.isnan(actual) or math.isnan(expected):
        return 0.0 if math.isnan(actual) and math.isnan(expected) else math.inf
    return abs(actual - expected) / max(abs(expected), 1e-300) if actual != expected else 0.0


def _mean_loss(runs: Sequence[Gradients]) -> float:
    return sum(run.loss for run in runs) / len(runs)


def _drift(runs: Sequence[Gradients], exact: Sequence[Gradients]) -> float:
    """Norm of the differences over the norm of the exact gradients, all parameters at once."""
    squared_difference = squared_norm = 0.0
    for run, reference in zip(runs, exact, strict=True):
        for name, grad in reference.by_name.items():
            if grad is None:
                continue
            actual = run.by_name[name]
            # Gradients of host-resident weights are on the host.
            actual = torch.zeros_like(grad) if actual is None else actual.to(grad.device)
            squared_difference += (actual.double() - grad.double()).square().sum().item()
            squared_norm += grad.double().square().sum().item()
    return math.sqrt(squared_difference / squared_norm) if squared_norm else 0.0
