"""Calls of a decoder layer over all tokens, cut into calls on one chunk after the other.

With order "by_layer" the untouched base model runs once over the whole sequence, and each decoder
layer's hooks run the layer's forward chunk by chunk. Here is what that takes: which dims of a
layer's arguments are the tokens (`layer_examples`), and the way from whole tensors to those of a
chunk and back (`SlicedCall`). It knows neither attention nor what becomes of saved activations.

[Note: which dims are the tokens] A size says nothing: a width or a number of heads may happen to be
the number of tokens. So the model's own code is asked: it runs on two tokens with layers that hand
hidden states on, and a dim that is two there and T in the real call is the tokens. A layer must
return hidden states as it gets them, alone or as the first of a tuple with nothing else in it;
anything else cannot be joined, and such a model runs chunk by chunk.

[Note: hidden states between layers] A layer has one buffer `[B, T, D]` as input, one as output.
An output is copied into its buffer as soon as a chunk is done, and a gradient is taken from (or
written into) a buffer's slice when a chunk's backward asks for it (or has it), so that at no time
all chunks' tensors wait beside the buffer that they are to be joined in. Between a chunk's tensors
and the buffers autograd sees empty tensors, which only say what comes after what.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from sppo_hf.engine.stages import AbsentLayer
from sppo_hf.engine.structure import ModelParts
from sppo_hf.errors import first_line
from sppo_hf.planning.chunk_bounds import Bounds

# B batch rows, C tokens of a chunk, T tokens of the sequence, D model width.

EXAMPLE_TOKENS = 2
"""Tokens of the call that shows which dims are the tokens; one where there are two in all."""


# Transformers sets it on a model when it puts hooks on layers and routers to collect their outputs,
# once, at the first call that asks for them; that must not be one whose layers are others.
_CAPTURES = "_output_capturing_hooks_installed"


class CannotRunByLayer(Exception):
    """The model cannot run layer by layer; the message is the reason, as a part of a sentence."""


class InnermostHook(functools.partial[Any]):
    """A hook of ours: by layer, no hook of others may stand between it and the layer's forward.

    Theirs are about the layer's call over all tokens: FSDP2's gather and free its weights.
    """


def move_hooks_innermost(module: nn.Module) -> None:
    """Move our hooks of `module` behind all others before forward, and before all others after."""
    for hooks, last in ((module._forward_pre_hooks, True), (module._forward_hooks, False)):
        ours = [key for key, hook in hooks.items() if isinstance(hook, InnermostHook)]
        for key in ours:
            hooks.move_to_end(key, last=last)  # type: ignore[attr-defined]


class PrefixLength:
    """A cache that holds nothing and says how many tokens came before the chunk.

    Llama 4 scales queries by their index and counts it from what its cache holds.
    """

    is_compileable = False

    def __init__(self, tokens: int) -> None:
        """Come after `tokens` tokens."""
        self._tokens = tokens

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """The tokens before the chunk."""
        return self._tokens

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: Any, *_: Any, **__: Any) -> tuple[Any, int]:
        """Number of keys and index of the first."""
        return self._tokens + query_length, 0

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The chunk's keys and values as they are: attention finds the others."""
        return keys, values


@dataclass(frozen=True, slots=True)
class Example:
    """The arguments of a layer for `EXAMPLE_TOKENS` tokens."""

    shapes: tuple[torch.Size | None, ...]
    """Of every leaf; None of what is no tensor."""
    spec: TreeSpec

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Example:
        """Take note of a call."""
        leaves, spec = tree_flatten((args, kwargs))
        return cls(tuple(x.shape if isinstance(x, Tensor) else None for x in leaves), spec)


NORM = -1
"""The final norm, where layers are numbered from zero."""


class _Attributes:
    """Of a module that takes another's place: what it lacks is the other's (a weight's dtype)."""

    def __init__(self, *args: Any, other: nn.Module, note: Callable[[Example], None]) -> None:
        super().__init__(*args)
        self._note = note
        self._other = (other,)  # in a tuple: it is no part of this module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            return getattr(self.__dict__["_other"][0], name)


