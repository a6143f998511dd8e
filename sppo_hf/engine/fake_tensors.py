"""Fake tensors that are cheap: what an operation returns is looked up from the second time on.

torch's own fake tensors take about 100 us for an operation, and a layer that is traced runs a
thousand, most of them on the same shapes again and again: at every layer, at every trace. So a
`Fake` asks them once in a process for each operation and shapes, and remembers the shapes of the
answer; then an operation takes about 5 us.

A `Fake` is on the CPU, for autocast and for code that asks, and shares memory that is not there
with its views. Not covered: symbolic sizes, other devices, what changes a tensor's shape in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from sppo_hf.engine.selective import operation, storage_key, tensors_in

__all__ = ["Fake", "fake_like", "run_fake"]

_CPU, _META = torch.device("cpu"), torch.device("meta")

_MOST_REMEMBERED = 50_000
"""Operations; a model's layers have a few hundred different ones."""


class Fake(Tensor):
    """A tensor with shape, strides and dtype, and without memory."""

    # Functions in Python need not be told.
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation; see `run_fake`."""
        return run_fake(func, args, kwargs or {})

    def tolist(self) -> NoReturn:
        """Raises what `item` raises; torch refuses it to classes of tensors in its own words."""
        raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)


def fake_like(tensor: Tensor) -> Tensor:
    """A new one of the shape, strides, dtype and `requires_grad` of a tensor."""
    fake = _make(tensor.shape, tensor.stride(), tensor.dtype, 0)
    return fake.requires_grad_(tensor.requires_grad)


def run_fake(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an operation returns: fake tensors, unless it is given real ones alone.

    What is made of constants has values, which code may ask for, until what is fake is written into
    one: it counts as fake from then on, and so do its views.

    Raises:
        DataDependentOutputException: it tells Python a value; likewise
            DynamicOutputShapeException where its result's shape depends on one, and
            UnsupportedOperatorException where nothing is known of it.
    """
    given = list(tensors_in((*args, *kwargs.values())))
    if given and not any(map(_is_fake, given)):
        return func(*args, **kwargs)
    for tensor in _written(func, args, kwargs):
        if not isinstance(tensor, Fake):
            tensor.untyped_storage().holds_fake = True  # type: ignore[attr-defined]
    # Numbers that are divided, or filled in, have the default dtype.
    key = (func, torch.get_default_dtype(), _key(args), _key(kwargs.items()))
    answer = _answers.get(key)
    if answer is None:
        if len(_answers) >= _MOST_REMEMBERED:
            _answers.clear()
        answer = _answers[key] = _ask(func, args, kwargs)
    if isinstance(answer, _Result):
        return _give(answer, given)
    if isinstance(answer, (list, tuple)):
        return type(answer)(_give(x, given) if isinstance(x, _Result) else x for x in answer)
    return answer


def _is_fake(tensor: Tensor) -> bool:
    """Whether nobody knows its values."""
    if isinstance(tensor, Fake):
        return True
    # A storage keeps its Python object, and so what was noted there, as long as it lives.
    strided = tensor.layout is torch.strided
    return strided and hasattr(tensor.untyped_storage(), "holds_fake")


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Tensors among the arguments that an operation writes to."""
    if not func._schema.is_mutable:
        return
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[at] if at < len(args) else kwargs.get(argument.name)
            yield from tensors_in((given,))


class _Result(NamedTuple):
    """One tensor that an operation returns."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    base: int | None
    """The given tensor that it is a view of, if any."""
    is_base: bool
    """Whether it is this tensor itself."""


_answers: dict[Any, Any] = {}


def _key(values: Iterable[Any]) -> tuple[Any, ...]:
    """All that a result's shape may depend on."""
    return tuple(
        (value.shape, value.stride(), value.storage_offset(), value.dtype)
        if isinstance(value, Tensor)
        else _key(value)
        if isinstance(value, (list, tuple))
        # 1, 1.0 and True are equal and not the same.
        else (type(value), value)
        for value in values
    )


