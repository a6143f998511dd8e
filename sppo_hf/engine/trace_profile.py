"""Traces a model's profile: what its decoder layers multiply and what autograd saves of them.

The model is built of `fake_tensors`, which have shapes and dtypes but no memory, and each kind of
decoder layer runs forward and backward, with the engine's own attention around a backend that
computes nothing, at two lengths; what differs, divided by the tokens between them, is what one
token costs. So nothing here is known of a family. A layer whose code looks at values (a loop over
the experts that were chosen) runs on the CPU instead, on zeros.

What is counted is what `sppo_hf.engine.recompute` does with a layer: all that autograd saves
("whole"); or the layer's input and attention's results ("inputs"); or these and the
products that a `SelectiveRecorder` holds. Which products need not run again a `UnusedMatmulFinder`
finds. Scans of recurrent layers are those of Transformers' torch code, from states of zeros;
kernels save less. Not covered: what is elementwise costs no FLOPs, and what does not grow with the
tokens (copies of weights under autocast) is left out.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from sppo_hf.attention.backends.base import (
    AttentionOutput,
    AttentionSpec,
    Backend,
    Gradients,
    accumulation_dtype,
)
from sppo_hf.attention.kv_cache import Keep, LayerKV
from sppo_hf.attention.segments import AttentionSegment, Block
from sppo_hf.engine.attention_interface import MaskMeaning, chunked_attention
from sppo_hf.engine.chunk_context import ChunkContext
from sppo_hf.engine.recurrent_state import LayerStates, StateCache, States
from sppo_hf.engine.selective import (
    DependencyTracker,
    LightDispatchMode,
    RunOperation,
    SelectiveRecorder,
    UnusedMatmulFinder,
    operation,
    run_operation,
    storage_key,
    tensors_in,
)
from sppo_hf.engine.sliced_calls import PrefixLength, is_searched, is_worth_tiles
from sppo_hf.engine.stages import SHARED_KV, MessageLayout
from sppo_hf.engine.structure import (
    ATTENTION_DROPOUT_FIELDS,
    BUILD_ERRORS,
    ModelParts,
    auto_class_of,
    decoder_config,
    find_parts,
    patched_attribute,
    suppress_peft_warnings,
    swapped_modules,
)
from sppo_hf.errors import ConfigError, SPPOError, first_line
from sppo_hf.planning.config_file import check_sizes, family, rotary_limit_tokens, to_fields
from sppo_hf.planning.model_profile import LayerProfile, LoraShape, ModelProfile, Training
from sppo_hf.rules import refuse, show

logger = logging.getLogger(__name__)

_LENGTHS = (256, 512)
"""Tokens of the two runs."""

_CPU_LENGTHS = (64, 128)
"""The same where numbers are really computed."""

_SCAN_LENGTHS, _SCAN_CPU_LENGTHS = (512, 1024), (256, 512)
"""Both in a model with layers that scan: in blocks of 64 to 256 tokens, which are padded."""

_LOOKS_AT_VALUES = (
    *(DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException),
)

_DTYPES = {1: torch.bfloat16, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}

_CPU = torch.device("cpu")

_HIDDEN = "hidden_states"

# Arguments of a layer by which it learns positions: the same tables for many layers.
_POSITIONS = ("position", "cache_position")

# Attributes that tell layers of one kind apart.
_INDEX = frozenset(("layer_idx", "layer_id", "layer_number"))


def trace_config(config: object, training: Training) -> ModelProfile:
    """Traces the causal language model that a configuration describes; see `trace_model`.

    The configuration is of Transformers, or an object with the fields of a `config.json`.

    Raises:
        UnsupportedModelError: the engine cannot run such a model.
        ConfigError: no model can be made of these settings, or LoRA was asked for, and PEFT is not
            installed.
    """
    fields = config.to_dict() if isinstance(config, PreTrainedConfig) else to_fields(config)
    check_sizes(fields)
    try:
        if not isinstance(config, PreTrainedConfig):
            with _quiet_transformers():
                config = AutoConfig.for_model(**fields)
        config = decoder_config(config)
        loader = auto_class_of(config) or AutoModelForCausalLM
        return trace_model(config, training, loader.from_config)
    except SPPOError:
        raise
    except BUILD_ERRORS as error:
        raise ConfigError(
            f"no {show(family(config))} model can be made of this configuration"
            f" ({first_line(error)}). Remedy: mend the model's config.json, or, for a model type"
            " that the installed Transformers does not know, update it (pip install -U"
            " transformers)"
        ) from error


def trace_model(config: PreTrainedConfig, training: Training, make: Any) -> ModelProfile:
    """Traces a model, which `make` makes of a configuration, left as it is, and a `dtype`.

    Raises:
        UnsupportedModelError: the engine cannot run such a model.
        ConfigError: LoRA was asked for, and PEFT is not installed.
    """
    with (
        _quiet_transformers(),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        # So that hooks of the caller see none of it. Backward never comes here.
        saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing),
    ):
        parts = find_parts(_build(config, training, make))
        with _only(parts, ()):
            _make_fake(parts.causal_lm)
        lengths = _SCAN_LENGTHS if parts.has_recurrent_state else _LENGTHS
        calls = [_calls(parts, tokens, training) for tokens in lengths]
        # What comes before the first adapter needs no gradient, so the first layer stands alone.
        kinds = [(_kind(call), training.lora and index == 0) for index, call in enumerate(calls[0])]
        examples = {kinds.index(kind) for kind in kinds}
        with _only(parts, [parts.layers[index] for index in examples]):
            if training.lora is not None:
                with torch.device("meta"):
                    _adapt(parts, training.lora)
            _make_fake(parts.causal_lm)
        traced = {
            kinds[index]: _trace_kind(
                parts,
                [long_or_short[index] for long_or_short in calls],
                lengths,
                training,
                reached=training.lora is None or index > 0,
            )
            for index in sorted(examples)
        }
    inside = {p for layer in parts.layers for p in layer.parameters()}
    outside = [x for x in parts.causal_lm.named_parameters() if x[1] not in inside]
    weights, adapters = _count(outside)
    ends = {*parts.decoder.parameters(), *parts.head_parameters()}
    encoders, _ = _count(x for x in outside if x[1] not in ends)
    head: Any = parts.causal_lm.get_output_embeddings()
    embedding: Any = parts.causal_lm.get_input_embeddings()
    # Kinds that differ in nothing that is counted are one.
    alike = {layer: layer for layer in traced.values()}
    layers = tuple(alike[traced[kind]] for kind in kinds)
    messages = MessageLayout.of(parts, layers)
    return ModelProfile(
        training=training,
        layers=layers,
        vocab_size=head.weight.shape[0],
        tied=head.weight is embedding.weight,
        max_positions_tokens=rotary_limit_tokens(parts.text_config),
        outer_weights=weights,
        outer_adapter_weights=adapters,
        encoder_weights=encoders,
        message_elements=()
        if messages.is_hidden_only
        else tuple(map(messages.width, range(len(layers)))),
    )


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """What it has to say of a model, it says when the model is really made."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


