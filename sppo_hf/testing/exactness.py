"""Compare a converted model with the unmodified one: loss and every gradient.

`compare` runs two copies of a model over the same batch, one untouched and one converted, and
reports the worst difference. The tests' matrix, the table of families and `sppo check` are all made
of it.

[Note: how an error is measured]
The error of a parameter is ``max|g - r| / max(max|r|, 1e-4 * G)``, where r is the reference
gradient, g ours and G the largest entry of all reference gradients. The floor is there for
gradients that are zero in exact arithmetic: the bias of a key projection without rotary shifts all
scores of a query alike, so both gradients are rounding noise, and noise has no relative error.

[Note: hooks in the harness]
Both models run with hooks on every parameter (see `GradientHooks`), so every comparison also shows
that hooks run once per backward, on the whole gradient.

[Note: why float64 has to be enforced]
A model whose weights are float64 does not compute in float64. Transformers raises norms, rotary
tables, router logits, attention's softmax and the loss to float32 on purpose (`x.float()`,
`x.to(torch.float32)`, `softmax(..., dtype=torch.float32)`), which for a float64 model is a step
*down*: two orders of the same sum then differ by 1e-7, and a wrong chunk whose error is 1e-8 goes
unseen. Under `float64_everywhere` every such step stays in float64, for the unmodified model and
for ours alike, so that the only differences left are those of float64 rounding (1e-13 or so), and a
tolerance of 1e-9 means something.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.convert import convert, get_engine
from sppo_hf.engine.step_observer import StepObserver
from sppo_hf.engine.structure import find_causal_lm
from sppo_hf.planning.plan import Plan


class _Torch(types.ModuleType):
    """What modules find as `torch` under `float64_everywhere`."""

    def __getattr__(self, name: str) -> Any:
        """What torch has got since `follow`."""
        return getattr(sys.modules["torch"], name)

    def follow(self) -> None:
        """Be as torch is now: a copy, so that nothing is slower to find."""
        vars(self).clear()
        vars(self).update(vars(torch), float32=torch.float64, float=torch.float64)


_torch = _Torch("torch")
"""One for all time: code that was compiled with another is compiled again."""

_float64_lock = threading.Lock()
_float64_depth = 0
_leave_float64 = contextlib.ExitStack()


@contextlib.contextmanager
def float64_everywhere() -> Iterator[None]:
    """While active, whatever asks torch for float32 gets float64, in backward too.

    Covers `Tensor.float()`, `torch.float32` wherever a module's code names it, default arguments of
    functions included, and the default dtype of newly made tensors. Integer dtypes and half
    precision are left alone. See [Note: why float64 has to be enforced].

    It holds for all threads of the process, which can enter at once, and costs nothing while it
    does: no call is looked at, but the names `torch` and `float32` mean something else in all
    modules that are imported by now. Not covered: torch's own code, functions that import torch
    when they run, and values that were made of `torch.float32` before (a table, say).
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
    _torch.follow()
    _leave_float64.callback(_rename, names, within=False)
    _rename(names, within=True)


class _Name(NamedTuple):
    """What means something else under `float64_everywhere`."""

    owner: dict[str, Any] | types.FunctionType
    """A module's namespace, or a function with default arguments."""
    name: str
    without: Any
    within: Any


def _rename(names: Iterable[_Name], *, within: bool) -> None:
    for owner, name, *meanings in names:
        if isinstance(owner, dict):
            owner[name] = meanings[within]
        else:
            setattr(owner, name, meanings[within])


_modules: dict[str, types.ModuleType] = {}
"""Those that were looked at."""
_found: list[_Name] = []
"""What was found in them."""
_imported_meanwhile = False
"""Whether another thread imported a module that was looked at: it has more to come."""


def _names() -> list[_Name]:
    """Those of all modules; only what was imported since the last call is looked at."""
    global _imported_meanwhile
    # The newest come last. A forked process copies a page for each module that it looks at.
    more = len(sys.modules) - len(_modules)
    modules = list(itertools.islice(reversed(sys.modules.items()), max(more, 0) + 1))
    name, module = modules.pop()
    known = _modules
    if _imported_meanwhile or more < 0 or known.get(name) is not module:
        modules, known = list(sys.modules.items()), dict(_modules)
        _modules.clear()
    _imported_meanwhile = False
    for name, module in modules:
        if known.get(name) is not module:
            _found.extend(_names_of(name, module))
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            _imported_meanwhile = True
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
    """Functions and methods that `value` of a module is, and what they were wrapped around."""
    values = [value]
    # By its type, and by what it has itself: some classes import what they need when asked.
    if issubclass(type(value), type) and vars(value).get("__module__") == module_name:
        values = list(vars(value).values())
    for function in values:
        if type(function) in (staticmethod, classmethod):
            function = function.__func__
        while type(function) is types.FunctionType:
            yield function
            function = vars(function).get("__wrapped__")


def _defaults(function: types.FunctionType) -> Iterator[_Name]:
    """Default arguments of `function`, if float32 is among them."""
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
"""Low precision: how much farther than the unmodified model's ours may be from float32."""

