"""Stages: runs of a model's decoder layers, cut out of the model in place, with the model's ends.

The model stays the object it was: same class, same parameter names. What a rank does not hold is
replaced by modules without parameters: layers that hand their input on, ends that do nothing. Lists
of layers keep their length, because models look up masks and layer types by position.

`MessageLayout` packs what one stage sends to the next for a chunk into one tensor, whose gradient
comes back as one. For most models that is the hidden states `[B, C, D]`. Gemma 3n and Gemma 4's
small models append two more things, `[B, C, W]` in all: the inputs of every later layer that are
made of token ids before the first layer ("per-layer inputs"), and K/V that later layers read
instead of having their own. A stage forwards what it does not use itself. Gemma 3n has several
hidden states for each token (AltUp, arXiv 2301.13310), `[S, B, C, D]`.

`enter` and `UnitGraph` are the two ends of a unit's autograd graph. They hold no tensors: whether
hidden states stay on the device until the unit's backward is decided where activations are saved,
and a leaf tensor here, or a reference to the output, would keep them there regardless.

Not covered: ranks, schedules, and how a stage is run (`sppo_hf.pipeline`).

[Note: tied embeddings] The last stage keeps the embedding as well where the head shares its matrix,
under the embedding's name, as a checkpoint has it. So two stages hold a parameter of that name, and
the sum of their gradients is its gradient.

[Note: stages that are helped with] Where units are shared between ranks, a rank runs layers of
other stages too. These are no part of the model: an optimizer, a checkpoint, a norm of gradients
see a rank's own stages alone. They come into the model while one of their units runs, and for
`whole`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from transformers.modeling_layers import GradientCheckpointingLayer

from sppo_hf.engine.structure import ModelParts, mixers_of, patched_attribute, swapped_modules
from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.planning.model_profile import LayerProfile

# B batch rows, C tokens of a chunk, D model width, W width of a message, L layers of the model,
# K KV heads, H head size, P width of a layer's own inputs, S hidden states of a token.

_ATTRIBUTE = "_sppo_stages"

_BEFORE = ("per_layer", "altup_projections")
"""In the names of what stands in front of the layers, wherever it is defined: what makes inputs of
each layer of token ids (Gemma 3n, Gemma 4), and more hidden states of one (Gemma 3n)."""

_AFTER = ("altup_unembed_projections",)
"""Of what stands behind them beside a norm: what makes one hidden state of several."""

_PER_LAYER_INPUT = "per_layer_input"
"""The argument of a layer for its own input."""

Place = tuple[nn.Module, str, nn.Module | None]
"""Parent, name and module."""

_MAKES_PER_LAYER_INPUTS = "project_per_layer_inputs"
"""The decoder's method that makes them of embeddings, and of what a table of its own has."""


@dataclass(frozen=True, slots=True)
class StageCut:
    """Which layers every stage has, and which stages are here."""

    layers: tuple[range, ...]
    """The layers of each stage, first to last, without gaps."""
    own: tuple[int, ...]
    """The stages that this rank holds, ascending."""

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return len(self.layers)

    @property
    def own_layers(self) -> frozenset[int]:
        """Layers that this rank holds."""
        return frozenset(layer for stage in self.own for layer in self.layers[stage])

    @property
    def has_first(self) -> bool:
        """Whether the embedding is here."""
        return 0 in self.own

    @property
    def has_last(self) -> bool:
        """Whether the final norm and the head are here."""
        return self.num_stages - 1 in self.own