# -- the model ---------------------------------------------------------------------------------


def _build(config: PreTrainedConfig, training: Training, make: Any) -> nn.Module:
    """The model on the meta device, where tensors are made faster than fake ones."""
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    for settings in (config, config.get_text_config(decoder=True)):
        # The engine refuses these for training; without them such a model can be evaluated.
        for name in ATTENTION_DROPOUT_FIELDS:
            if getattr(settings, name, None):
                setattr(settings, name, 0.0)
        if getattr(settings, "output_router_logits", False):
            setattr(settings, "output_router_logits", False)  # noqa: B010
    with torch.device("meta"):
        return make(config, dtype=_DTYPES[training.parameter_bytes]).train()


def _only(
    parts: ModelParts, layers: Sequence[nn.Module]
) -> contextlib.AbstractContextManager[None]:
    """Leaves the other decoder layers out of a model for a while."""
    modules = parts.decoder._modules
    name = next(n for n, x in modules.items() if x is not None and parts.layers[0] in x.children())
    return swapped_modules([(parts.decoder, name, nn.ModuleList(layers))])


def _make_fake(module: nn.Module) -> None:
    """Takes tensors from the meta device to the CPU, without giving them memory."""

    def fake(tensor: Tensor) -> Tensor:
        return FakeTensor(_fake_mode(), tensor.detach(), _CPU) if _is_bare_meta(tensor) else tensor

    _replace_tensors(module, fake)


@functools.cache
def _fake_mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def _is_bare_meta(tensor: Tensor) -> bool:
    return tensor.is_meta and not isinstance(tensor, FakeTensor)


