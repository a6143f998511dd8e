"""Stages: runs of a model's decoder layers on one rank, with embeddings and head at the ends.

The model is cut in place and keeps its class and parameter names. What a rank does not hold is
replaced by modules without parameters that return their input. Lists of layers keep their length,
because models look up masks and layer types by position.

Not covered: what a stage sends to the next (`stage_messages`), the graphs of its units
(`unit_graph`), ranks, schedules, and how a stage is run (`sppo_hf.pipeline`).

[Note: tied embeddings] If the head shares the embedding's matrix, the last stage also keeps the
embedding, under its own name as in a checkpoint. So two stages hold a parameter of that name, and
its gradient is the sum of theirs.

[Note: borrowed stages] If ranks share units, a rank also runs layers of other stages. These are
not part of its model: optimizer, checkpoints and gradient norms see a rank's own stages only. They
are put into the model while one of their units runs, and in the context `whole`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from sppo_hf.engine.model_parts import (
    ModelParts,
    layer_list,
    mixers_of,
    patched_attribute,
    swapped_modules,
)
from sppo_hf.errors import ConfigError, UnsupportedModelError

# D model width.

_ATTRIBUTE = "_sppo_stages"

_BEFORE = ("per_layer", "altup_projections")
"""Parts of the names of modules that run before the layers, wherever they are defined: they make
inputs of each layer from token ids (Gemma 3n, Gemma 4), and several hidden states from one (Gemma
3n)."""

_AFTER = ("altup_unembed_projections",)
"""Parts of the names of modules after the layers beside a norm: they merge several hidden states
into one."""

_PER_LAYER_INPUT = "per_layer_input"
"""The argument of a layer for its own input."""

Place = tuple[nn.Module, str, nn.Module | None]
"""Parent, name and module."""

_MAKES_PER_LAYER_INPUTS = "project_per_layer_inputs"
"""The decoder's method that computes per-layer inputs from embeddings and a table of its own."""