Batch = Mapping[str, Tensor]


class GradientHooks:
    """Hooks on every trained parameter of a model: one changes gradients, both count their calls.

    The change, `g * (1 + |g| / max|g|)`, is not linear, so it comes out otherwise on a part of the
    gradient or when it is made twice. It is one-to-one and keeps the gradient's size, so relative
    errors stay what they are. Use as a context; `forward_calls` lasts longer.
    """

    def __init__(self, model: nn.Module, *, after_accumulation: bool = True) -> None:
        """Prepare hooks on `model`; post-accumulate hooks only with `after_accumulation`."""
        self._after_accumulation = after_accumulation
        self._named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._handles: list[RemovableHandle] = []
        self.calls: dict[str, tuple[int, int]] = {name: (0, 0) for name, _ in self._named}
        """Calls of the tensor hook and of the post-accumulate hook, by parameter name."""

    def __enter__(self) -> GradientHooks:
        for name, parameter in self._named:
            change = functools.partial(self._change, name)
            self._handles.append(parameter.register_hook(change))
            if self._after_accumulation:
                count = functools.partial(self._count, name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(count))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

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
    """Difference of one parameter's gradient."""

    name: str
    """The parameter's name."""
    error: float
    """See [Note: how an error is measured]; inf where only one side has a gradient or a NaN."""
    scale: float
    """Largest entry of the reference gradient."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """What one run left behind."""

    loss: float
    """The loss, summed over the accumulated micro-steps."""
    by_name: Mapping[str, Tensor | None]
    """Gradients by parameter name; None where a trainable parameter got none."""
    hook_calls: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """See `GradientHooks.calls`; empty where no hooks were set."""


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
    """Attention forwards that the converted model really ran."""
    tolerance: float
    hooks_differ: tuple[str, ...] = ()
    """Parameters whose hooks did not run as often as the unmodified model's."""

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
        """Whether everything is within the tolerance, and hooks ran as often as they should."""
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
    """Norm of (our gradients minus float32's) over the norm of float32's."""
    unmodified_drift: float
    """The same of the unmodified model in the low precision."""
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
        """Whether ours is no farther from float32 than allowed."""
        return self.drift <= self.allowed_drift


class _PlanWatcher(StepObserver):
    """Remembers the last plan, to know the number of chunks."""

    def __init__(self) -> None:
        self.num_chunks = 0

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
    converted = convert(_copy_of(model), config, observer=watcher)
    engine = get_engine(converted)
    assert engine is not None, "convert() left no engine behind"
    ours = run_batch(converted, batch, accumulation=accumulation, hooks=True)

    theirs = reference or run_reference(model, batch, accumulation=accumulation)
    return ExactnessReport(
        model_name=type(find_causal_lm(model)).__name__,
        dtype=dtype,
        reference_attention=reference_attention(model),
        loss=ours.loss,
        reference_loss=theirs.loss,
        parameters=parameter_errors(ours, theirs),
        num_chunks=watcher.num_chunks,
        attention_forwards=engine.counters.get("attention_forwards", 0),
        tolerance=TOLERANCE[dtype] if tolerance is None else tolerance,
        hooks_differ=_hooks_differ(ours, theirs),
    )