def _run_fake(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs an operation on fake tensors; whatever it makes of nothing is fake, too."""
    if func is torch.ops.aten._grouped_mm.default:
        return _grouped_product(*args, **kwargs)
    return func(*args, **kwargs)


def _grouped_product(left: Tensor, right: Tensor, offs: Tensor | None = None, **_: Any) -> Tensor:
    """The shape of what `torch._grouped_mm` returns; torch's own check wants 16 bits."""
    if left.dim() == right.dim() == 2:
        assert offs is not None, "groups of a summed dim have ends"
        return left.new_empty(offs.shape[0], left.shape[0], right.shape[1])
    return left.new_empty(*left.shape[:-1], right.shape[-1])


def _adapt(parts: ModelParts, lora: LoraShape) -> None:
    model = parts.causal_lm
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            "what LoRA costs in this model is not known yet, and finding out takes PEFT, which is "
            "not installed. Remedy: install peft, or plan without LoRA."
        ) from error
    model.requires_grad_(False)
    targets = sorted(_linear_names(parts.base, lora))
    if not targets:
        return
    settings = LoraConfig(r=lora.rank, target_modules=targets, lora_dropout=lora.dropout)
    with suppress_peft_warnings():
        # Around the base model, because of whole ones PEFT takes names such as `gate_proj` to mean
        # the weights of experts, too.
        inject_adapter_in_model(settings, nn.ModuleList([parts.base]))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(_DTYPES[lora.dtype_bytes])


def _linear_names(base: nn.Module, lora: LoraShape) -> Iterator[str]:
    """What PEFT is to call the linear layers that are adapted."""
    paths: dict[str, list[str]] = {}
    others: set[str] = set()
    for path, module in base.named_modules():
        name = path.rpartition(".")[2]
        # Routers that return more than a product (Llama 4's) PEFT cannot wrap.
        if type(module).__name__ == "Conv1D" or (
            isinstance(module, nn.Linear) and "Router" not in type(module).__name__
        ):
            paths.setdefault(name, []).append(path)
        else:
            others.add(name)
    for name, found in paths.items():
        if lora.adapts(name):
            # "0" of a sequence of modules is the name of other modules, too.
            yield from found if name in others else (name,)


class _Call(NamedTuple):
    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    stored: dict[int | None, Tensor]
    """Keys that layers have attended to, by memory; one for all layers."""

    @property
    def hidden(self) -> Tensor:
        """What the layer is given to work on."""
        return self.args[0] if self.args else self.kwargs[_HIDDEN]


def _calls(parts: ModelParts, tokens: int, training: Training) -> list[_Call]:
    """Runs the model with its layers left out; returns how each would have been called."""
    calls: list[_Call] = []
    stored: dict[int | None, Tensor] = {}

    def left_out(layer: nn.Module, returned: Callable[[Any], Any]) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append(_Call(layer, args, kwargs, stored))
            return returned(calls[-1].hidden)

        return forward

    # Numbers are real until they meet a weight: masks are asked what they mean, and rotary tables
    # may grow with the positions.
    ids = torch.zeros(1, tokens, dtype=torch.long, device="cpu")
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "position_ids": torch.arange(tokens, device="cpu")[None],
        "attention_mask": torch.ones_like(ids, dtype=torch.bool),
        "use_cache": False,
        "return_dict": True,
    }
    if parts.has_recurrent_state:
        inputs["use_cache"] = True
        inputs[parts.cache_argument()] = StateCache(len(parts.layers))
        if "position_ids" not in parts.base_arguments():
            del inputs["position_ids"]
    elif getattr(parts.text_config, "attn_temperature_tuning", False):
        inputs[parts.cache_argument()] = PrefixLength(0)
    failed: Exception | None = None
    for returned in _RETURNED:
        calls.clear()
        forwards = {layer: left_out(layer, returned) for layer in parts.layers}
        try:
            with (
                patched_attribute("forward", forwards),
                chunked_attention(ChunkContext(model=parts)),
                _autocast(training),
            ):
                parts.base(**inputs)
        except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
            failed = failed or error
            continue
        if len({call.hidden.dim() for call in calls}) == 1:
            return calls
    raise failed or ValueError("the model does not call its layers as the others do")


# What layers return: hidden states, alone or first.
_RETURNED: tuple[Callable[[Any], Any], ...] = (lambda x: x, lambda x: (x,), lambda x: (x, None))


def _autocast(training: Training) -> contextlib.AbstractContextManager[object]:
    enabled = training.dtype_bytes != training.parameter_bytes
    enabled = enabled or (training.lora is not None and training.lora.autocast)
    # Without the cache, which would keep fake weights.
    dtype = _DTYPES[training.dtype_bytes]
    return torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=False)


# -- layers ------------------------------------------------------------------------------------


def _kind(call: _Call) -> object:
    """What a layer is made of; layers of which this is equal cost and save the same."""
    modules = tuple((name, type(module)) for name, module in call.layer.named_modules())
    settings = tuple(
        (name, value)
        for module in call.layer.modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | str) and name not in _INDEX
    )
    tensors = tuple((x.shape, x.dtype, x.requires_grad) for x in call.layer.parameters())
    given = (*call.args, *call.kwargs.values())
    windows = tuple((x.window, x.local) for x in given if isinstance(x, MaskMeaning))
    return modules, settings, tensors, windows