class AbsentLayer(GradientCheckpointingLayer):
    """Stands for a decoder layer of another stage: hands hidden states on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        forward = type(layer).forward
        self._returns = _returned_values(forward)
        names = list(inspect.signature(forward).parameters)[1:]
        self._own = names.index(_PER_LAYER_INPUT) if _PER_LAYER_INPUT in names else len(names)
        self.carries_state = bool(mixers_of(layer))
        """Whether the layer has recurrent or convolutional mixers."""
        self.given: Tensor | None = None
        """What the layer was given beside hidden states; see `StagedModel.take_layer_inputs`."""
        # What models read off their layers: the kind of attention, the index.
        for name, value in vars(layer).items():
            is_plain = isinstance(value, str | int | float | bool)
            if is_plain and not name.startswith(("_", "gradient_checkpointing")):
                setattr(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`, whatever was switched on in the model: nothing here is recomputed."""
        return nn.Module.__call__(self, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument as it is, in a tuple where the layer itself returns one."""
        hidden_states = args[0] if args else kwargs["hidden_states"]
        self.given = kwargs.get(_PER_LAYER_INPUT, (*args[self._own : self._own + 1], None)[0])
        if self._returns is None:
            return hidden_states
        return (hidden_states, *(None for _ in range(self._returns - 1)))


@functools.cache
def _returned_values(forward: Any) -> int | None:
    """How many values the tuple has that a layer's code returns; None where it returns no tuple.

    Annotations do not tell: some say tuple where the code returns hidden states alone. Remembered,
    for all layers of a model have the same code, and to read it takes milliseconds.
    """
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))
    returns = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Return)]
    value = returns[-1].value if returns else None
    return len(value.elts) if isinstance(value, ast.Tuple) else None


class AbsentModule(nn.Module):
    """Stands for a norm or a head of another stage: hands its input on."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return `x` as it is."""
        return x


class AbsentEmbedding(nn.Module):
    """Stands for an embedding of another stage: zeros, which nobody reads."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings = embedding.num_embeddings
        self.embedding_dim = embedding.embedding_dim
        self._dtype = embedding.weight.dtype

    def forward(self, ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return zeros of shape `[*ids.shape, D]`."""
        return torch.zeros(*ids.shape, self.embedding_dim, dtype=self._dtype, device=ids.device)


class StagedModel:
    """A model of which only some stages are left, and the views that run one of them."""

    def __init__(self, parts: ModelParts, cut: StageCut, *, helps: bool = False) -> None:
        """Cut `parts` in place; what is not kept is let go.

        With `helps` units of all other stages may run here too; see [Note: stages that are helped
        with].

        Raises:
            ConfigError: The stages do not cover the model's layers.
            UnsupportedModelError: The model has more around its layers than embeddings before and
                a norm after.
        """
        check_cut(parts, cut)
        self.parts = parts
        self.cut = cut
        ends = _find_ends(parts)
        self.shared_names = shared_parameter_names(parts) if cut.num_stages > 1 else frozenset()
        """Parameters that the first and the last stage both hold."""
        self.all_names = tuple(name for name, _ in parts.causal_lm.named_parameters())
        """Names of the whole model's parameters, in its order."""
        self.helps = helps
        """Whether units of other stages may run here."""
        whole = tuple(parts.layers)
        before = [(parent, name, parent._modules[name]) for parent, name in ends.before]
        after = [(parent, name, parent._modules[name]) for parent, name in ends.after]
        for index, layer in enumerate(parts.layers):
            if index not in cut.own_layers:
                ends.layers[index] = AbsentLayer(layer)
        self._layers_name = ends.layers_name
        if not cut.has_first:
            keep = parts.causal_lm.get_input_embeddings() if cut.has_last else None
            _remove(ends.before, keep if self.shared_names else None)
        if not cut.has_last:
            _remove(ends.after)
        layers = whole if helps else tuple(_layer_list(parts.decoder)[1])
        self.parts = ModelParts(parts.causal_lm, parts.base, parts.decoder, layers, parts.configs)
        stages = range(cut.num_stages) if helps else cut.own
        self._views = {stage: self._make_view(stage) for stage in stages}
        self._ends = {0: before, cut.num_stages - 1: after} if helps else {}
        """Of the first and the last stage: (parent, name, module) of what is around the layers."""
        parts.causal_lm.__dict__[_ATTRIBUTE] = self
        self._ties = dict(getattr(parts.causal_lm, "all_tied_weights_keys", None) or {})
        _forget_absent_ties(parts.causal_lm)

    @contextlib.contextmanager
    def running(self, stage: int) -> Iterator[None]:
        """Let the base model run the layers of `stage` alone, at the moment."""
        # What layers are given was made on the first stage, and is not made again.
        made_before = stage > 0 and hasattr(self.parts.decoder, _MAKES_PER_LAYER_INPUTS)
        as_made = {self.parts.decoder: lambda _, made: made} if made_before else {}
        with (
            swapped_modules(self._places(self._views[stage], stage)),
            patched_attribute(_MAKES_PER_LAYER_INPUTS, as_made),
        ):
            yield

    def _places(self, layers: nn.ModuleList, *stages: int) -> list[Place]:
        """Where layers, and what is around those of helped stages, are in the model."""
        ends = [end for stage in stages for end in self._ends.get(stage, ())]
        return [(self.parts.decoder, self._layers_name, layers), *ends]

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Let all stages that may run here be in the model, at the moment."""
        if not self.helps:
            yield
            return
        ends = {0, self.cut.num_stages - 1}
        with swapped_modules(self._places(nn.ModuleList(self.parts.layers), *ends)):
            yield

    def borrowed_modules(self) -> list[nn.Module]:
        """Layers and ends of other stages that are here."""
        own = {id(module) for module in self.parts.causal_lm.modules()}
        found = [*self.parts.layers, *(m for ends in self._ends.values() for *_, m in ends)]
        return [m for m in found if isinstance(m, nn.Module) and id(m) not in own]

    def parameters_of(self, stage: int) -> list[nn.Parameter]:
        """Parameters of a stage that may run here, in an order that all its ranks share."""
        modules: list[nn.Module | None] = [self.parts.layers[i] for i in self.cut.layers[stage]]
        modules += [module for *_, module in self._ends.get(stage, ())]
        found = [p for module in modules if module is not None for p in module.parameters()]
        return list({id(p): p for p in found}.values())

    def take_layer_inputs(self, stage: int) -> list[Tensor]:
        """What the layers after `stage` were given beside hidden states when it ran, in order."""
        layers = list(self._views[stage])[self.cut.layers[stage].stop :]
        given = [layer.given for layer in layers if isinstance(layer, AbsentLayer)]
        for layer in self._views[stage]:
            if isinstance(layer, AbsentLayer):
                layer.given = None
        return [tensor for tensor in given if tensor is not None]

    @contextlib.contextmanager
    def whole_ties(self) -> Iterator[None]:
        """Let Transformers know the whole model's ties, while it writes a whole state dict."""
        causal_lm: Any = self.parts.causal_lm
        before = causal_lm.all_tied_weights_keys, causal_lm._tied_weights_keys
        causal_lm.all_tied_weights_keys, causal_lm._tied_weights_keys = self._ties, self._ties
        try:
            yield
        finally:
            causal_lm.all_tied_weights_keys, causal_lm._tied_weights_keys = before

    def _make_view(self, stage: int) -> nn.ModuleList:
        layers = self.cut.layers[stage]
        return nn.ModuleList(
            layer if index in layers or isinstance(layer, AbsentLayer) else AbsentLayer(layer)
            for index, layer in enumerate(self.parts.layers)
        )


def staged_model_of(causal_lm: nn.Module) -> StagedModel | None:
    """What cut `causal_lm` into stages; None where it is whole."""
    staged: StagedModel | None = causal_lm.__dict__.get(_ATTRIBUTE)
    return staged


def absent_prefixes(causal_lm: nn.Module) -> tuple[str, ...]:
    """What names of parameters of other stages begin with: "model.layers.7."."""
    absent = (AbsentLayer, AbsentModule, AbsentEmbedding)
    return tuple(f"{name}." for name, m in causal_lm.named_modules() if isinstance(m, absent))


def _forget_absent_ties(causal_lm: Any) -> None:
    """Take ties to absent parameters off the lists by which Transformers would tie them again."""
    absent = absent_prefixes(causal_lm)
    ties = getattr(causal_lm, "all_tied_weights_keys", None) or {}
    here = {t: s for t, s in ties.items() if not t.startswith(absent) and not s.startswith(absent)}
    if here != ties:
        causal_lm.all_tied_weights_keys = here
        causal_lm._tied_weights_keys = dict(here)


def check_cut(parts: ModelParts, cut: StageCut) -> None:
    """Refuse stages that are not runs of all of the model's layers, or a model with other ends.

    Raises:
        ConfigError: The stages do not cover the model's layers, or one is empty.
        UnsupportedModelError: See `StagedModel`.
    """
    covered = [layer for layers in cut.layers for layer in layers]
    if covered != list(range(len(parts.layers))) or not all(len(r) for r in cut.layers):
        raise ConfigError(
            f"{cut.num_stages} stages hold layers {[list(r) for r in cut.layers]}, but "
            f"{parts.name} has {len(parts.layers)}. Allowed: each layer in one stage, in order, "
            "and none empty. Remedy: at most as many stages (pp_size x pp_virtual_stages) as "
            "layers."
        )
    _find_ends(parts)


def shared_parameter_names(parts: ModelParts) -> frozenset[str]:
    """Names of the parameters that the embedding and the head have in common."""
    embedding = {id(p) for p in parts.causal_lm.get_input_embeddings().parameters()}
    head = {id(p) for p in parts.head_parameters()} & embedding
    return frozenset(name for name, p in parts.causal_lm.named_parameters() if id(p) in head)


@dataclass(frozen=True, slots=True)
class _Ends:
    layers_name: str
    layers: nn.ModuleList
    before: tuple[tuple[nn.Module, str], ...]
    """(parent, name) of what stands before the layers and has parameters."""
    after: tuple[tuple[nn.Module, str], ...]


def _find_ends(parts: ModelParts) -> _Ends:
    """What stands before the decoder layers and after them, by the order of definition."""
    name, layers = _layer_list(parts.decoder)
    embedding = parts.causal_lm.get_input_embeddings()
    encoders: tuple[tuple[nn.Module, str], ...] = ()
    before: list[tuple[nn.Module, str]] = []
    after: list[tuple[nn.Module, str]] = []
    found = before
    known: list[str] = []
    for child_name, child in parts.decoder.named_children():
        if child_name == name:
            found = after
        elif any(True for _ in child.parameters()):
            place = found
            for names, side in ((_BEFORE, before), (_AFTER, after)):
                if any(part in child_name for part in names):
                    place = side
                    known.append(child_name)
            place.append((parts.decoder, child_name))
    if parts.is_multimodal:
        # Encoders of what is not text: they run in front of the first layer, or not at all.
        encoders = tuple(
            (parts.base, child_name)
            for child_name, child in parts.base.named_children()
            if parts.decoder is not parts.base and child is not parts.decoder
        )
    inside = dict(parts.decoder.named_children())
    unusual = [n for _, n in before if n not in known and not _embeds(inside[n])]
    unusual += [n for _, n in after if _embeds(inside[n])]
    names = [n for _, n in after]
    if (
        unusual
        or len([n for n in names if n not in known]) > 1
        or not any(inside[n] is embedding for _, n in before)
    ):
        raise UnsupportedModelError(
            f"{parts.name} cannot be cut into stages: around its decoder layers stand "
            f"{[n for _, n in before] + names}, and only embeddings before them and one norm after "
            "them can be given to the first and the last stage. Train it with pp_size=1."
        )
    head = [
        (parts.causal_lm, child_name)
        for child_name, child in parts.causal_lm.named_children()
        if child is not parts.base
    ]
    return _Ends(name, layers, (*encoders, *before), (*after, *head))


def _layer_list(base: nn.Module) -> tuple[str, nn.ModuleList]:
    lists = [
        (name, child)
        for name, child in base.named_children()
        if isinstance(child, nn.ModuleList)
        and len(child)
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in child)
    ]
    return max(lists, key=lambda entry: len(entry[1]))