@dataclass(frozen=True, slots=True)
class StageCut:
    """The layers of every stage, and the stages of this rank."""

    layers: tuple[range, ...]
    """The layers of each stage, in order and without gaps."""
    own: tuple[int, ...]
    """The stages that this rank holds, ascending."""

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole model."""
        return len(self.layers)

    @property
    def own_layers(self) -> frozenset[int]:
        """Layers that this rank holds."""
        return frozenset(layer for stage in self.own for layer in self.layers[stage])

    @property
    def has_first(self) -> bool:
        """Whether this rank holds the embedding."""
        return 0 in self.own

    @property
    def has_last(self) -> bool:
        """Whether this rank holds the final norm and the head."""
        return self.num_stages - 1 in self.own


class AbsentLayer(GradientCheckpointingLayer):
    """Replaces a decoder layer of another stage and returns its hidden states unchanged."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        forward = type(layer).forward
        self._returns = returned_values(forward)
        names = list(inspect.signature(forward).parameters)[1:]
        self._own = names.index(_PER_LAYER_INPUT) if _PER_LAYER_INPUT in names else len(names)
        self.carries_state = bool(mixers_of(layer))
        """Whether the layer has recurrent or convolutional mixers."""
        self.given: Tensor | None = None
        """The layer's per-layer input; see `StagedModel.take_layer_inputs`."""
        # Attributes that models read from their layers, such as the attention type and the index.
        for name, value in vars(layer).items():
            is_plain = isinstance(value, str | int | float | bool)
            if is_plain and not name.startswith(("_", "gradient_checkpointing")):
                setattr(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward` without the activation checkpointing of the base class."""
        return nn.Module.__call__(self, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument, in a tuple if the layer itself returns one."""
        self.given = kwargs.get(_PER_LAYER_INPUT, (*args[self._own : self._own + 1], None)[0])
        return as_returned(args[0] if args else kwargs["hidden_states"], self._returns)


def as_returned(hidden_states: Tensor, values: int | None) -> Any:
    """Return hidden states as a layer does whose code has as many `returned_values`."""
    return hidden_states if values is None else (hidden_states, *(None,) * (values - 1))


@functools.cache
def returned_values(forward: Any) -> int | None:
    """Length of the tuple that a layer's code returns; None if it returns no tuple.

    Read from the code, because some annotations say tuple where the code returns a tensor.

    Raises:
        OSError: The code is not known, as of a class that was made in `exec`.
    """
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))
    returns = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Return)]
    value = returns[-1].value if returns else None
    return len(value.elts) if isinstance(value, ast.Tuple) else None


class AbsentModule(nn.Module):
    """Replaces a norm or a head of another stage and returns its input unchanged."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return `x`."""
        return x


class AbsentEmbedding(nn.Module):
    """Replaces an embedding of another stage and returns zeros, which nothing reads."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings = embedding.num_embeddings
        self.embedding_dim = embedding.embedding_dim
        self._dtype = embedding.weight.dtype

    def forward(self, ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return zeros of shape `[*ids.shape, D]`."""
        return torch.zeros(*ids.shape, self.embedding_dim, dtype=self._dtype, device=ids.device)


class StagedModel:
    """A model of which this rank holds some stages, and runs one at a time."""

    def __init__(self, parts: ModelParts, cut: StageCut, *, borrows_stages: bool = False) -> None:
        """Cut `parts` in place, and free what this rank does not hold.

        With `borrows_stages`, units of all other stages may run here, too; see [Note: borrowed
        stages].

        Raises:
            ConfigError: The stages do not cover the model's layers.
            UnsupportedModelError: The model has other modules around its layers than embeddings
                before and a norm after, or stages share weights that train.
        """
        check_cut(parts, cut)
        self.parts = parts
        self.cut = cut
        ends = _find_ends(parts)
        self.shared_names = shared_parameter_names(parts) if cut.num_stages > 1 else frozenset()
        """Names of parameters that both the first and the last stage hold."""
        self.all_names = tuple(name for name, _ in parts.causal_lm.named_parameters())
        """Names of the whole model's parameters, in its order."""
        shared = shared_by_layers(parts, cut.layers)
        refuse_trained(parts, shared)
        here = {p for index in cut.own_layers for p in parts.layers[index].parameters()}
        self._shared = {p: layers for p, layers in shared.items() if p in here}
        """Frozen parameters of this rank's layers that those of other stages share."""
        self.borrows_stages = borrows_stages
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
        self.parts_here = replace(parts, layers=tuple(layer_list(parts.decoder)[1]))
        """The model as it is between units: without borrowed stages."""
        self.parts = replace(parts, layers=whole) if borrows_stages else self.parts_here
        self._whole = nn.ModuleList(self.parts.layers)
        stages = range(cut.num_stages) if borrows_stages else cut.own
        self._views = {stage: self._make_view(stage) for stage in stages}
        self._ends = {0: before, cut.num_stages - 1: after} if borrows_stages else {}
        """Modules around the layers, (parent, name, module), of the first and the last stage."""
        parts.causal_lm.__dict__[_ATTRIBUTE] = self
        self._ties = dict(getattr(parts.causal_lm, "all_tied_weights_keys", None) or {})
        _forget_absent_ties(parts.causal_lm)

    def check_unshared(self) -> None:
        """Refuse shared parameters that were frozen at the cut and train now, before every step.

        Raises:
            UnsupportedModelError: Names such a parameter.
        """
        refuse_trained(self.parts, self._shared)

    def note_adapters(self) -> None:
        """Look for weights that layers share by adapters, which were added since the cut.

        They may share them with layers of other ranks, so each layer is a stage here.

        Raises:
            UnsupportedModelError: Names such a parameter that trains.
        """
        layers = (range(index, index + 1) for index in sorted(self.cut.own_layers))
        self._shared |= shared_by_layers(self.parts, layers)
        self.check_unshared()

    @contextlib.contextmanager
    def running(self, stage: int) -> Iterator[None]:
        """Context in which the base model runs the layers of `stage` only."""
        # Per-layer inputs come from the first stage and are not computed again.
        made_before = stage > 0 and hasattr(self.parts.decoder, _MAKES_PER_LAYER_INPUTS)
        as_made = {self.parts.decoder: lambda _, made: made} if made_before else {}
        with (
            swapped_modules(self._places(self._views[stage], stage)),
            patched_attribute(_MAKES_PER_LAYER_INPUTS, as_made),
        ):
            yield

    def _places(self, layers: nn.ModuleList, *stages: int) -> list[Place]:
        """Placement of layers, and of the modules around the layers of borrowed stages."""
        borrowed = [stage for stage in stages if stage not in self.cut.own]
        ends = [end for stage in borrowed for end in self._ends.get(stage, ())]
        return [(self.parts.decoder, self._layers_name, layers), *ends]

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Context in which all stages that may run here are in the model."""
        if not self.borrows_stages:
            yield
            return
        ends = {0, self.cut.num_stages - 1}
        with swapped_modules(self._places(self._whole, *ends)):
            yield

    def borrowed_modules(self) -> list[nn.Module]:
        """Modules of other stages that are here."""
        own = {id(module) for module in self.parts.causal_lm.modules()}
        found = [*self.parts.layers, *(m for ends in self._ends.values() for *_, m in ends)]
        return [m for m in found if isinstance(m, nn.Module) and id(m) not in own]

    def parameters_of(self, stage: int) -> list[nn.Parameter]:
        """Parameters of a stage that may run here, in the same order on all ranks."""
        modules: list[nn.Module | None] = [self.parts.layers[i] for i in self.cut.layers[stage]]
        modules += [module for *_, module in self._ends.get(stage, ())]
        found = [p for module in modules if module is not None for p in module.parameters()]
        return list({id(p): p for p in found}.values())

    def take_layer_inputs(self, stage: int) -> list[Tensor]:
        """Per-layer inputs of the layers after `stage`, in order, from its last run."""
        layers = list(self._views[stage])[self.cut.layers[stage].stop :]
        given = [layer.given for layer in layers if isinstance(layer, AbsentLayer)]
        for layer in self._views[stage]:
            if isinstance(layer, AbsentLayer):
                layer.given = None
        return [tensor for tensor in given if tensor is not None]

    @contextlib.contextmanager
    def whole_ties(self) -> Iterator[None]:
        """Context in which Transformers knows the whole model's ties, to write a state dict."""
        ties = {self.parts.causal_lm: self._ties}
        with (
            patched_attribute("all_tied_weights_keys", ties),
            patched_attribute("_tied_weights_keys", ties),
        ):
            yield

    def _make_view(self, stage: int) -> nn.ModuleList:
        layers = self.cut.layers[stage]
        return nn.ModuleList(
            layer if index in layers or isinstance(layer, AbsentLayer) else AbsentLayer(layer)
            for index, layer in enumerate(self.parts.layers)
        )


def staged_model_of(causal_lm: nn.Module) -> StagedModel | None:
    """The `StagedModel` of `causal_lm`; None if it was not cut."""
    staged: StagedModel | None = causal_lm.__dict__.get(_ATTRIBUTE)
    return staged


def absent_prefixes(causal_lm: nn.Module) -> tuple[str, ...]:
    """Prefixes of the names of parameters of other stages, such as "model.layers.7."."""
    absent = (AbsentLayer, AbsentModule, AbsentEmbedding)
    return tuple(f"{name}." for name, m in causal_lm.named_modules() if isinstance(m, absent))


def _forget_absent_ties(causal_lm: Any) -> None:
    """Remove ties to absent parameters, which Transformers would tie again."""
    absent = absent_prefixes(causal_lm)
    ties = getattr(causal_lm, "all_tied_weights_keys", None) or {}
    here = {t: s for t, s in ties.items() if not t.startswith(absent) and not s.startswith(absent)}
    if here != ties:
        causal_lm.all_tied_weights_keys = here
        causal_lm._tied_weights_keys = dict(here)


def check_cut(parts: ModelParts, cut: StageCut) -> None:
    """Refuse stages that do not cover the model's layers, and models that cannot be cut.

    Raises:
        ConfigError: The stages do not cover the layers in order, or one is empty.
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


def shared_by_layers(
    parts: ModelParts, groups: Iterable[range]
) -> dict[nn.Parameter, tuple[int, int]]:
    """Return the parameters that layers of several groups share, each with two such layers."""
    first: dict[nn.Parameter, int] = {}
    shared: dict[nn.Parameter, tuple[int, int]] = {}
    for group in groups:
        found = [(index, p) for index in group for p in parts.layers[index].parameters()]
        shared |= {p: (first[p], index) for index, p in reversed(found) if p in first}
        first |= {p: index for index, p in reversed(found)}
    return shared


def refuse_trained(parts: ModelParts, shared: Mapping[nn.Parameter, tuple[int, int]]) -> None:
    """Refuse parameters that layers of several stages share, if any of them trains.

    Raises:
        UnsupportedModelError: Names such a parameter.
    """
    for parameter, (first, second) in shared.items():
        if parameter.requires_grad:
            names = {id(p): name for name, p in parts.causal_lm.named_parameters()}
            raise UnsupportedModelError(
                f"{parts.name} cannot be trained in stages: layers {first} and {second} share "
                f"{names[id(parameter)]}, which trains, and every stage would train one of its "
                "own. Allowed: trained weights of one layer each, such as LoRA's. Remedy: freeze "
                "it, use such an adapter, or train with pp_size=1."
            )


def shared_parameter_names(parts: ModelParts) -> frozenset[str]:
    """Names of the parameters that embedding and head share."""
    embedding = {id(p) for p in parts.causal_lm.get_input_embeddings().parameters()}
    head = {id(p) for p in parts.head_parameters()} & embedding
    return frozenset(name for name, p in parts.causal_lm.named_parameters() if id(p) in head)


@dataclass(frozen=True, slots=True)
class _Ends:
    layers_name: str
    layers: nn.ModuleList
    before: tuple[tuple[nn.Module, str], ...]
    """(parent, name) of modules with parameters that run before the layers."""
    after: tuple[tuple[nn.Module, str], ...]
    """(parent, name) of modules that run after the layers."""


def _find_ends(parts: ModelParts) -> _Ends:
    """Find what runs before and after the decoder layers, by the order of definition."""
    if parts.is_classifier:
        raise UnsupportedModelError(
            f"{parts.name} cannot be cut into stages: its head is a classifier's, which reads the "
            "hidden states of whole rows. Train it with pp_size=1; sp_size, DDP and FSDP2 share "
            "the work between GPUs."
        )
    name, layers = layer_list(parts.decoder)
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
        # Encoders of images or sound run before the first layer, or not at all.
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
