"""Trace a model's profile: FLOPs of its decoder layers, and bytes that autograd saves of them.

The model is built of torch's fake tensors, which have shapes and dtypes but no memory. Each kind of
decoder layer runs forward and backward at two lengths, with the engine's own attention around a
backend that computes nothing. The difference between the two runs, divided by the difference in
tokens, is the cost of one token. So this file knows nothing about any model family. A layer whose
code depends on values (a loop over the experts that were chosen) runs on the CPU instead, on zeros;
so do tiny models, for which that is faster.

What is counted is what `sppo_hf.engine.recompute` may do with a layer: save everything that
autograd saves ("whole"); or the layer's input and attention's results ("inputs"); or these and the
matmul outputs that a `SelectiveRecorder` holds. An `UnusedMatmulFinder` finds matmuls that need not
run again. With `Training.layer_kernels` torch code that saves what Liger's kernels save runs in
norms and gated products (`layer_kernels.like_kernels`), and in place of Liger's functions where its
own patches have put them into the model. Recurrent layers run Transformers' torch code from states
of zeros, whatever kernels are installed (`mixer_kernels.torch_code_alone`); these save less. Not
covered: elementwise operations count no FLOPs, and memory that does not grow with the tokens
(copies of weights under autocast) is left out.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
from sppo_hf.engine.indexer import CHOSEN, IndexKeys, indexers_in_tiles, indexers_of
from sppo_hf.engine.layer_kernels import like_kernels
from sppo_hf.engine.mixer_kernels import torch_code_alone
from sppo_hf.engine.model_parts import (
    ATTENTION_DROPOUT_FIELDS,
    BUILD_ERRORS,
    ModelParts,
    auto_class_of,
    collected_routers,
    decoder_config,
    find_parts,
    layer_list,
    patched_attribute,
    suppress_peft_warnings,
    swapped_modules,
)
from sppo_hf.engine.recompute import SavedTensor
from sppo_hf.engine.recurrent_state import LayerStates, StateCache, States
from sppo_hf.engine.selective import (
    DependencyTracker,
    LightDispatchMode,
    RunOperation,
    SelectiveRecorder,
    UnusedMatmulFinder,
    operation,
    storage_key,
    tensors_in,
)
from sppo_hf.engine.sliced_calls import (
    CannotRunByLayer,
    PrefixLength,
    is_searched,
    is_worth_tiles,
    layer_calls,
    returns_more,
)
from sppo_hf.engine.stage_messages import SHARED_KV, MessageLayout
from sppo_hf.errors import ConfigError, SPPOError, first_line
from sppo_hf.planning.config_file import check_sizes, family, rotary_limit_tokens, to_fields
from sppo_hf.planning.model_profile import LayerProfile, LoraShape, ModelProfile, Training
from sppo_hf.rules import refuse, show

logger = logging.getLogger(__name__)

_LENGTHS = (256, 512)
"""Tokens of the two runs."""

_CPU_LENGTHS = (64, 128)
"""Tokens of the two runs where numbers are really computed."""

_TINY_ELEMENTS = 2**20
"""Elements of a model's weights with which torch takes less time to compute than to do without."""

_SCAN_LENGTHS, _SCAN_CPU_LENGTHS = (512, 1024), (256, 512)
"""The same in models with recurrent layers, which pad their blocks of 64 to 256 tokens."""

_DATA_DEPENDENT = (
    *(DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException),
)

_DTYPES = {1: torch.bfloat16, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}

_HIDDEN = "hidden_states"

# Prefixes of a layer's arguments with positions, whose tables many layers share.
_POSITIONS = ("position", "cache_position")

# Attributes in which layers of one kind differ.
_INDEX = frozenset(("layer_idx", "layer_id", "layer_number"))