class _WatchedNorm(_Attributes, nn.Module):
    """Takes the place of the final norm, notes how it is called, and hands its input on."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return `hidden` as it is."""
        self._note(Example.of((hidden, *args), kwargs))
        return hidden


class _Watched(_Attributes, AbsentLayer):
    """Takes the place of a layer, notes how it is called, and hands hidden states on."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states as they are, in a tuple where the layer returns one."""
        self._note(Example.of(args, kwargs))
        return super().forward(*args, **kwargs)


def layer_examples(parts: ModelParts, run_base: Callable[[], object]) -> dict[int, Example]:
    """How the base model calls each decoder layer, and `NORM`; none of them runs.

    Args:
        parts: The model.
        run_base: Runs the base model on `EXAMPLE_TOKENS` tokens, with the inputs that it is about
            to get, cut short.

    Raises:
        CannotRunByLayer: The base model does not run without its layers.
    """
    examples: dict[int, Example] = {}

    def note(index: int) -> Callable[[Example], None]:
        return lambda seen: examples.update({index: seen})

    owner = next(
        child
        for child in parts.decoder.children()
        if isinstance(child, nn.ModuleList) and parts.layers[0] in child.children()
    )
    norm = parts.final_norm()
    stand_ins: list[tuple[nn.Module, str, nn.Module]] = [
        (owner, name, _Watched(layer, other=layer, note=note(index)))
        for index, (name, layer) in enumerate(zip(owner._modules, parts.layers, strict=True))
    ]
    stand_ins += [
        (parts.decoder, name, _WatchedNorm(other=child, note=note(NORM)))
        for name, child in parts.decoder.named_children()
        if child is norm
    ]
    before = [module._modules[name] for module, name, _ in stand_ins]
    models = {parts.base, parts.decoder}
    uncaptured = [model for model in models if not getattr(model, _CAPTURES, False)]
    try:
        for model in uncaptured:
            setattr(model, _CAPTURES, True)
        for module, name, stand_in in stand_ins:
            module._modules[name] = stand_in
        with torch.no_grad():
            run_base()
    except torch.OutOfMemoryError:
        raise  # says nothing of the model
    # The model's own code, which is given what its layers did not compute, fails with anything.
    except Exception as error:
        raise CannotRunByLayer(
            f"how {parts.name} calls its layers cannot be seen without running them "
            f"({first_line(error)})"
        ) from error
    finally:
        for (module, name, _), own in zip(stand_ins, before, strict=True):
            module._modules[name] = own
        for model in uncaptured:
            delattr(model, _CAPTURES)
    return examples