def _embeds(module: nn.Module) -> bool:
    return any(isinstance(part, nn.Embedding) for part in module.modules())


def _remove(ends: Iterable[tuple[nn.Module, str]], keep: nn.Module | None = None) -> None:
    for parent, name in ends:
        module = parent._modules[name]
        if module is keep or module is None:
            continue
        parent._modules[name] = _absent(module)


def _absent(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.ModuleList):
        return nn.ModuleList(_absent(part) for part in module)
    inner: Any = getattr(module, "base_layer", module)  # PEFT wraps embeddings too
    return AbsentEmbedding(inner) if isinstance(inner, nn.Embedding) else AbsentModule()


SHARED_KV = "shared_kv_states"
"""The argument of layers that holds keys for others: `[B, K, C, H]` each, by the owner's type, or
by its index (Gemma 3n before Transformers 5.23)."""

_SharedKVStates = Mapping[Any, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class _SharedKV:
    """Keys and values of one layer that others read."""

    name: str
    """What the model calls them: the type of these layers."""
    owner: int
    readers: tuple[int, ...]
    """The layers that read them, all behind it."""
    num_heads: int
    sizes: tuple[int, int]
    """Of a key and of a value head."""


@dataclass(frozen=True, slots=True)
class UnpackedMessage:
    """A message taken apart."""

    hidden: Tensor
    """What the first layer is given: `[B, C, D]`, or `[S, B, C, D]`."""
    arguments: dict[str, Any]
    """What the base model is called with besides."""
    shared: dict[Any, tuple[Tensor, Tensor]]
    """Keys and values that layers of earlier stages have left, by all names that they go by."""


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """How messages between the stages of one model are packed."""

    num_layers: int
    hidden_size: int
    num_streams: int
    """S; 1 where layers give on one hidden state of each token."""
    per_layer_size: int
    """P; 0 where layers have no inputs of their own."""
    shared: tuple[_SharedKV, ...]

    @classmethod
    def of(cls, parts: ModelParts, layers: Sequence[LayerProfile]) -> MessageLayout:
        """Read the layout off a model's configuration and the profile of all of its layers."""
        text: Any = parts.text_config
        borrowers = [index for index, layer in enumerate(layers) if layer.borrows_keys]
        shared: list[_SharedKV] = []
        for name in sorted({text.layer_types[index] for index in borrowers}):
            readers = [index for index in borrowers if text.layer_types[index] == name]
            owner = max(i for i in range(borrowers[0]) if text.layer_types[i] == name)
            layer = layers[owner]
            sizes = (layer.qk_head_size, layer.v_head_size)
            shared.append(_SharedKV(name, owner, tuple(readers), layer.num_kv_heads, sizes))
        size = getattr(text, "hidden_size_per_layer_input", 0) or 0
        streams = getattr(text, "altup_num_inputs", 0) or 1
        return cls(len(layers), text.hidden_size, streams, size, tuple(shared))

    @property
    def is_hidden_only(self) -> bool:
        """Whether nothing but hidden states travels."""
        return self.num_streams == 1 and not self.per_layer_size and not self.shared

    def width(self, start: int) -> int:
        """W of the message to the stage whose first layer is `start`."""
        per_layer = (self.num_layers - start) * self.per_layer_size
        shared = sum(keys.num_heads * sum(keys.sizes) for keys in self._shared(start))
        return self.num_streams * self.hidden_size + per_layer + shared

    def pack(
        self,
        start: int,
        hidden: Tensor,
        per_layer: Sequence[Tensor],
        shared: _SharedKVStates,
    ) -> Tensor:
        """Pack the message to the stage whose first layer is `start`.

        Args:
            start: The first layer of the stage that it goes to.
            hidden: What the layer before it returned, `[B, C, D]` or `[S, B, C, D]`.
            per_layer: Own inputs `[B, C, P]` of layer `start` and of each after it, if they have.
            shared: See `SHARED_KV`.

        Returns:
            `[B, C, W]`, with the graphs of all.
        """
        if self.is_hidden_only:
            return hidden
        if self.num_streams > 1:
            hidden = hidden.movedim(0, -2).flatten(-2)
        found = [shared[k.name if k.name in shared else k.owner] for k in self._shared(start)]
        flat = [state.transpose(1, 2).flatten(2) for states in found for state in states]
        return torch.cat([hidden, *per_layer, *flat], dim=-1)

    def unpack(self, start: int, message_BCW: Tensor) -> UnpackedMessage:
        """Take apart what came to the stage whose first layer is `start`."""
        if self.is_hidden_only:
            return UnpackedMessage(message_BCW, {}, {})
        size = self.per_layer_size
        kinds = self._shared(start)
        per_layer = (self.num_layers - start) * size
        widths = [keys.num_heads * width for keys in kinds for width in keys.sizes]
        streams = self.num_streams * self.hidden_size
        hidden, own, *flat = message_BCW.split([streams, per_layer, *widths], dim=-1)
        if self.num_streams > 1:
            hidden = hidden.unflatten(-1, (self.num_streams, -1)).movedim(-2, 0)
        arguments: dict[str, Any] = {}
        if size:
            # Layers find theirs by index; those before this stage do not run.
            absent = own.new_zeros(*own.shape[:2], start * size)
            all_own = torch.cat([absent, own], dim=-1)
            arguments["per_layer_inputs"] = all_own.unflatten(-1, (self.num_layers, size))
        states, shared = iter(flat), {}
        for keys in kinds:
            key, value = _heads(keys, states)
            shared |= dict.fromkeys((keys.name, keys.owner), (key, value))
        return UnpackedMessage(hidden.contiguous(), arguments, shared)

    def kv_layers(self, layers: range, attending: Collection[int]) -> list[int]:
        """The layers of a stage that hold keys and values, of which `attending` attend.

        Returns:
            Those that attend to keys of their own, and the first of those that read keys of the
            same layer of an earlier stage: what came with the message is held there for all.
        """
        readers = {index: keys for keys in self.shared for index in layers if index in keys.readers}
        first = {keys.name: index for index, keys in reversed(readers.items())}
        return [
            index
            for index in layers
            if index in attending
            and (
                index not in readers
                or (readers[index].owner < layers.start and first[readers[index].name] == index)
            )
        ]

    def _shared(self, start: int) -> list[_SharedKV]:
        """Those that a layer before `start` has and one from there on reads."""
        return [keys for keys in self.shared if keys.owner < start <= keys.readers[-1]]


def _heads(keys: _SharedKV, states: Iterator[Tensor]) -> Iterator[Tensor]:
    """The next key and value as attention takes them, `[B, K, C, H]`."""
    for size in keys.sizes:
        state = next(states).unflatten(-1, (keys.num_heads, size))
        yield state.transpose(1, 2).contiguous()


@dataclass(slots=True)
class InputGradient:
    """Where the gradient of what a unit was given arrives."""

    grad: Tensor | None = None


class _Enter(torch.autograd.Function):
    """The beginning of a unit's graph, which holds none of what goes in."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, x: Tensor, input_gradient: InputGradient) -> Tensor:  # type: ignore[override]
        ctx.input_gradient = input_gradient
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.input_gradient.grad = grad
        return None, None, None


@dataclass(frozen=True, slots=True)
class StateEnd:
    """A state that a unit left for the next one: where its gradient goes, and where it arrives."""

    end: GradientEdge
    input_gradient: InputGradient

    @property
    def grad(self) -> Tensor | None:
        """The state's gradient; None where nothing that the unit after trains depends on it."""
        return self.input_gradient.grad

    @classmethod
    def of(cls, state: Tensor, input_gradient: InputGradient) -> StateEnd:
        """Keep the end of the graph that leads to `state`, and where its gradient arrives."""
        return cls(get_gradient_edge(state), input_gradient)


@dataclass(slots=True)
class UnitGraph:
    """What waits for a unit's backward."""

    end: GradientEdge | None
    """Of what the unit gave on, or its loss was computed from; None where nothing is trained."""
    shape: torch.Size
    """Of that, `[B, C, D]`, or `[B, C, W]` of a whole message."""
    received_shape: torch.Size
    """Of what it was given, likewise."""
    dtype: torch.dtype
    device: torch.device
    input_gradient: InputGradient | None
    """For what it was given; None where it began with tokens."""
    loss: Tensor | None = None
    """Sum of the chunk's losses, on the last stage, where it has labels."""
    router: Tensor | None = None
    """The chunk's sums of router probabilities `[E]`, where the model has a loss of its routers."""

    @classmethod
    def of(
        cls, given: Tensor, input_gradient: InputGradient | None, received: Tensor | None
    ) -> UnitGraph:
        """Note the ends of a graph that leads from `received` to `given`."""
        end = get_gradient_edge(given) if given.requires_grad else None
        received_shape = given.shape if received is None else received.shape
        return cls(end, given.shape, received_shape, given.dtype, given.device, input_gradient)

    def zeros(self) -> Tensor:
        """No gradient of what it gave on."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def received_zeros(self) -> Tensor:
        """No gradient of what it was given."""
        return torch.zeros(self.received_shape, dtype=self.dtype, device=self.device)


def enter(x: Tensor) -> tuple[Tensor, InputGradient | None]:
    """`x` as the beginning of a graph, and where its gradient will be."""
    if not torch.is_grad_enabled():
        return x.detach(), None
    input_gradient = InputGradient()
    anchor = torch.zeros((), device=x.device, requires_grad=True)
    return _Enter.apply(anchor, x.detach(), input_gradient), input_gradient