def trace_config(config: object, training: Training) -> ModelProfile:
    """Trace the causal language model that a configuration describes; see `trace_model`.

    `config` is a configuration of Transformers, or an object with the fields of a `config.json`.

    Raises:
        UnsupportedModelError: the engine cannot run such a model.
        ConfigError: no model can be made of these settings, or LoRA was asked for and PEFT is not
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
    """Trace the model that `make(config, dtype=...)` returns; `config` is left unchanged.

    Raises:
        UnsupportedModelError: the engine cannot run such a model.
        ConfigError: LoRA was asked for and PEFT is not installed.
    """
    with (
        _quiet_transformers(),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),  # the caller's; backward runs outside of `_autocast`
        contextlib.ExitStack() as stack,
        # Hides all of this from the caller's hooks; no backward unpacks what these ones pack.
        saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing),
    ):
        parts = find_parts(_build(config, training, make))
        stack.enter_context(torch_code_alone(parts))
        tensors = (*parts.causal_lm.parameters(), *parts.causal_lm.buffers())
        is_tiny = sum(tensor.numel() for tensor in tensors) <= _TINY_ELEMENTS
        materialise = _make_zeros if is_tiny else _make_fake
        with _only_layers(parts, ()):
            materialise(parts.causal_lm)
        lengths = _CPU_LENGTHS if is_tiny else _LENGTHS
        if parts.has_recurrent_state:
            lengths = _SCAN_LENGTHS
        calls = [_layer_calls(parts, tokens, training) for tokens in lengths]
        # With adapters nothing before the first layer needs a gradient, so that layer is a kind.
        kinds = [
            (_layer_kind(call), training.lora and index == 0) for index, call in enumerate(calls[0])
        ]
        examples = {kinds.index(kind) for kind in kinds}
        with _only_layers(parts, [parts.layers[index] for index in examples]):
            if training.lora is not None:
                with torch.device("meta"):
                    _add_adapters(parts, training.lora)
            materialise(parts.causal_lm)
        layers = [parts.layers[index] for index in examples]
        with patched_attribute("forward", like_kernels(layers) if training.layer_kernels else {}):
            traced = {
                kinds[index]: _trace_kind(
                    parts,
                    [calls_of_length[index] for calls_of_length in calls],
                    lengths,
                    training,
                    input_needs_grad=training.lora is None or index > 0,
                )
                for index in sorted(examples)
            }
    in_layers = {p for layer in parts.layers for p in layer.parameters()}
    outside = [x for x in parts.causal_lm.named_parameters() if x[1] not in in_layers]
    weights, adapters = _count_elements(outside)
    ends = {*parts.decoder.parameters(), *parts.head_parameters()}
    encoders, _ = _count_elements(x for x in outside if x[1] not in ends)
    head: Any = parts.causal_lm.get_output_embeddings()
    embedding: Any = parts.causal_lm.get_input_embeddings()
    # Kinds with equal counts share one object.
    unique = {layer: layer for layer in traced.values()}
    layers = tuple(unique[traced[kind]] for kind in kinds)
    messages = MessageLayout.of(parts, layers)
    return ModelProfile(
        training=training,
        layers=layers,
        vocab_size=embedding.weight.shape[0] if head is None else head.weight.shape[0],
        tied=head is not None and head.weight is embedding.weight,
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
    """Silence warnings about the model, which come when the real one is made."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


# -- the model ---------------------------------------------------------------------------------


def _build(config: PreTrainedConfig, training: Training, make: Any) -> nn.Module:
    """Build the model on the meta device, which is faster than building it of fake tensors."""
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    for settings in (config, config.get_text_config(decoder=True)):
        # The engine refuses dropout for training; without it such a model can be evaluated.
        for name in ATTENTION_DROPOUT_FIELDS:
            if getattr(settings, name, None):
                setattr(settings, name, 0.0)
        if getattr(settings, "output_router_logits", False):
            setattr(settings, "output_router_logits", False)  # noqa: B010
    with torch.device("meta"):
        return make(config, dtype=_DTYPES[training.parameter_bytes]).train()


def _only_layers(
    parts: ModelParts, layers: Sequence[nn.Module]
) -> contextlib.AbstractContextManager[None]:
    """Context in which the model has only these decoder layers."""
    name, _ = layer_list(parts.decoder)
    return swapped_modules([(parts.decoder, name, nn.ModuleList(layers))])


@functools.cache
def _fake_mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def _make_fake(module: nn.Module) -> None:
    """Turn tensors on the meta device into fake tensors on the CPU."""

    def fake(tensor: Tensor) -> Tensor:
        if not tensor.is_meta or isinstance(tensor, FakeTensor):
            return tensor
        return FakeTensor(_fake_mode(), tensor.detach(), torch.device("cpu"))

    _replace_tensors(module, fake)


def _make_zeros(module: nn.Module) -> None:
    """Turn tensors on the meta device into zeros on the CPU."""
    _replace_tensors(module, lambda tensor: _zeros(tensor) if tensor.is_meta else tensor)


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation, without its values for `_grouped_mm`, which torch has in 16 bits only."""
    if func is not torch.ops.aten._grouped_mm.default:
        return func(*args, **kwargs)
    left, right = args[:2]
    if left.dim() == right.dim() == 2:  # one product for each group of the summed dim
        return left.new_zeros(args[2].shape[0], left.shape[0], right.shape[1])
    return left.new_zeros(*left.shape[:-1], right.shape[-1])


def _add_adapters(parts: ModelParts, lora: LoraShape) -> None:
    model = parts.causal_lm
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            "what LoRA costs in this model is not known yet, and finding out takes PEFT, which is "
            "not installed. Remedy: install peft, or plan without LoRA."
        ) from error
    model.requires_grad_(False)
    targets = sorted(_adapter_targets(parts.base, lora))
    if not targets:
        return
    settings = LoraConfig(r=lora.rank, target_modules=targets, lora_dropout=lora.dropout)
    with suppress_peft_warnings():
        # In the base model: in a whole one PEFT reads names such as `gate_proj` as the weights of
        # experts, too.
        inject_adapter_in_model(settings, nn.ModuleList([parts.base]))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(_DTYPES[lora.dtype_bytes])


def _adapter_targets(base: nn.Module, lora: LoraShape) -> Iterator[str]:
    """Yield names for PEFT of the linear layers that `lora` adapts: last parts, or whole paths."""
    paths: dict[str, list[str]] = {}
    other_names: set[str] = set()
    for path, module in base.named_modules():
        name = path.rpartition(".")[2]
        # PEFT cannot wrap routers that return more than one tensor (Llama 4's).
        if type(module).__name__ == "Conv1D" or (
            isinstance(module, nn.Linear) and "Router" not in type(module).__name__
        ):
            paths.setdefault(name, []).append(path)
        else:
            other_names.add(name)
    for name, found in paths.items():
        if lora.adapts(name):
            # A name such as "0" may belong to other modules as well.
            yield from found if name in other_names else (name,)


class _LayerCall(NamedTuple):
    """The model's call of one of its decoder layers."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    stored_keys: dict[int | None, Tensor]
    """Keys that layers have attended to, by storage; one dict for all layers."""

    @property
    def hidden(self) -> Tensor:
        """The layer's input."""
        return self.args[0] if self.args else self.kwargs[_HIDDEN]