class SlicedCall:
    """One call of a module over all tokens, given chunk by chunk, and its joined output."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        bounds: Bounds,
        example: Example | None,
        where: str,
    ) -> None:
        """Prepare to cut a call.

        Args:
            args: The module's arguments.
            kwargs: Its keyword arguments.
            bounds: The chunks, in tokens; a call of a single chunk is left as it is.
            example: How the module is called for `EXAMPLE_TOKENS` tokens; None for one chunk.
            where: What is cut, for messages.

        Raises:
            CannotRunByLayer: The tokens cannot be told from the arguments' other dims.
        """
        self._bounds = bounds
        self._where = where
        self._whole: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._joint: TokenJoin | None = None
        self._hidden_shape: torch.Size = torch.Size()
        if len(bounds) == 1:
            return
        assert example is not None, "a call that is cut has an example"
        leaves, spec = tree_flatten((args, kwargs))
        if spec != example.spec:
            raise CannotRunByLayer(f"{where} is called with other arguments for fewer tokens")
        tokens = bounds[-1][1]
        hidden = args[0] if args else kwargs.get("hidden_states")
        dims = [_token_dim(*pair, tokens) for pair in zip(leaves, example.shapes, strict=True)]
        unclear = [leaf for leaf, dim in zip(leaves, dims, strict=True) if dim == _UNCLEAR]
        if unclear:
            raise CannotRunByLayer(
                f"{where} is given a tensor of shape {tuple(unclear[0].shape)}, which has no dim "
                f"that is the {tokens} tokens alone"
            )
        dim = next((d for x, d in zip(leaves, dims, strict=True) if x is hidden), None)
        if dim is None:
            raise CannotRunByLayer(f"{where} is given hidden states without a dim of tokens")
        self._spec = spec
        self._cuts: list[Callable[[int, int], Any]] = [
            _cut(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)
        ]
        self._dim = dim
        self._whole = None
        self._joint = TokenJoin(dim, tokens, len(bounds))

    def take(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the `index`-th chunk; chunks come in order, each once."""
        if self._whole is not None:
            whole, self._whole = self._whole, None
            return whole
        start, end = self._bounds[index]
        leaves = [cut(start, end) for cut in self._cuts]
        if index == len(self._bounds) - 1:
            self._cuts = []  # the whole tensors are theirs who made them
        args, kwargs = tree_unflatten(leaves, self._spec)
        self._hidden_shape = (args[0] if args else kwargs["hidden_states"]).shape
        return args, kwargs

    def put(self, index: int, output: Any) -> Tensor:
        """Take the output of the `index`-th chunk; returns its hidden states.

        Raises:
            CannotRunByLayer: It has more in it than hidden states.
        """
        assert self._joint is not None, "the output of a call that was cut"
        hidden, *others = output if isinstance(output, tuple) else (output,)
        if any(isinstance(leaf, Tensor) for leaf in tree_flatten(others)[0]):
            raise CannotRunByLayer(f"{self._where} returns more than hidden states")
        if not isinstance(hidden, Tensor) or hidden.shape != self._hidden_shape:
            raise CannotRunByLayer(
                f"{self._where} returns hidden states of another shape than it gets"
            )
        self._others = tuple(others) if isinstance(output, tuple) else None
        self._joint.put(hidden, *self._bounds[index])
        return hidden

    def joined(self) -> Any:
        """The module's output over all tokens."""
        assert self._joint is not None, "the output of a call that was cut"
        hidden = self._joint.close()
        return hidden if self._others is None else (hidden, *self._others)


_UNCLEAR = -1


def _token_dim(leaf: Any, example: torch.Size | None, tokens: int) -> int | None:
    """The dim of `leaf` that is the tokens; None if there is none, `_UNCLEAR` if it is no one dim.

    See [Note: which dims are the tokens].
    """
    if not isinstance(leaf, Tensor) and example is None:
        return None
    if not isinstance(leaf, Tensor) or example is None or len(example) != leaf.ndim:
        return _UNCLEAR
    changed = [dim for dim in range(leaf.ndim) if example[dim] != leaf.shape[dim]]
    if not changed:
        return None
    dim = changed[0]
    clear = len(changed) == 1 and example[dim] <= EXAMPLE_TOKENS and leaf.shape[dim] == tokens
    return dim if clear else _UNCLEAR


def _cut(leaf: Any, dim: int | None) -> Callable[[int, int], Any]:
    """What gives a leaf's part of the tokens `[start, end)`."""
    if isinstance(leaf, PrefixLength):
        return lambda start, _: PrefixLength(start)
    if dim is None:
        return lambda *_: leaf
    return Pieces(leaf, dim).take


def _part(x: Tensor, dim: int, start: int, end: int) -> Tensor:
    """Tokens `[start, end)`, as dense as `x` is: layers take views of what they are given."""
    part = x.narrow(dim, start, end - start)
    return part.contiguous() if x.is_contiguous() else part


class Pieces:
    """A tensor to be taken apart along the tokens; see [Note: hidden states between layers]."""

    def __init__(self, whole: Tensor, dim: int) -> None:
        """Prepare to cut `whole` along `dim`."""
        self._whole = whole.detach()
        self._dim = dim
        self._gradient = _Gradient(dim, whole.shape)
        needs_grad = whole.requires_grad and torch.is_grad_enabled()
        self._link: Tensor | None = _Open.apply(whole, self._gradient) if needs_grad else None

    def take(self, start: int, end: int) -> Tensor:
        """Tokens `[start, end)`."""

        def part() -> Tensor:
            return _part(self._whole, self._dim, start, end)

        if self._link is None:
            return part()
        return _Take.apply(self._link, part, self._gradient, start, end)