def compare_drift(
    model: nn.Module,
    batches: Sequence[Batch],
    config: SPPOConfig,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> DriftReport:
    """Compare distances from float32: ours in `dtype`, and the unmodified model's in `dtype`.

    Two orders of rounding differ by chance, so give several batches; distances are root mean
    squares over them. Where tokens choose experts, a rounding may choose another one, and distances
    say little: use a model of one expert.

    Args:
        model: a float32 model; its weights are rounded to `dtype` for all three runs, so that
            distances show the arithmetic alone. It is copied, not changed.
        batches: keyword arguments of the model's forward, one mapping a batch.
        config: the settings of the converted model.
        dtype: the low precision.

    Raises:
        UnsupportedModelError: the family is refused.
    """
    low = _copy_of(model).to(dtype)
    single = _copy_of(low).to(torch.float32)
    ours: list[Gradients] = []
    unmodified: list[Gradients] = []
    exact: list[Gradients] = []
    for batch in batches:
        ours.append(run_batch(convert(_copy_of(low), config), batch))
        unmodified.append(run_reference(low, batch, hooks=False))
        exact.append(run_reference(single, batch, hooks=False))
    return DriftReport(
        model_name=type(find_causal_lm(model)).__name__,
        dtype=dtype,
        drift=_drift(ours, exact),
        unmodified_drift=_drift(unmodified, exact),
        loss=_mean_loss(ours),
        unmodified_loss=_mean_loss(unmodified),
        reference_loss=_mean_loss(exact),
    )


def run_reference(
    model: nn.Module, batch: Batch, *, accumulation: int = 1, hooks: bool = True
) -> Gradients:
    """Run an unmodified copy of `model` over `batch`; arguments and hooks as in `compare`."""
    reference = _copy_of(model)
    find_causal_lm(reference).set_attn_implementation(reference_attention(model))
    return run_batch(reference, batch, accumulation=accumulation, hooks=hooks)


def _copy_of(model: nn.Module) -> nn.Module:
    """A deep copy; for the empty tables of every module, which are most of it, in half the time."""
    tables = (table for module in model.modules() for table in vars(module).values())
    empty = {id(x): type(x)() for x in tables if type(x) in _TABLES and not x}
    return copy.deepcopy(model, empty)


_TABLES = (dict, set, OrderedDict)


def reference_attention(model: nn.Module) -> str:
    """Attention implementation that computes all of the unmodified model's features.

    "sdpa" where Transformers allows it, else "eager": SDPA knows neither soft-capped scores nor
    attention sinks.
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
            output.loss.backward()
            loss += output.loss.item()
    return Gradients(
        loss,
        {name: p.grad for name, p in model.named_parameters() if p.requires_grad},
        {} if hooked is None else hooked.calls,
    )


def _micro_batches(batch: Batch, accumulation: int) -> Iterator[dict[str, Any]]:
    """Split the rows, and tell each part how many labels all parts have."""
    if accumulation == 1:
        yield dict(batch)
        return
    rows = next(iter(batch.values())).shape[0]
    assert rows >= accumulation, f"{rows} rows cannot be split into {accumulation} micro-steps"
    if "shift_labels" in batch:
        num_items = (batch["shift_labels"] != -100).sum()
    else:
        num_items = (batch["labels"][:, 1:] != -100).sum()
    for start, stop in _even_bounds(rows, accumulation):
        part = {name: tensor[start:stop] for name, tensor in batch.items()}
        yield {**part, "num_items_in_batch": num_items}


def _even_bounds(rows: int, parts: int) -> list[tuple[int, int]]:
    edges = [rows * index // parts for index in range(parts + 1)]
    return list(itertools.pairwise(edges))


def parameter_errors(ours: Gradients, theirs: Gradients) -> tuple[ParameterError, ...]:
    """Errors of all parameters, the worst first; see [Note: how an error is measured]."""
    assert ours.by_name.keys() == theirs.by_name.keys(), "conversion changed parameter names"
    largest = max((_scale(grad) for grad in theirs.by_name.values()), default=0.0)
    floor = GRADIENT_FLOOR * largest
    errors = [
        ParameterError(name, _error(ours.by_name[name], grad, floor), _scale(grad))
        for name, grad in theirs.by_name.items()
    ]
    return tuple(sorted(errors, key=lambda item: item.error, reverse=True))


def _hooks_differ(ours: Gradients, theirs: Gradients) -> tuple[str, ...]:
    """Names of parameters with a gradient whose hooks ran more or less often than theirs."""
    return tuple(
        name
        for name, grad in theirs.by_name.items()
        if grad is not None and ours.hook_calls.get(name) != theirs.hook_calls.get(name)
    )


def _scale(grad: Tensor | None) -> float:
    """Largest finite entry; 0 for no gradient."""
    if grad is None or grad.numel() == 0:
        return 0.0
    return torch.nan_to_num(grad.detach(), nan=0.0).abs().max().item()


def _error(ours: Tensor | None, theirs: Tensor | None, floor: float) -> float:
    """Error of one gradient. No gradient at all and a gradient of zeros are the same thing."""
    if ours is None and theirs is None:
        return 0.0
    given = ours if ours is not None else theirs
    assert given is not None, "one of the two was just seen to be a tensor"
    ours = torch.zeros_like(given) if ours is None else ours
    theirs = torch.zeros_like(given) if theirs is None else theirs
    if not torch.equal(ours.isnan(), theirs.isnan()):
        return math.inf
    difference = _scale(ours.double() - theirs.double())
    scale = max(_scale(theirs), floor)
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0.0 else math.inf


def _relative(ours: float, theirs: float) -> float:
    if math.isnan(ours) and math.isnan(theirs):
        return 0.0
    if math.isnan(ours) or math.isnan(theirs):
        return math.inf
    return abs(ours - theirs) / max(abs(theirs), 1e-300) if ours != theirs else 0.0


def _mean_loss(runs: Sequence[Gradients]) -> float:
    return sum(run.loss for run in runs) / len(runs)


def _drift(runs: Sequence[Gradients], exact: Sequence[Gradients]) -> float:
    """Norm of the differences over the norm of the exact gradients, all parameters at once."""
    squared_difference = squared_norm = 0.0
    for run, reference in zip(runs, exact, strict=True):
        for name, grad in reference.by_name.items():
            if grad is None:
                continue
            ours = run.by_name[name]
            # Gradients of weights that rest on the host are there.
            ours = torch.zeros_like(grad) if ours is None else ours.to(grad.device)
            squared_difference += (ours.double() - grad.double()).square().sum().item()
            squared_norm += grad.double().square().sum().item()
    return math.sqrt(squared_difference / squared_norm) if squared_norm else 0.0