def _layer_calls(parts: ModelParts, tokens: int, training: Training) -> list[_LayerCall]:
    """Run the model with its decoder layers skipped, and return how each would be called."""
    # Inputs are real tensors until they meet a weight: masks are analysed by value, and rotary
    # tables may depend on the largest position.
    ids = torch.zeros(1, tokens, dtype=torch.long, device="cpu")
    positions = torch.arange(tokens, device="cpu")[None]
    if table := parts.learned_positions():
        positions %= table[1]  # no restart separates documents where a mask is given
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "position_ids": positions,
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

    def run_base() -> None:
        with chunked_attention(ChunkContext(model=parts)), _autocast(training):
            parts.base(**inputs)

    try:
        calls = layer_calls(parts, run_base)
    except CannotRunByLayer as error:
        raise (error.__cause__ or error) from None
    stored_keys: dict[int | None, Tensor] = {}
    for index, layer in enumerate(parts.layers):
        if CHOSEN in calls[index][1] and not indexers_of(layer):
            # An earlier layer's indexer, which did not run, has chosen.
            calls[index][1][CHOSEN] = torch.zeros(1, tokens, tokens, dtype=torch.int32)
    return [
        _LayerCall(layer, *calls[index], stored_keys) for index, layer in enumerate(parts.layers)
    ]


def _autocast(training: Training) -> contextlib.AbstractContextManager[object]:
    enabled = training.dtype_bytes != training.parameter_bytes
    enabled = enabled or (training.lora is not None and training.lora.autocast)
    # Its cache would keep fake copies of weights.
    dtype = _DTYPES[training.dtype_bytes]
    return torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=False)


# -- layers ------------------------------------------------------------------------------------


def _layer_kind(call: _LayerCall) -> object:
    """A key that is equal for layers that cost and save the same."""
    modules = tuple((name, type(module)) for name, module in call.layer.named_modules())
    settings = tuple(
        (name, value)
        for module in call.layer.modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | str) and name not in _INDEX
    )
    tensors = tuple((x.shape, x.dtype, x.requires_grad) for x in call.layer.parameters())
    arguments = (*call.args, *call.kwargs.values())
    windows = tuple((x.window, x.local) for x in arguments if isinstance(x, MaskMeaning))
    return modules, settings, tensors, windows


def _trace_kind(
    parts: ModelParts,
    calls: Sequence[_LayerCall],
    lengths: tuple[int, int],
    training: Training,
    *,
    input_needs_grad: bool,
) -> LayerProfile:
    """Trace one layer by its calls at two lengths; if its code depends on values, with zeros."""
    try:
        return _trace_layer(parts, calls, lengths, training, input_needs_grad)
    except _DATA_DEPENDENT as error:
        logger.info("%s is traced on the CPU: %s", type(calls[0].layer).__name__, error)
    layer = calls[0].layer
    lengths = _SCAN_CPU_LENGTHS if parts.has_recurrent_state else _CPU_LENGTHS
    calls = [
        next(call for call in _layer_calls(parts, tokens, training) if call.layer is layer)
        for tokens in lengths
    ]
    # All weights are zero, so all tokens choose the same experts.
    fakes = _replace_tensors(layer, _zeros)
    try:
        calls = [tree_map_only(Tensor, _zeros, call) for call in calls]
        return _trace_layer(parts, calls, lengths, training, input_needs_grad)
    finally:
        _replace_tensors(layer, lambda zeros: fakes[zeros])