class TokenJoin:
    """Chunks' tensors on their way into one over all tokens."""

    def __init__(self, dim: int, tokens: int, num_chunks: int) -> None:
        """Prepare to join so many along `dim`, which will be `tokens` long."""
        self._dim = dim
        self._tokens = tokens
        self._whole: Tensor | None = None
        self._gradient: _Gradient | None = None
        self._links: list[Tensor] = []
        self._num_chunks = num_chunks

    def put(self, part: Tensor, start: int, end: int) -> None:
        """Copy the part of tokens `[start, end)` into the whole."""
        if self._whole is None or self._gradient is None:
            shape = torch.Size(
                (*part.shape[: self._dim], self._tokens, *part.shape[self._dim + 1 :])
            )
            self._whole = part.new_empty(shape)
            self._gradient = _Gradient(self._dim, shape, uses=self._num_chunks)
        self._whole.narrow(self._dim, start, end - start).copy_(part.detach())
        if part.requires_grad and torch.is_grad_enabled():
            self._links.append(_Put.apply(part, self._gradient, start, end))

    def close(self) -> Tensor:
        """The whole; all parts are in it."""
        whole, self._whole = self._whole, None
        assert whole is not None, "something was put in"
        links, self._links = self._links, []
        if not links:
            return whole
        return _Close.apply(lambda: whole, self._gradient, *links)


class _Gradient:
    """The gradient of a whole tensor, while backward goes through its parts."""

    def __init__(self, dim: int, shape: torch.Size, *, uses: int = 0) -> None:
        self.value: Tensor | None = None
        self._dim = dim
        self._shape = shape
        self._uses = uses

    def add(self, part: Tensor, start: int, end: int) -> None:
        """Write a part; what nobody writes is zero."""
        if self.value is None:
            self.value = part.new_zeros(self._shape)
        self.value.narrow(self._dim, start, end - start).copy_(part)

    def part(self, start: int, end: int) -> Tensor | None:
        """A part; the last of them lets go of the whole."""
        whole, self._uses = self.value, self._uses - 1
        if self._uses == 0:
            self.value = None
        return None if whole is None else _part(whole, self._dim, start, end)


class _Open(torch.autograd.Function):
    """From a whole tensor to a link, behind which its parts are taken."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, gradient: _Gradient) -> Tensor:  # type: ignore[override]
        ctx.gradient = gradient
        return whole.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
        grad, ctx.gradient.value = ctx.gradient.value, None
        return grad, None


class _Take(torch.autograd.Function):
    """From the link to the part of one chunk."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        link: Tensor,
        part: Callable[[], Tensor],
        gradient: _Gradient,
        start: int,
        end: int,
    ) -> Tensor:
        ctx.gradient, ctx.start, ctx.end = gradient, start, end
        ctx.set_materialize_grads(False)
        return part()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:  # type: ignore[override]
        if grad is None:
            return None, None, None, None, None
        ctx.gradient.add(grad, ctx.start, ctx.end)
        return grad.new_empty(0), None, None, None, None


class _Put(torch.autograd.Function):
    """From the part of one chunk, which was copied into the whole, to a link."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, gradient: _Gradient, start: int, end: int) -> Tensor:  # type: ignore[override]
        ctx.gradient, ctx.start, ctx.end = gradient, start, end
        return part.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None, None, None]:  # type: ignore[override]
        return ctx.gradient.part(ctx.start, ctx.end), None, None, None


class _Close(torch.autograd.Function):
    """From the links of all chunks to the whole tensor."""

    @staticmethod
    def forward(
        ctx: Any, whole: Callable[[], Tensor], gradient: _Gradient, *links: Tensor
    ) -> Tensor:  # type: ignore[override]
        ctx.gradient = gradient
        ctx.num_links = len(links)
        return whole()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.gradient.value = grad
        return None, None, *(grad.new_empty(0) for _ in range(ctx.num_links))