def _give(result: _Result, given: Sequence[Tensor]) -> Tensor:
    if result.base is None:
        return _make(result.shape, result.stride, result.dtype, result.offset)
    base = given[result.base]
    if result.is_base:
        return base
    view = _make(result.shape, result.stride, result.dtype, result.offset)
    torch._functionalize_unsafe_set(view, base)
    return view


def _make(shape: Any, stride: Any, dtype: torch.dtype, offset: int) -> Tensor:
    return Tensor._make_wrapper_subclass(
        Fake, shape, strides=stride, storage_offset=offset, dtype=dtype, device=_CPU
    )


def _ask(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Finds out what an operation returns."""
    if torch.Tag.inplace_view in func.tags:
        raise UnsupportedOperatorException(func)
    storages: dict[int | None, torch.UntypedStorage] = {}

    def meta(tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key not in storages:
            num_bytes = tensor.untyped_storage().nbytes()
            storages[key] = torch.UntypedStorage(num_bytes, device=_META)
        made = torch.empty(0, dtype=tensor.dtype, device=_META)
        return made.set_(storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())

    if _is_alike_on_meta(func):
        given = _each(meta, args), {name: _each(meta, value) for name, value in kwargs.items()}
        if "device" in kwargs:
            given[1]["device"] = _META
        out = func(*given[0], **given[1])
    else:
        mode = _mode()

        def fake(tensor: Tensor) -> Tensor:
            return FakeTensor(mode, meta(tensor), _CPU)

        given = _each(fake, args), {name: _each(fake, value) for name, value in kwargs.items()}
        with mode:
            if func is torch.ops.aten._grouped_mm.default:
                out = _grouped_product(*given[0], **given[1])
            else:
                out = func(*given[0], **given[1])
    tensors = list(tensors_in((*given[0], *given[1].values())))

    def result(tensor: Tensor) -> _Result:
        where = storage_key(tensor)
        bases = [i for i, x in enumerate(tensors) if storage_key(x) == where]
        same = [i for i in bases if tensors[i] is tensor]
        return _Result(
            shape=tensor.shape,
            stride=tensor.stride(),
            dtype=tensor.dtype,
            offset=int(tensor.storage_offset()),
            base=next(iter((*same, *bases)), None),
            is_base=bool(same),
        )

    return _each(result, (out,))[0]


def _each(make: Callable[[Tensor], Any], values: Sequence[Any]) -> Any:
    """The same with all tensors replaced, also in lists among them."""
    if isinstance(values, Tensor):
        return make(values)
    if isinstance(values, (list, tuple)):
        return type(values)([_each(make, value) for value in values])
    return values


@functools.cache
def _mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


@functools.cache
def _is_alike_on_meta(func: Any) -> bool:
    """Whether an operation returns the same on the meta device, where it is cheaper to ask."""
    return func.is_view or torch.Tag.pointwise in func.tags or operation(func).name in _ALIKE


_ALIKE = frozenset(
    f"aten::{name}"
    for name in (
        *("mm", "bmm", "addmm", "baddbmm", "_softmax", "_softmax_backward_data"),
        *("_unsafe_view", "_to_copy", "clone", "cat", "stack", "sum", "mean"),
        *("empty", "zeros", "ones", "new_empty", "new_zeros", "new_ones", "new_full"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "slice_backward"),
        *("select_backward", "fill_", "zero_", "copy_"),
    )
)


def _grouped_product(left: Tensor, right: Tensor, offs: Tensor | None = None, **_: Any) -> Tensor:
    """The shape of what `torch._grouped_mm` returns; torch's own check wants 16 bits."""
    if left.dim() == right.dim() == 2:
        assert offs is not None, "groups of a summed dim have ends"
        return left.new_empty(offs.shape[0], left.shape[0], right.shape[1])
    return left.new_empty(*left.shape[:-1], right.shape[-1])