def _trace_layer(
    parts: ModelParts,
    calls: Sequence[_LayerCall],
    lengths: tuple[int, int],
    training: Training,
    input_needs_grad: bool,
) -> LayerProfile:
    with contextlib.ExitStack() as exits:
        runs = [
            exits.enter_context(
                contextlib.closing(_LayerRun(parts, call, tokens, training, input_needs_grad))
            )
            for call, tokens in zip(calls, lengths, strict=True)
        ]
        short, long = (run.forward() for run in runs)
        per_token = {
            name: round((count - short[name]) / (lengths[1] - lengths[0]))
            for name, count in long.items()
        }
        few, many = (run.num_graph_nodes() for run in runs)
        nodes_per_token = (many - few) / (lengths[1] - lengths[0])
        # All FLOPs of backward grow with the tokens, so one run is enough.
        backward = round(runs[1].backward_flops() / lengths[1])
        weights, adapters = _count_elements(calls[0].layer.named_parameters())
        kv = runs[1].kv
        return LayerProfile(
            hidden_size=runs[1].hidden.shape[-1],
            num_heads=kv.num_heads,
            num_kv_heads=kv.num_kv_heads,
            qk_head_size=kv.qk_head_size,
            v_head_size=kv.v_head_size,
            window=kv.window,
            borrows_keys=kv.is_borrowed,
            state_bytes=sum(state.nbytes for state in runs[1].states.values()),
            graph_nodes=round(few - nodes_per_token * lengths[0]),
            graph_nodes_per_1024=round(1024 * nodes_per_token),
            scans=any(kind == "recurrent" for kind, *_ in runs[1].states),
            index_heads=sum(x.n_heads for x in runs[1].indexers),
            index_head_size=max((x.head_dim for x in runs[1].indexers), default=0),
            index_bytes=runs[1].index_bytes,
            chosen_bytes=runs[1].chosen_bytes,
            returns_more=runs[1].returns_more,
            takes_more=runs[1].takes_more,
            **per_token,
            largest_bytes=-(-runs[1].largest_bytes // lengths[1]),
            input_gradient_flops=backward - per_token["weight_gradient_flops"],
            total_weights=weights,
            adapter_weights=adapters,
        )


@contextlib.contextmanager
def _routers_seen(parts: ModelParts, layer: nn.Module) -> Iterator[list[Tensor]]:
    """Context that lists what routers of a layer would give to a loss, `[tokens, E]` each."""
    seen: list[Tensor] = []
    recorders = collected_routers(parts)

    def note(router: nn.Module, _: Any, output: Any) -> None:
        logits = output[recorders[type(router)]] if isinstance(output, tuple) else output
        if logits is not None:
            seen.append(logits.detach())

    hooks = [x.register_forward_hook(note) for x in layer.modules() if type(x) in recorders]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _count_elements(parameters: Iterable[tuple[str, nn.Parameter]]) -> tuple[int, int]:
    """Elements of weights, and of LoRA adapters."""
    sizes = {True: 0, False: 0}
    for name, parameter in parameters:
        sizes[".lora_" in name] += parameter.numel()
    return sizes[False], sizes[True]


def _zeros(like: Tensor) -> Tensor:
    zeros = torch.zeros(like.shape, dtype=like.dtype, device="cpu")
    return zeros.requires_grad_(like.requires_grad)


def _replace_tensors(module: nn.Module, make: Callable[[Tensor], Tensor]) -> dict[Tensor, Tensor]:
    """Replace each parameter and buffer by `make(tensor)`; returns the old tensors by the new."""
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
class _TokenWiseCall:
    """One call of a token-wise module, which can run in tiles of tokens.

    Matmuls are counted from the beginning of the layer.
    """

    begin: int
    """Matmuls before the call."""
    end: int = 0
    """Matmuls up to the end of the call."""
    last_save: int = 0
    """Matmuls up to the last tensor that autograd saves in the call."""
    saved: set[int | None] = field(default_factory=set[int | None])
    """Storages that autograd saves in the call."""
    unused: tuple[bool, ...] = ()
    """For each thick matmul of the call, whether a recomputed tile can leave it out."""
    is_output_needed: bool = False
    """Whether anything is saved after the call outside token-wise modules."""


class _LayerRun:
    """One forward and backward of a layer at one length; also the stash of its attention."""

    def __init__(
        self,
        parts: ModelParts,
        call: _LayerCall,
        tokens: int,
        training: Training,
        input_needs_grad: bool,
    ) -> None:
        self._parts = parts
        self._layer = call.layer
        self._training = training
        self.indexers: tuple[Any, ...] = indexers_of(call.layer)
        chooses = bool(self.indexers) or call.kwargs.get(CHOSEN) is not None
        self.chosen_bytes = _chosen_bytes(parts) if chooses else 0
        self.kv = _ObservedKV(tokens, call.stored_keys, chooses)
        self._is_fake = isinstance(call.hidden, FakeTensor)
        weights = (*call.layer.parameters(), *call.layer.buffers())
        self._not_activations = {storage_key(tensor) for tensor in weights}
        """Storages that are not the layer's activations."""
        self._argument_bytes: dict[int | None, int] = {}
        """Bytes of arguments by storage, which may be slices of something larger."""
        self._args = tuple(self._leaf(str(i), x) for i, x in enumerate(call.args))
        self._kwargs = {name: self._leaf(name, x) for name, x in call.kwargs.items()}
        self.hidden: Tensor = self._args[0] if self._args else self._kwargs[_HIDDEN]
        self.hidden.requires_grad_(input_needs_grad)
        self._argument_bytes.pop(storage_key(self.hidden), None)
        self._recorder = SelectiveRecorder(
            call.layer,
            self.hidden,
            hold=lambda _name, tensor: SavedTensor(tensor),
            without_memory=True,
        )
        self._unused_finder = UnusedMatmulFinder(self.hidden, without_memory=True)
        self._states = LayerStates({})
        rank = None if training.lora is None else training.lora.rank
        self._counter = _FlopCounter(call.layer, self.hidden, rank)
        self._counter.trackers += (self._unused_finder, self._recorder)
        self._packed: list[list[Tensor]] = []
        """Lists of one tensor each, which autograd holds and `close` empties."""
        self._saved: dict[int | None, Tensor] = {}
        """Saved tensors by storage; held, so that no other tensor reuses the address."""
        self._last_save = 0
        self._saved_outside: dict[int | None, Tensor] = {}
        """What is saved although token-wise modules run in tiles, by storage: tensors outside of
        these modules, and their inputs."""
        self._tile_calls: list[_TokenWiseCall] = []
        self._open_call: _TokenWiseCall | None = None
        self._open_call_finder = self._unused_finder
        self._attention_bytes = 0
        self._inputs = {storage_key(self.hidden)}
        """Storages of the layer's input and of attention's results."""
        self._matmuls_to_attention = -1
        """Matmuls before attention's results were there; -1 until then."""
        self._late: set[int | None] = set()
        """Storages saved behind the first matmul that follows attention."""
        self._attending_child: str | None = None
        self._matmuls_to_choice = 0
        self._router_logits: list[Tensor] = []
        self._out = self.hidden
        self.returns_more = False
        more = (*self._args[1:], *self._kwargs.values())
        alike = [x for x in more if isinstance(x, Tensor) and x.shape == self.hidden.shape]
        self.takes_more = any(x.is_floating_point() and x is not self.hidden for x in alike)
        self.largest_bytes = self.hidden.nbytes

    def _leaf(self, name: str, value: Any) -> Any:
        """An argument with its tensors replaced by leaves of autograd's graph."""
        if name == SHARED_KV:
            return value  # layers write into it what later ones read

        def leaf(tensor: Tensor) -> Tensor:
            own = _fake_mode().from_tensor(tensor) if self._is_fake else tensor
            own = own.detach().requires_grad_(tensor.requires_grad)
            if name.startswith(_POSITIONS) or name == CHOSEN:
                self._not_activations.add(storage_key(own))
            else:
                self._argument_bytes[storage_key(own)] = own.nbytes
            return own

        return tree_map_only(Tensor, leaf, value)

    @property
    def is_recompute(self) -> bool:
        return False

    def get(self) -> None:
        """Pause the recorder while attention runs, whose matmuls are not the layer's."""
        self._counter.trackers.remove(self._recorder)

    def put(self, out_BNCH: Tensor, lse_BNC: Tensor) -> None:
        self._attending_child = self._counter.child
        self._attention_bytes = out_BNCH.nbytes + lse_BNC.nbytes
        self._inputs |= {storage_key(out_BNCH), storage_key(lse_BNC)}
        # What is saved before the next matmul may be attention's own.
        self._matmuls_to_attention = len(self._counter.matmuls)
        self._late.clear()
        self.largest_bytes = max(self.largest_bytes, out_BNCH.nbytes)
        self._unused_finder.add_inputs(out_BNCH, lse_BNC)
        self._recorder.add_inputs(out_BNCH, lse_BNC)
        self._counter.trackers.append(self._recorder)

    def begin_choice(self) -> None:
        """Pause counting while an indexer runs.

        It has no backward and does not run again, and its scores grow with the keys.
        """
        self._matmuls_to_choice = len(self._counter.matmuls)
        self._counter.trackers.remove(self._recorder)
        self._counter.trackers.remove(self._unused_finder)

    def end_choice(self, indices_BCS: Tensor | None) -> None:
        del self._counter.matmuls[self._matmuls_to_choice :]
        if indices_BCS is not None:  # counted as those of a longer sequence
            self._not_activations.add(storage_key(indices_BCS))
        self._counter.trackers += (self._unused_finder, self._recorder)

    def chosen(self) -> None:
        """Nothing: the layer is not rerun."""

    @property
    def index_bytes(self) -> int:
        """Bytes per token of an indexer's keys."""
        return sum(x.head_dim for x in self.indexers) * self.hidden.element_size()

    def forward(self) -> dict[str, int]:
        """Run the layer's forward; returns totals by the names of `LayerProfile`'s fields."""
        with _autocast(self._training):
            self._out = self._run_forward()
            router_bytes = sum(torch.softmax(x, dim=-1).nbytes for x in self._router_logits)
        matmuls = self._counter.matmuls
        recorded = self._recorder.stop()
        held = [x.output.take() for x in recorded if x.output is not None]
        held_bytes = [output.nbytes for output in held]
        saved_bytes = list(map(self._saved_bytes, self._saved))
        self.largest_bytes = max([self.largest_bytes, *held_bytes, *saved_bytes])
        found = self._unused_finder.result()
        unused = () if found is None else found.is_unused
        tokens = self.kv.tokens
        index_weights = sum(
            x.numel() for indexer in self.indexers for x in indexer.parameters() if x.ndim > 1
        )
        chosen_bytes = self.chosen_bytes * len(self.indexers) * tokens
        inputs_bytes = self.hidden.nbytes + self._attention_bytes + chosen_bytes
        tiled_bytes, tile_bytes = self._bytes_in_tiles(sum(saved_bytes))
        recorded_thick = iter(recorded)
        return {
            "forward_flops": sum(x.flops for x in matmuls) + 2 * index_weights * tokens,
            "weight_gradient_flops": sum(x.flops for x in matmuls if x.is_trained),
            "inputs_recompute_flops": sum(
                x.flops
                for x, is_unused in _with_unused(matmuls[: self._last_save], unused)
                if not is_unused
            ),
            # A thick matmul of weights alone is recomputed, too.
            "matmuls_recompute_flops": sum(
                x.flops
                for x in matmuls[: self._last_save]
                if not x.is_thick or next(recorded_thick).of_weights
            ),
            "inputs_bytes": inputs_bytes,
            "matmuls_bytes": inputs_bytes + sum(held_bytes),
            "whole_bytes": sum(saved_bytes) + chosen_bytes,
            **self._rerun_bytes(set(map(storage_key, held))),
            "mlp_width": sum(
                x.num_inputs
                for x in matmuls
                if x.is_down_projection and x.child != self._attending_child
            ),
            "adapted_mlp_width": max(
                (x.num_adapted for x in matmuls if x.child != self._attending_child), default=0
            ),
            "tiled_bytes": tiled_bytes,
            "tile_bytes": tile_bytes,
            "tiles_recompute_flops": self._flops_in_tiles(unused),
            "router_bytes": router_bytes,
        }

    def _rerun_bytes(self, held: set[int | None]) -> dict[str, int]:
        """Bytes that reruns make; `held` are the storages of matmul outputs that are saved."""
        made = {"inputs": self._saved.keys() - self._inputs}
        made["matmuls"] = made["inputs"] - held
        return {
            f"{saved}_rerun{part}_bytes": sum(map(self._saved_bytes, keys - without))
            for saved, keys in made.items()
            for part, without in (("", set[int | None]()), ("_early", self._late))
        }

    def _bytes_in_tiles(self, whole_bytes: int) -> tuple[int, int]:
        """Bytes that are not saved where modules run in tiles, and the most that one saves."""
        outside = sum(self._num_bytes(key, x) for key, x in self._saved_outside.items())
        inside = (
            sum(self._saved_bytes(key) for key in call.saved - self._saved_outside.keys())
            for call in self._tile_calls
        )
        return max(0, whole_bytes - outside), max(inside, default=0)

    def _flops_in_tiles(self, unused: tuple[bool, ...]) -> int:
        """FLOPs that run once more if a layer's inputs are saved and modules run in tiles.

        A module whose output is needed later runs once for its output, and then tile by tile.
        """
        matmuls = self._counter.matmuls
        needed = [x.flops * (not is_unused) for x, is_unused in _with_unused(matmuls, unused)]
        flops = 0
        for call in self._tile_calls:
            inside = matmuls[call.begin : call.last_save]
            recomputed = sum(
                x.flops for x, is_unused in _with_unused(inside, call.unused) if not is_unused
            )
            if call.is_output_needed:
                recomputed += sum(x.flops for x in matmuls[call.begin : call.end])
            flops += recomputed - sum(needed[call.begin : min(call.end, self._last_save)])
        return max(0, flops)

    @contextlib.contextmanager
    def _observing_tile_calls(self) -> Iterator[None]:
        """Record the calls of modules that can run in tiles."""
        modules = [
            part
            for part in self._layer.modules()
            if part is not self._layer and is_worth_tiles(part) and not is_searched(part)
        ]
        forwards = {
            part: functools.partial(self._observed_call, part, part.forward) for part in modules
        }
        with patched_attribute("forward", forwards):
            yield

    def _observed_call(
        self, part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        is_token_wise = (
            len(args) == 1 and not kwargs and args[0].shape[:-1] == self.hidden.shape[:-1]
        )
        if self._open_call is not None or not is_token_wise:
            return forward(*args, **kwargs)
        if args[0].requires_grad or any(p.requires_grad for p in part.parameters()):
            self._save_outside(args[0])
        call = self._open_call = _TokenWiseCall(len(self._counter.matmuls))
        self._open_call_finder = UnusedMatmulFinder(args[0], without_memory=True)
        self._counter.trackers.append(self._open_call_finder)
        try:
            output = forward(*args)
        finally:
            self._counter.trackers.remove(self._open_call_finder)
            self._open_call = None
        found = self._open_call_finder.result()
        call.unused = () if found is None else found.is_unused
        call.end = len(self._counter.matmuls)
        self._tile_calls.append(call)
        return output

    def _save_outside(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key not in self._not_activations:
            self._saved_outside.setdefault(key, tensor)
        for call in self._tile_calls:
            call.is_output_needed = True

    def _run_forward(self) -> Tensor:
        context = ChunkContext(
            model=self._parts,
            layer=0,
            end=self.kv.tokens,
            kv=self.kv,
            choose_backend=self.kv.choose_backend,
            stash=self,
            states=self._states,
            index_keys=IndexKeys(self.kv.tokens),
        )
        with (
            chunked_attention(context),
            saved_tensors_hooks(self._save, lambda packed: packed[0]),
            self._observing_tile_calls(),
            indexers_in_tiles(self._layer),
            # Its hooks come last: modules with hooks of others inside do not run in tiles.
            _routers_seen(self._parts, self._layer) as self._router_logits,
            self._counter.counting(),
        ):
            out = self._layer.forward(*self._args, **self._kwargs)
        self.returns_more = returns_more(out)
        return out[0] if isinstance(out, tuple) else out

    def close(self) -> None:
        """Release what autograd holds.

        An operation that saves its own result forms a cycle with it that the garbage collector does
        not see, and only one of the two runs has a backward that would break it.
        """
        for packed in self._packed:
            packed.clear()
        vars(self).clear()

    def _save(self, tensor: Tensor) -> list[Tensor]:
        self._recorder.on_saved(tensor)
        self._unused_finder.on_saved(tensor)
        self._last_save = len(self._counter.matmuls)
        key = storage_key(tensor)
        if key not in self._not_activations:
            if key not in self._saved and -1 < self._matmuls_to_attention < self._last_save:
                self._late.add(key)
            self._saved.setdefault(key, tensor)
        if self._open_call is None:
            self._save_outside(tensor)
        else:
            self._open_call_finder.on_saved(tensor)
            self._open_call.last_save = self._last_save
            if key not in self._not_activations:
                self._open_call.saved.add(key)
        self._packed.append([tensor])
        return self._packed[-1]

    def _saved_bytes(self, key: int | None) -> int:
        return self._num_bytes(key, self._saved[key])

    def _num_bytes(self, key: int | None, tensor: Tensor) -> int:
        num_bytes = tensor.untyped_storage().nbytes() if key is not None else tensor.nbytes
        return self._argument_bytes.get(key, num_bytes)

    @property
    def states(self) -> States:
        return self._states.after

    def num_graph_nodes(self) -> int:
        """Nodes of the graph that `forward` has left; to be called before `backward_flops`."""
        ends = [x.grad_fn for x in (self._out, *self.states.values()) if x.grad_fn is not None]
        found: set[Any] = set(ends)
        while ends:
            inputs = {node for node, _ in ends.pop().next_functions if node is not None} - found
            found |= inputs
            ends += inputs
        # Nodes of parameters exist once for all chunks.
        return sum("AccumulateGrad" not in node.name() for node in found)

    def backward_flops(self) -> int:
        """Run the layer's backward and return its FLOPs; to be called after `forward`."""
        given = tree_leaves((self._args, self._kwargs, list(self._layer.parameters())))
        leaves = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
        if not (self._out.requires_grad and leaves):
            return 0
        counter = _FlopCounter(self._layer, self.hidden)
        with counter.counting():
            torch.autograd.grad(self._out, leaves, torch.zeros_like(self._out), allow_unused=True)
        return sum(x.flops for x in counter.matmuls)


class _Matmul(NamedTuple):
    """A matmul (or a convolution) that ran."""

    flops: int
    num_inputs: int
    """Elements of the factor over whose last dim it sums."""
    is_thick: bool
    """See [Note: which matmuls are kept] in `selective.py`."""
    is_trained: bool
    """Whether one factor is a trained weight, or made of one."""
    is_down_projection: bool
    """Whether it is thick and its output as wide as the layer."""
    num_adapted: int
    """Elements of the output of an adapter's second factor that is not as wide as the layer."""
    child: str | None
    """Name of the layer's child module in which it ran."""


def _chosen_bytes(parts: ModelParts) -> int:
    """Bytes of what is chosen for a query of a sequence that is long enough for a choice."""
    num_keys: int = parts.text_config.index_topk
    return num_keys * torch.int32.itemsize


def _with_unused(
    matmuls: Iterable[_Matmul], unused: Iterable[bool]
) -> Iterator[tuple[_Matmul, bool]]:
    """Pair matmuls with whether they need not be recomputed; `unused` is of thick ones only."""
    answers = iter(unused)
    for matmul in matmuls:
        yield matmul, matmul.is_thick and next(answers, False)


class _FlopCounter(LightDispatchMode):
    """Lists the matmuls of one layer, and passes its operations to trackers.

    One mode does both, because torch takes as long to pass an operation from mode to mode as a
    tracker needs for it.
    """

    def __init__(self, layer: nn.Module, hidden: Tensor, rank: int | None = None) -> None:
        super().__init__()
        self._is_fake = isinstance(hidden, FakeTensor)
        self._rank = rank
        self._layer = layer
        self._width = hidden.shape[-1]
        self.matmuls: list[_Matmul] = []
        self.trackers: list[DependencyTracker] = []
        self.child: str | None = None
        """Name of the layer's child module that runs."""
        self._weights = {storage_key(x): x.requires_grad for x in layer.parameters()}
        """Whether weights, and tensors made of weights alone, are trained, by storage."""

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Context in which operations are counted."""

        def set_child(name: str | None) -> Any:
            return lambda *_: setattr(self, "child", name)

        handles: list[Any] = []
        for name, child in self._layer.named_children():
            handles.append(child.register_forward_pre_hook(set_child(name)))
            handles.append(child.register_forward_hook(set_child(None)))
        try:
            # In a fake layer, tensors that are made of nothing are fake as well.
            with _fake_mode() if self._is_fake else contextlib.nullcontext(), self:
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
        out = _run(func, args, kwargs)
        given = [self._weights.get(storage_key(x)) for x in tensors_in((*args, *kwargs.values()))]
        made_of_weights = any(given) if given and None not in given else None
        for tensor in tensors_in((out,)):
            if made_of_weights is None:
                self._weights.pop(storage_key(tensor), None)
            else:
                self._weights[storage_key(tensor)] = made_of_weights
        if op.left_factor is not None and len(args) > op.left_factor:
            left = args[op.left_factor]
            is_thick = op.is_thick_matmul(args, self._width)
            is_adapters = self._rank is not None and any(given) and left.shape[-1] == self._rank
            is_adapted = is_adapters and out.shape[-1] not in (self._width, self._rank)
            self.matmuls.append(
                _Matmul(
                    flops=_matmul_flops(op.name, left, args[op.left_factor + 1], out),
                    num_inputs=left.numel(),
                    is_thick=is_thick,
                    is_trained=any(given),
                    is_down_projection=is_thick and out.shape[-1] == self._width,
                    num_adapted=out.numel() if is_adapted else 0,
                    child=self.child,
                )
            )
        elif func._overloadpacket in flop_registry:
            flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
            self.matmuls.append(_Matmul(flops, 0, False, any(given), False, 0, self.child))
        return out


def _matmul_flops(name: str, left: Tensor, right: Tensor, out: Tensor) -> int:
    if "grouped" in name and left.dim() == right.dim() == 2:
        # Gradients of weights: the groups are runs of the summed dim.
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return 2 * out.numel() * left.shape[-1]


class _ObservedKV(LayerKV):
    """K/V of a layer that remember with which heads and window attention is called."""

    def __init__(self, tokens: int, stored_keys: dict[int | None, Tensor], chooses: bool) -> None:
        super().__init__(((0, tokens),))
        self._backend = _NoCompute(by_token=chooses)
        self._stored_keys = stored_keys
        self.is_borrowed = False
        """Whether keys and values are those of an earlier layer."""
        self.tokens = tokens
        self.num_kv_heads = self.qk_head_size = self.v_head_size = 0
        self.window: int | None = None
        self._gqa_ratio = 0

    @property
    def num_heads(self) -> int:
        return self._gqa_ratio * self.num_kv_heads

    def choose_backend(self, requirement: AttentionSpec) -> Backend:
        self._gqa_ratio = requirement.gqa_ratio
        return self._backend

    def put(self, chunk: int, k_BKCH: Tensor, v_BKCH: Tensor, *, keep: Keep | None = None) -> None:
        self.num_kv_heads, self.qk_head_size = k_BKCH.shape[1], k_BKCH.shape[-1]
        self.v_head_size = v_BKCH.shape[-1]
        self.is_borrowed = storage_key(k_BKCH) in self._stored_keys
        self._stored_keys[storage_key(k_BKCH)] = k_BKCH
        super().put(chunk, k_BKCH, v_BKCH, keep=keep)

    def blocks(
        self,
        segments: tuple[AttentionSegment, ...],
        *,
        window: int | None,
        local: int | None = None,
    ) -> tuple[Block, ...]:
        self.window = local if window is None else window
        return super().blocks(segments, window=window, local=local)


class _NoCompute(Backend):
    """Attention that returns zeros of the right shapes."""

    name = "nothing"

    def __init__(self, *, by_token: bool) -> None:
        """Lay the output out as `[B, C, N, H]` whatever the queries are, as kernels with a bias."""
        self._by_token = by_token

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
        if q_BNCH.is_contiguous() and not self._by_token:
            # The CPU's kernel and cuDNN's lay out their output like the queries.
            return AttentionOutput(q_BNCH.new_zeros(rows, heads, tokens, size), lse_BNC)
        return AttentionOutput(q_BNCH.new_zeros(rows, tokens, heads, size).transpose(1, 2), lse_BNC)

    def backward(
        self, dout_BNCH: Tensor, q_BNCH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, *_: Any, **__: Any
    ) -> Gradients:
        return Gradients(
            torch.zeros_like(q_BNCH), torch.zeros_like(k_BKTH), torch.zeros_like(v_BKTH)
        )