def _trace_kind(
    parts: ModelParts,
    calls: Sequence[_Call],
    lengths: tuple[int, int],
    training: Training,
    *,
    reached: bool,
) -> LayerProfile:
    try:
        return _trace_layer(parts, calls, lengths, training, reached)
    except _LOOKS_AT_VALUES as error:
        logger.info("%s is traced on the CPU: %s", type(calls[0].layer).__name__, error)
    layer = calls[0].layer
    lengths = _SCAN_CPU_LENGTHS if parts.has_recurrent_state else _CPU_LENGTHS
    calls = [
        next(call for call in _calls(parts, tokens, training) if call.layer is layer)
        for tokens in lengths
    ]
    with _on_zeros(layer):
        calls = [tree_map_only(Tensor, _zeros, call) for call in calls]
        return _trace_layer(parts, calls, lengths, training, reached)


def _trace_layer(
    parts: ModelParts,
    calls: Sequence[_Call],
    lengths: tuple[int, int],
    training: Training,
    reached: bool,
) -> LayerProfile:
    """Traces one layer by its calls at two lengths; `reached`: its input needs a gradient."""
    with contextlib.ExitStack() as ends:
        runs = [
            ends.enter_context(
                contextlib.closing(_Run(parts, call, tokens, training, reached=reached))
            )
            for call, tokens in zip(calls, lengths, strict=True)
        ]
        short, long = (run.forward() for run in runs)
        per_token = {
            count.name: round(
                (getattr(long, count.name) - getattr(short, count.name)) / (lengths[1] - lengths[0])
            )
            for count in fields(_Counts)
        }
        # Gradients have no part that does not grow with the tokens, so one run will do.
        few, many = (run.graph_nodes() for run in runs)
        added = (many - few) / (lengths[1] - lengths[0])
        backward = round(runs[1].backward_flops() / lengths[1])
        weights, adapters = _count(calls[0].layer.named_parameters())
        keys = runs[1].keys
        return LayerProfile(
            hidden_size=runs[1].hidden.shape[-1],
            num_heads=keys.num_heads,
            num_kv_heads=keys.num_kv_heads,
            qk_head_size=keys.qk_head_size,
            v_head_size=keys.v_head_size,
            window=keys.window,
            borrows_keys=keys.borrowed,
            state_bytes=sum(state.nbytes for state in runs[1].states.values()),
            graph_nodes=round(few - added * lengths[0]),
            graph_nodes_per_1024=round(1024 * added),
            scans=any(kind == "recurrent" for kind, *_ in runs[1].states),
            **per_token,
            largest_bytes=-(-runs[1].largest_bytes // lengths[1]),
            input_gradient_flops=backward - per_token["weight_gradient_flops"],
            total_weights=weights,
            adapter_weights=adapters,
        )


def _count(parameters: Iterable[tuple[str, nn.Parameter]]) -> tuple[int, int]:
    """Elements of weights, and of LoRA's adapters."""
    sizes = {True: 0, False: 0}
    for name, parameter in parameters:
        sizes[".lora_" in name] += parameter.numel()
    return sizes[False], sizes[True]


@contextlib.contextmanager
def _on_zeros(layer: nn.Module) -> Iterator[None]:
    """Gives a layer real weights for a while, all zero: then all tokens choose the same experts."""
    fakes = _replace_tensors(layer, _zeros)
    try:
        yield
    finally:
        _replace_tensors(layer, lambda zeros: fakes[zeros])


def _zeros(fake: Tensor) -> Tensor:
    return torch.zeros(fake.shape, dtype=fake.dtype, device="cpu").requires_grad_(
        fake.requires_grad
    )


def _replace_tensors(module: nn.Module, make: Callable[[Tensor], Tensor]) -> dict[Tensor, Tensor]:
    """Replaces parameters and buffers by what `make` makes of them; returns the old by the new."""
    new: dict[Tensor, Tensor] = {}
    for part in module.modules():
        owners: Any = (part._parameters, part._buffers)
        for tensors in owners:
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in new:
                    made = make(tensor)
                    if tensors is part._parameters and made is not tensor:
                        made = nn.Parameter(made, tensor.requires_grad)
                    new[tensor] = made
                tensors[name] = new[tensor]
    return {made: old for old, made in new.items()}


# -- one run -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Counts:
    """What a layer came to at one length: FLOPs, bytes and elements."""

    forward_flops: int = 0
    weight_gradient_flops: int = 0
    inputs_recompute_flops: int = 0
    matmuls_recompute_flops: int = 0
    inputs_bytes: int = 0
    matmuls_bytes: int = 0
    whole_bytes: int = 0
    mlp_width: int = 0
    adapted_mlp_width: int = 0
    tiled_bytes: int = 0
    tile_bytes: int = 0
    tiles_recompute_flops: int = 0


@dataclass(slots=True)
class _Tiled:
    """One call of a module that takes tokens alone, and so can run in tiles."""

    begin: int
    """Products that ran before it."""
    end: int = 0
    """The same, and its own."""
    last_save: int = 0
    """The same, up to the last tensor that is saved in it."""
    saved: set[int | None] = field(default_factory=set[int | None])
    """Memory that autograd saves in it."""
    blank: tuple[bool, ...] = ()
    """Which of its thick products a tile does without when it runs again."""
    followed: bool = False
    """Whether anything is saved outside such modules behind it."""


class _Run:
    """One forward and backward of a layer at one length; also the stash of its attention."""

    def __init__(
        self, parts: ModelParts, call: _Call, tokens: int, training: Training, *, reached: bool
    ) -> None:
        self._parts = parts
        self._layer = call.layer
        self._training = training
        self.keys = _SeenKeys(tokens, call.stored)
        self._is_fake = isinstance(call.hidden, FakeTensor)
        own = (*call.layer.parameters(), *call.layer.buffers())
        self._others = {storage_key(tensor) for tensor in own}
        """Memory that is not the layer's activations."""
        self._slices: dict[int | None, int] = {}
        """Bytes of arguments, which may be slices of something larger."""
        self._args = tuple(self._leaf(str(i), x) for i, x in enumerate(call.args))
        self._kwargs = {name: self._leaf(name, x) for name, x in call.kwargs.items()}
        self.hidden: Tensor = self._args[0] if self._args else self._kwargs[_HIDDEN]
        self.hidden.requires_grad_(reached)
        self._slices.pop(storage_key(self.hidden), None)
        self._recorder = _WatchedRecorder(
            call.layer,
            self.hidden,
            hold=_Size,
            without_memory=isinstance(self.hidden, FakeTensor),
        )
        self._needless = UnusedMatmulFinder(self.hidden, without_memory=True)
        self._states = LayerStates({})
        rank = None if training.lora is None else training.lora.rank
        self._counter = _FlopCounter(call.layer, self.hidden, rank)
        self._counter.trackers += (self._needless, self._recorder)
        self._packed: list[list[Tensor]] = []
        """What autograd holds of this run: lists of one tensor, which `close` empties."""
        self._saved: dict[int | None, Tensor] = {}
        """By memory; the tensors stay, so that no other one takes their place."""
        self._last_save = 0
        self._outside: dict[int | None, Tensor] = {}
        """By memory, what is saved where these modules run in tiles: outside them, or their input.
        """
        self._tiles: list[_Tiled] = []
        self._tile: _Tiled | None = None
        self._tile_needless = self._needless
        self._attention_bytes = 0
        self._attending_child: str | None = None
        self._out = self.hidden
        self.largest_bytes = self.hidden.nbytes

    def _leaf(self, name: str, value: Any) -> Any:
        if name == SHARED_KV:
            return value  # layers write into it what later ones read

        def leaf(tensor: Tensor) -> Tensor:
            own = _fake_mode().from_tensor(tensor) if self._is_fake else tensor
            own = own.detach().requires_grad_(tensor.requires_grad)
            if name.startswith(_POSITIONS):
                self._others.add(storage_key(own))
            else:
                self._slices[storage_key(own)] = own.nbytes
            return own

        return tree_map_only(Tensor, leaf, value)

    @property
    def again(self) -> bool:
        return False

    def get(self) -> None:
        """Attention begins: its products are not the layer's."""
        self._recorder.pause()

    def put(self, out_BNCH: Tensor, lse_BNC: Tensor) -> None:
        self._attending_child = self._counter.child
        self._attention_bytes = out_BNCH.nbytes + lse_BNC.nbytes
        self.largest_bytes = max(self.largest_bytes, out_BNCH.nbytes)
        self._needless.add_inputs(out_BNCH, lse_BNC)
        self._recorder.start(out_BNCH, lse_BNC)

    def forward(self) -> _Counts:
        with _autocast(self._training):
            self._out = self._forward()
        forward = self._counter.products
        held = self._recorder.stop()
        counts = _Counts(
            forward_flops=sum(product.flops for product in forward),
            weight_gradient_flops=sum(product.flops for product in forward if product.trains),
            whole_bytes=sum(map(self._saved_bytes, self._saved)),
            inputs_bytes=self.hidden.nbytes + self._attention_bytes,
            mlp_width=sum(
                product.inputs
                for product in forward
                if product.is_inner_end and product.child != self._attending_child
            ),
            adapted_mlp_width=max(
                (x.adapted for x in forward if x.child != self._attending_child), default=0
            ),
        )
        counts.matmuls_bytes = counts.inputs_bytes + sum(
            product.output.nbytes for product in held if isinstance(product.output, _Size)
        )
        sizes = (x.output.nbytes for x in held if isinstance(x.output, _Size))
        saved = map(self._saved_bytes, self._saved)
        self.largest_bytes = max(self.largest_bytes, *sizes, *saved)
        found = self._needless.result()
        blank = iter(() if found is None else found.is_unused)
        counts.inputs_recompute_flops = sum(
            product.flops
            for product in forward[: self._last_save]
            if not (product.thick and next(blank, False))
        )
        counts.tiled_bytes, counts.tile_bytes = self._tiles_bytes(counts.whole_bytes)
        counts.tiles_recompute_flops = self._tiles_flops(() if found is None else found.is_unused)
        thick = iter(held)
        # A thick product of weights alone is computed again, too.
        counts.matmuls_recompute_flops = sum(
            product.flops
            for product in forward[: self._last_save]
            if not product.thick or next(thick).of_weights
        )
        return counts

    def _tiles_bytes(self, whole_bytes: int) -> tuple[int, int]:
        """What is not saved where modules run in tiles, and the most that one module saves."""
        outside = sum(self._size(key, x) for key, x in self._outside.items())
        inside = (
            sum(self._saved_bytes(key) for key in tile.saved - self._outside.keys())
            for tile in self._tiles
        )
        return max(0, whole_bytes - outside), max(inside, default=0)

    def _tiles_flops(self, blank: tuple[bool, ...]) -> int:
        """What runs once more where a layer's inputs are kept and modules run in tiles.

        A module that something behind it needs runs for its output, and then tile by tile.
        """
        products, answered = self._counter.products, iter(blank)
        needed = [x.flops * (not (x.thick and next(answered, False))) for x in products]
        flops = 0
        for tile in self._tiles:
            own = iter(tile.blank)
            inside = products[tile.begin : tile.last_save]
            again = sum(x.flops * (not (x.thick and next(own, False))) for x in inside)
            if tile.followed:
                again += sum(product.flops for product in products[tile.begin : tile.end])
            flops += again - sum(needed[tile.begin : min(tile.end, self._last_save)])
        return max(0, flops)

    @contextlib.contextmanager
    def _watching_tiles(self) -> Iterator[None]:
        """Notes what modules do that can run in tiles, if they take tokens alone."""
        modules = [
            part
            for part in self._layer.modules()
            if part is not self._layer and is_worth_tiles(part) and not is_searched(part)
        ]
        in_tiles = {part: functools.partial(self._in_tile, part, part.forward) for part in modules}
        with patched_attribute("forward", in_tiles):
            yield

    def _in_tile(
        self, part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        alone = len(args) == 1 and not kwargs and args[0].shape[:-1] == self.hidden.shape[:-1]
        if self._tile is not None or not alone:
            return forward(*args, **kwargs)
        if args[0].requires_grad or any(p.requires_grad for p in part.parameters()):
            self._save_outside(args[0])
        tile = self._tile = _Tiled(len(self._counter.products))
        self._tile_needless = UnusedMatmulFinder(args[0], without_memory=True)
        self._counter.trackers.append(self._tile_needless)
        try:
            output = forward(*args)
        finally:
            self._counter.trackers.remove(self._tile_needless)
            self._tile = None
        found = self._tile_needless.result()
        tile.blank = () if found is None else found.is_unused
        tile.end = len(self._counter.products)
        self._tiles.append(tile)
        return output

    def _save_outside(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key not in self._others:
            self._outside.setdefault(key, tensor)
        for tile in self._tiles:
            tile.followed = True

    def _forward(self) -> Tensor:
        context = ChunkContext(
            model=self._parts,
            layer=0,
            end=self.keys.tokens,
            kv=self.keys,
            choose_backend=self.keys.choose_backend,
            stash=self,
            states=self._states,
        )
        with (
            chunked_attention(context),
            saved_tensors_hooks(self._save, lambda packed: packed[0]),
            self._watching_tiles(),
            self._counter.watching(),
        ):
            self._recorder.start()
            try:
                out = self._layer.forward(*self._args, **self._kwargs)
            finally:
                self._recorder.abandon()
        return out[0] if isinstance(out, tuple) else out

    def close(self) -> None:
        """Lets go of what autograd holds.

        A result that an operation saves holds the operation, and no collector sees that circle:
        without backward, which only one of two runs has, all of a run would stay.
        """
        for packed in self._packed:
            packed.clear()
        vars(self).clear()

    def _save(self, tensor: Tensor) -> list[Tensor]:
        self._recorder.on_saved(tensor)
        self._needless.on_saved(tensor)
        self._last_save = len(self._counter.products)
        key = storage_key(tensor)
        if key not in self._others and key not in self._saved:
            self._saved[key] = tensor
        if self._tile is None:
            self._save_outside(tensor)
        else:
            self._tile_needless.on_saved(tensor)
            self._tile.last_save = self._last_save
            if key not in self._others:
                self._tile.saved.add(key)
        self._packed.append([tensor])
        return self._packed[-1]

    def _saved_bytes(self, key: int | None) -> int:
        return self._size(key, self._saved[key])

    def _size(self, key: int | None, tensor: Tensor) -> int:
        num_bytes = tensor.untyped_storage().nbytes() if key is not None else tensor.nbytes
        return self._slices.get(key, num_bytes)

    @property
    def states(self) -> States:
        return self._states.after

    def graph_nodes(self) -> int:
        """Counts the nodes of the graph that `forward` has left; before `backward_flops`."""
        ends = [x.grad_fn for x in (self._out, *self.states.values()) if x.grad_fn is not None]
        found: set[Any] = set(ends)
        while ends:
            behind = {node for node, _ in ends.pop().next_functions if node is not None} - found
            found |= behind
            ends += behind
        # Those of parameters there are once, for all chunks.
        return sum("AccumulateGrad" not in node.name() for node in found)

    def backward_flops(self) -> int:
        """Runs the layer's backward and counts; after `forward`."""
        given = tree_leaves((self._args, self._kwargs, list(self._layer.parameters())))
        leaves = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
        if not (self._out.requires_grad and leaves):
            return 0
        counter = _FlopCounter(self._layer, self.hidden)
        with counter.watching():
            torch.autograd.grad(self._out, leaves, torch.zeros_like(self._out), allow_unused=True)
        return sum(product.flops for product in counter.products)


class _Size:
    """Stands for a product that is held."""

    def __init__(self, _name: str, tensor: Tensor) -> None:
        self.nbytes = tensor.nbytes

    def handles(self) -> tuple[()]:
        return ()

    def take(self) -> Tensor:
        raise AssertionError("a traced layer is not recomputed")

    def borrow(self) -> NoReturn:
        raise AssertionError("a traced layer is not recomputed")

    def drop(self) -> None:
        """The product is replaced by a copy of the same size."""


class _Product(NamedTuple):
    """A matrix product (or a convolution) that ran."""

    flops: int
    inputs: int
    """Elements of the factor over whose last dim it sums."""
    thick: bool
    trains: bool
    """One factor is a weight that is trained, or made of one."""
    is_inner_end: bool
    """It is thick, and its result is as wide as the layer."""
    adapted: int
    """Elements of the result, if it is the second factor's of an adapter and not that wide."""
    child: str | None
    """The layer's child module in which it ran."""


class _WatchedRecorder(SelectiveRecorder):
    """A recorder that is told what runs by a `_FlopCounter`."""

    def _begin(self) -> None:
        """Torch is not to tell it."""

    def _end(self) -> None:
        """Likewise."""

    def watch(
        self, run: RunOperation, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        watched = super().watch if self.is_running else _tell_nobody
        return watched(run, func, args, kwargs)


def _tell_nobody(run: RunOperation, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return run(func, args, kwargs)


class _FlopCounter(LightDispatchMode):
    """Counts the matrix products of one layer, and tells others what runs.

    One mode for all of them: torch takes as long to pass an operation on from mode to mode as they
    take to look at it.
    """

    def __init__(self, layer: nn.Module, hidden: Tensor, rank: int | None = None) -> None:
        super().__init__()
        # Where the layer's input is fake, so is what it makes of nothing.
        self._run = _run_fake if isinstance(hidden, FakeTensor) else run_operation
        self._rank = rank
        self._layer = layer
        self._width = hidden.shape[-1]
        self.products: list[_Product] = []
        self.trackers: list[DependencyTracker] = []
        self.child: str | None = None
        self._weights = {storage_key(x): x.requires_grad for x in layer.parameters()}
        """Memory of weights and of what is made of weights alone, and whether these are trained."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Counts what runs, and notes which child of the layer is running."""

        def entered(name: str | None) -> Any:
            return lambda *_: setattr(self, "child", name)

        handles: list[Any] = []
        for name, child in self._layer.named_children():
            handles.append(child.register_forward_pre_hook(entered(name)))
            handles.append(child.register_forward_hook(entered(None)))
        fake = _fake_mode() if self._run is _run_fake else contextlib.nullcontext()
        try:
            with fake, self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run: RunOperation = self._count
        for tracker in self.trackers:
            run = functools.partial(tracker.watch, run)
        return run(func, args, kwargs or {})

    def _count(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        op = operation(func)
        out = self._run(func, args, kwargs)
        given = [self._weights.get(storage_key(x)) for x in tensors_in((*args, *kwargs.values()))]
        made = any(given) if given and None not in given else None
        for tensor in tensors_in((out,)):
            if made is None:
                self._weights.pop(storage_key(tensor), None)
            else:
                self._weights[storage_key(tensor)] = made
        if op.left_factor is not None and len(args) > op.left_factor:
            left = args[op.left_factor]
            thick = op.is_thick_matmul(args, self._width)
            second = self._rank is not None and any(given) and left.shape[-1] == self._rank
            inner = second and out.shape[-1] not in (self._width, self._rank)
            self.products.append(
                _Product(
                    flops=_product_flops(op.name, left, args[op.left_factor + 1], out),
                    inputs=left.numel(),
                    thick=thick,
                    trains=any(given),
                    is_inner_end=thick and out.shape[-1] == self._width,
                    child=self.child,
                    adapted=out.numel() if inner else 0,
                )
            )
        elif func._overloadpacket in flop_registry:
            flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
            self.products.append(_Product(flops, 0, False, any(given), False, 0, self.child))
        return out


def _product_flops(name: str, left: Tensor, right: Any, out: Tensor) -> int:
    if "grouped" in name and left.dim() == right.dim() == 2:
        # Gradients of weights: the groups are runs of the summed dim.
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return 2 * out.numel() * left.shape[-1]


class _SeenKeys(LayerKV):
    """A store that notes what attention is given."""

    def __init__(self, tokens: int, stored: dict[int | None, Tensor]) -> None:
        super().__init__(((0, tokens),))
        self._stored = stored
        self.borrowed = False
        self.tokens = tokens
        self.num_kv_heads = self.qk_head_size = self.v_head_size = 0
        self.window: int | None = None
        self._gqa_ratio = 0

    @property
    def num_heads(self) -> int:
        return self._gqa_ratio * self.num_kv_heads

    def choose_backend(self, requirement: AttentionSpec) -> Backend:
        self._gqa_ratio = requirement.gqa_ratio
        return _NOTHING

    def put(self, chunk: int, k_BKCH: Tensor, v_BKCH: Tensor, *, keep: Keep | None = None) -> None:
        self.num_kv_heads, self.qk_head_size = k_BKCH.shape[1], k_BKCH.shape[-1]
        self.v_head_size = v_BKCH.shape[-1]
        self.borrowed = storage_key(k_BKCH) in self._stored
        self._stored[storage_key(k_BKCH)] = k_BKCH
        super().put(chunk, k_BKCH, v_BKCH, keep=keep)

    def blocks(
        self, pieces: tuple[AttentionSegment, ...], *, window: int | None, local: int | None = None
    ) -> tuple[Block, ...]:
        self.window = local if window is None else window
        return super().blocks(pieces, window=window, local=local)


class _Nothing(Backend):
    """Attends without computing: results of the right shapes."""

    name = "nothing"

    def reason_unsupported(self, requirement: Any) -> str | None:
        return None

    def forward(self, q_BNCH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, **_: Any) -> AttentionOutput:
        rows, heads, tokens, _size = q_BNCH.shape
        if heads % k_BKTH.shape[1]:
            refuse(
                "the attention of this model",
                {"heads": heads, "key and value heads": k_BKTH.shape[1]},
                allowed="heads that are a multiple of the key and value heads",
                remedy="mend the model's config.json",
            )
        sums = accumulation_dtype(q_BNCH.dtype)
        lse_BNC = q_BNCH.new_zeros(rows, heads, tokens, dtype=sums)
        size = v_BKTH.shape[-1]
        if q_BNCH.is_contiguous():
            # The CPU's kernel and cuDNN's lay their output out as the queries are.
            return AttentionOutput(q_BNCH.new_zeros(rows, heads, tokens, size), lse_BNC)
        return AttentionOutput(q_BNCH.new_zeros(rows, tokens, heads, size).transpose(1, 2), lse_BNC)

    def backward(
        self, dout_BNCH: Tensor, q_BNCH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, *_: Any, **__: Any
    ) -> Gradients:
        return Gradients(
            torch.zeros_like(q_BNCH), torch.zeros_like(k_BKTH), torch.zeros_like(v_BKTH)
        )


_NOTHING = _Nothing()
