"""FLOPs and saved bytes of a model, layer by layer, as traced from its real layers.

`sppo_hf.engine.trace_profile` runs a model's decoder layers without memory and records what
autograd saves and which matmuls run. Here the result is data: profiles are shipped as JSON or
stored from earlier traces, and found by the model's config and by how it is trained. For other
models the caller provides a tracer. `cost` and `memory` compute a step's costs and memory from it.

All numbers are per token of one row. FLOPs count a multiply-add as two and leave out elementwise
work. Attention between tokens, which grows with the keys, is `attention_flops_per_key`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib import metadata, resources
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import sppo_hf
from sppo_hf.errors import ConfigError
from sppo_hf.planning.activation_modes import Saved
from sppo_hf.planning.json_store import cache_path, file_lock, write_atomically
from sppo_hf.rules import show

logger = logging.getLogger(__name__)

FLOAT32_BYTES = 4

THIN = 8
"""A matmul is thin if it sums over at most the layer's width divided by this; else it is thick.

Thin matmuls are recomputed; their outputs are not saved."""

_FORMAT = 10

_TRACED_WITHIN_SECONDS = 60.0
"""Seconds to wait for another process that traces the same model before tracing it here too."""

_Numbers = TypeVar("_Numbers", "LayerProfile", "ModelProfile")

# Settings of a config.json on which no layer's FLOPs or bytes depend.
_IRRELEVANT = frozenset(
    (
        "architectures auto_map bos_token_id dtype eos_token_id initializer_range "
        "pad_token_id pretraining_tp quantization_config torch_dtype transformers_version use_cache"
    ).split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Facts about training on which saved bytes and FLOPs depend."""

    dtype_bytes: int
    """Bytes of one element in matmuls: 2 for bf16."""

    parameter_bytes: int
    """Bytes of one weight. More than `dtype_bytes` under autocast: the residual stream and norms
    then keep the weights' dtype, and each matmul casts its input."""

    lora: LoraShape | None = None
    """Adapters, with which all other weights are frozen; None if all weights are trained."""

    layer_kernels: bool = False
    """Whether Liger's kernels run in place of norms and gated products that compute the same; they
    save less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One decoder layer under one `Training`. Sizes are elements, per token."""

    hidden_size: int
    """Width of the residual stream."""

    num_heads: int
    """Query heads; 0 in a layer without attention."""

    num_kv_heads: int
    """Key and value heads in the call of attention (all heads in latent attention, which expands
    them)."""

    qk_head_size: int
    """Elements of one query or key head."""

    v_head_size: int
    """Elements of one value head."""

    window: int | None
    """Maximum number of keys that a query attends to, its own included; None for no limit."""

    mlp_width: int
    """Intermediate elements of one token, summed over its active and shared experts."""

    forward_flops: int
    """FLOPs of matmuls in forward, adapters included."""

    input_gradient_flops: int
    """FLOPs of matmuls in backward that compute the gradient of a matmul's input."""

    weight_gradient_flops: int
    """FLOPs of matmuls in backward that compute the gradient of a trained weight."""

    inputs_recompute_flops: int
    """FLOPs of matmuls recomputed in backward if only a layer's inputs are saved: thin ones, and
    those that a saved value depends on (`engine/selective.py`, [Note: unused matmuls])."""

    matmuls_recompute_flops: int
    """FLOPs of matmuls recomputed in backward if outputs of thick ones are saved: the thin ones."""

    inputs_bytes: int
    """Bytes saved with "inputs": layer input, attention output, log-sum-exp."""

    matmuls_bytes: int
    """Bytes saved with "matmuls": the layer's inputs and the thick matmuls' outputs that backward
    needs."""

    whole_bytes: int
    """Bytes of all that autograd saves, without K/V and tensors shared by all layers."""

    inputs_rerun_bytes: int
    """Bytes that recomputation makes if a layer's inputs are saved: all of `whole_bytes` that is
    not among these."""

    inputs_rerun_early_bytes: int
    """Part of `inputs_rerun_bytes` that is still there when backward reaches attention: what was
    saved before it."""

    matmuls_rerun_bytes: int
    """Bytes that recomputation makes if outputs of thick matmuls are saved too."""

    matmuls_rerun_early_bytes: int
    """Part of `matmuls_rerun_bytes` that is still there when backward reaches attention."""

    largest_bytes: int
    """Bytes of the largest saved tensor, over all `Saved` values."""

    total_weights: int
    """Parameters of the layer with all experts, without adapters."""

    adapter_weights: int = 0
    adapted_mlp_width: int = 0
    """Width of the widest output of an adapter inside the MLP, to which the frozen weight's output
    is added."""

    tiled_bytes: int = 0
    """Part of `whole_bytes` that a recomputed layer does not hold at once if its token-wise modules
    run in tiles."""

    tile_bytes: int = 0
    """Maximum bytes that one token-wise module saves for a token of the tile that is recomputed."""

    tiles_recompute_flops: int = 0
    """FLOPs that running in tiles adds to `inputs_recompute_flops`: a module whose output is needed
    later in the layer runs once for that output, and once more tile by tile."""

    router_bytes: int = 0
    """Bytes of the probabilities of experts that a loss of routers keeps, if there is one."""

    borrows_keys: bool = False
    """Whether the layer reads K/V from an earlier layer's store (Gemma 3n, Gemma 4)."""

    state_bytes: int = 0
    """Bytes of the state that a recurrent or convolutional mixer passes to the next chunk, for one
    row."""

    graph_nodes: int = 0
    """Nodes of autograd's graph of the layer over one chunk, without those of parameters and those
    that depend on the number of tokens. They take host memory even if tensors are offloaded."""

    graph_nodes_per_1024: int = 0
    """Nodes that each 1,024 tokens of a chunk add, as a scan in torch code loops over blocks."""

    scans: bool = False
    """Whether a mixer runs a recurrence over the tokens; if not, all state is a convolution's."""

    index_heads: int = 0
    """Heads of an indexer, which scores all visible keys to choose those that a query reads; 0 in a
    layer without one."""

    index_head_size: int = 0
    """Elements of one head of an indexer, and of its key."""

    index_bytes: int = 0
    """Bytes per token of an indexer's keys, which are held until the last chunk has chosen."""

    chosen_bytes: int = 0
    """Bytes of what an indexer, the layer's or an earlier one's, chooses for one query; 0 where
    queries read all keys that they see."""

    returns_more: bool = False
    """Whether the layer returns tensors besides hidden states, which the next layer takes."""

    takes_more: bool = False
    """Whether the layer takes other hidden states beside those of the layer before: Zamba 2's take
    the embeddings, too."""

    @property
    def chosen(self) -> bool:
        """Whether an indexer chooses the keys that queries read."""
        return self.chosen_bytes > 0

    @property
    def passed_on_bytes(self) -> int:
        """Bytes per token of a choice that later layers get, held until backward of these.

        It is counted beside what the layer itself saves of it with its inputs: a copy, but on a GPU
        that does not offload it.
        """
        return self.chosen_bytes if self.index_heads and self.returns_more else 0

    @property
    def index_flops_per_key(self) -> int:
        """Forward FLOPs of an indexer's score for one (query token, visible key) pair."""
        return 2 * self.index_heads * (self.index_head_size + 1)

    def rerun_bytes(self, saved: Saved) -> tuple[int, int]:
        """Returns the bytes that recomputation makes, and those of them saved before attention."""
        if saved == "matmuls":
            return self.matmuls_rerun_bytes, self.matmuls_rerun_early_bytes
        made = self.inputs_rerun_bytes, self.inputs_rerun_early_bytes
        if saved == "inputs":
            return made
        # Attention's results too.
        more = self.whole_bytes - self.inputs_rerun_bytes
        return made[0] + more, made[1] + more

    @property
    def attention_flops_per_key(self) -> int:
        """Forward FLOPs for one (query token, visible key) pair: `q k^T` and `p v`, all heads."""
        return 2 * self.num_heads * (self.qk_head_size + self.v_head_size)

    @property
    def kv_elements(self) -> int:
        """Key and value elements of one token; 0 if another layer holds them."""
        if self.borrows_keys:
            return 0
        return self.num_kv_heads * (self.qk_head_size + self.v_head_size)

    def heads_of(self, ranks: int, head_blocks: int | None = None) -> int:
        """Returns the query heads of the rank with the most, if `ranks` ranks divide them.

        One by one, or in so many blocks (`count_head_blocks`).
        """
        if head_blocks and self.num_heads:
            return -(-head_blocks // ranks) * (self.num_heads // head_blocks)
        return -(-self.num_heads // ranks)

    def kv_heads_of(self, ranks: int, head_blocks: int | None = None) -> int:
        """Returns the maximum number of K/V heads that one of `ranks` ranks needs.

        K/V heads that several ranks need are on each of them.
        """
        if not self.num_heads or not self.num_kv_heads:
            return 0
        if head_blocks:
            return -(-head_blocks // ranks) * (self.num_kv_heads // head_blocks)
        group, heads = self.num_heads // self.num_kv_heads, self.num_heads
        ends = [rank * heads // ranks for rank in range(ranks + 1)]
        return max(
            -(-end // group) - start // group for start, end in pairwise(ends) if end > start
        )

    @property
    def q_elements(self) -> int:
        """Query elements of one token."""
        return self.num_heads * self.qk_head_size

    @property
    def attention_output_elements(self) -> int:
        """Attention output elements of one token, before the output projection."""
        return self.num_heads * self.v_head_size


def count_head_blocks(layers: Iterable[LayerProfile], pp_size: int, name: str) -> int | None:
    """Returns how ranks that share units (`schedule.generate.msp`) divide attention heads.

    Units are shared by sets of 2 to `pp_size` ranks. Where all these sizes divide the query heads,
    heads are divided evenly. Otherwise whole K/V heads are: with 8 of them three ranks have 2, 3
    and 3, and the largest share sets the pace. Runtime and planner both refuse by this function.

    Returns:
        Number of blocks of heads, for all layers, as `local_heads` takes it; None to divide heads
        evenly.

    Raises:
        ConfigError: heads cannot be divided among some number of ranks.
    """
    heads = {(layer.num_heads, layer.num_kv_heads) for layer in layers}
    queries = math.gcd(*(queries for queries, _ in heads))
    keys = math.gcd(*(keys for _, keys in heads))
    if all(queries % size == 0 for size in range(2, pp_size + 1)):
        return None
    if keys >= pp_size:
        return keys
    least = next(size for size in range(2, pp_size + 1) if queries % size)
    sizes = " or ".join(map(str, range(2, max(keys + 1, least))))
    allowed, other = (f"pp_size={sizes}", "one of these, or ") if sizes else ("no pp_size", "")
    raise ConfigError(
        f"pp_msp='on' with pp_size={pp_size} lets 2 to {pp_size} ranks share units of {name}, and "
        f"{least} ranks cannot divide its {queries} attention heads, nor {pp_size} its {keys} "
        f"key/value heads. Allowed: {allowed} with this model. Remedy: {other}pp_msp='off'."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """A causal language model under one `Training`."""

    training: Training
    layers: tuple[LayerProfile, ...]
    """One profile per decoder layer; equal layers share one object. Under LoRA the first layer may
    save less than others, as no gradient reaches its input."""

    vocab_size: int
    """Rows of the embedding and of the head."""

    tied: bool
    """Whether embedding and head share one matrix."""

    max_positions_tokens: int | None
    """Longest sequence that the position encoding supports; None if it has no limit."""

    outer_weights: int
    """Parameters outside the decoder layers: embeddings, final norm, head."""

    outer_adapter_weights: int = 0
    """Parameters of adapters outside the decoder layers."""

    encoder_weights: int = 0
    """Part of `outer_weights` in encoders of images and sound, which get no gradients from text."""

    message_elements: tuple[int, ...] = ()
    """For each layer, elements per token that a pipeline stage receives if it begins with that
    layer; empty if that is one hidden state."""


Tracer = Callable[[Any, Training], ModelProfile]
"""Function that traces the profile of a model, given its Transformers config (or an object with the
fields of a `config.json`) and how it is trained."""


def find_profile(config: object, training: Training, trace: Tracer) -> ModelProfile:
    """Returns a model's profile: shipped, stored by an earlier trace, or traced now and stored.

    Raises:
        SPPOError: `trace` raises it.
    """
    digest = config_digest(config)
    found = _derived(shipped_profiles().get(digest, ()), training)
    if found is not None:
        return found
    path = _path(config, digest, training)
    found = _derived(_read(path), training)
    if found is not None:
        return found
    # All ranks of a machine come here at once: one of them traces, the others read its result.
    with file_lock(path, most_seconds=_TRACED_WITHIN_SECONDS):
        found = _derived(_read(path), training)
        if found is not None:
            return found
        profile = trace(config, training)
        try:
            write_atomically(path, profiles_to_json(digest, (profile,)))
        except OSError as error:
            logger.info("The model's profile cannot be kept in %s: %s", path, error)
        return profile


def config_digest(config: object) -> str:
    """Returns a digest of all settings of a config on which FLOPs or bytes may depend."""
    text = json.dumps(_settings(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def shipped_profiles() -> Mapping[str, tuple[ModelProfile, ...]]:
    """Returns the profiles shipped with the package, by `config_digest`."""
    folder = Path(str(resources.files("sppo_hf.planning").joinpath("model_profiles")))
    texts = (file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.json")))
    return dict(profiles_from_json(text) for text in texts)


def profiles_to_json(digest: str, profiles: tuple[ModelProfile, ...]) -> str:
    """Returns the profiles of one model as JSON text; the inverse of `profiles_from_json`."""
    entries = [_to_dict(profile) for profile in profiles]
    return json.dumps({"format": _FORMAT, "config": digest, "profiles": entries}, indent=1) + "\n"


def profiles_from_json(text: str) -> tuple[str, tuple[ModelProfile, ...]]:
    """Returns the config's digest and the profiles in the text of `profiles_to_json`.

    Raises:
        ValueError: the text is something else; KeyError and TypeError are raised too.
    """
    read: dict[str, Any] = json.loads(text)
    if read["format"] != _FORMAT:
        raise ValueError(f"format {read['format']}, not {_FORMAT}")
    return str(read["config"]), tuple(_from_dict(entry) for entry in read["profiles"])


def _to_dict(profile: ModelProfile) -> dict[str, Any]:
    kinds = list(dict.fromkeys(profile.layers))
    return {
        **asdict(replace(profile, layers=())),
        "kinds": [asdict(kind) for kind in kinds],
        "layers": [kinds.index(layer) for layer in profile.layers],
    }


def _from_dict(entry: dict[str, Any]) -> ModelProfile:
    kinds: list[LayerProfile] = [LayerProfile(**kind) for kind in entry.pop("kinds")]
    indices: list[int] = entry.pop("layers")
    layers = tuple(kinds[index] for index in indices)
    message_elements = tuple(entry.pop("message_elements"))
    training = entry.pop("training")
    lora = training.pop("lora")
    if lora is not None:
        if lora["targets"] != ALL_LINEAR:
            lora["targets"] = tuple(lora["targets"])
        lora = LoraShape(**lora)
    return ModelProfile(
        training=Training(**training, lora=lora),
        layers=layers,
        message_elements=message_elements,
        **entry,
    )


def _derived(known: tuple[ModelProfile, ...], training: Training) -> ModelProfile | None:
    """Returns the known profile with this training or, under LoRA, one interpolated by rank.

    Bytes and FLOPs are linear in the rank of the adapters, so two profiles with other ranks give
    that of any rank. Returns None if neither exists.
    """
    by_rank: dict[int, ModelProfile] = {}
    for profile in known:
        if profile.training == training:
            return profile
        lora, wanted = profile.training.lora, training.lora
        if lora is None or wanted is None:
            continue
        same = replace(profile.training, lora=replace(lora, rank=wanted.rank)) == training
        # At ranks where the adapters' second factors are thick, FLOPs and bytes differ otherwise.
        if same and THIN * max(lora.rank, wanted.rank) <= profile.layers[0].hidden_size:
            by_rank[lora.rank] = profile
    if len(by_rank) < 2 or training.lora is None:
        return None
    (first, low), (second, high), *_ = sorted(by_rank.items())
    share = (training.lora.rank - first) / (second - first)
    pairs = tuple(zip(low.layers, high.layers, strict=True))
    # Equal layers remain one object.
    on_line = {pair: _between(*pair, share) for pair in pairs}
    layers = tuple(on_line[pair] for pair in pairs)
    return replace(_between(low, high, share), training=training, layers=layers)


def _between(low: _Numbers, high: _Numbers, share: float) -> _Numbers:
    """Returns `low` with all numbers interpolated to `high` (share 0 is `low`, 1 is `high`)."""
    numbers = {
        field.name: round(a + share * (b - a))
        for field in fields(low)
        if isinstance(a := getattr(low, field.name), int)
        and isinstance(b := getattr(high, field.name), int)
        and a != b
    }
    return replace(low, **cast("Any", numbers))


def _settings(config: object) -> dict[str, Any]:
    to_dict = getattr(config, "to_dict", None)
    found: Any = to_dict() if callable(to_dict) else config
    return cast("dict[str, Any]", _plain(found))


def _plain(value: Any) -> Any:
    """Returns `value` in JSON types without irrelevant settings, also those of sub-configs."""
    if isinstance(value, Mapping):
        named = cast("Mapping[Any, Any]", value)
    elif hasattr(value, "__dict__"):
        named = cast("Mapping[Any, Any]", vars(value))
    elif isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in cast("list[Any]", value)]
    else:
        return value
    kept = {
        str(name): _plain(entry)
        for name, entry in named.items()
        if name not in _IRRELEVANT and not str(name).startswith("_")
    }
    return {name: entry for name, entry in kept.items() if entry is not None}


def _path(config: object, digest: str, training: Training) -> Path:
    """Returns the path of the profile traced with the installed versions of its tracer."""
    versions = [sppo_hf.__version__, *map(metadata.version, ("torch", "transformers"))]
    key = [_FORMAT, digest, versions, asdict(training)]
    name = str(getattr(config, "model_type", None) or "model")
    return cache_path("models", name, key)


def _read(path: Path) -> tuple[ModelProfile, ...]:
    try:
        return profiles_from_json(path.read_text(encoding="utf-8"))[1]
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        logger.warning("The model's profile in %s cannot be read and is made anew: %r", path, error)
        return ()


ALL_LINEAR = "all-linear"

_MOST_RANK = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    """Adapters of one rank on the linear layers of all decoder layers."""

    rank: int
    """Columns of A, rows of B."""

    targets: str | tuple[str, ...] = ALL_LINEAR
    """Names of the adapted modules (`"q_proj"`), or `"all-linear"` for every linear module of the
    decoder layers. That excludes expert weights, which Transformers keeps as one parameter per
    layer, and routers that are not modules."""

    dtype_bytes: int = 4
    """Bytes of one adapter element. PEFT makes adapters of a 16-bit model float32
    (`autocast_adapter_dtype`)."""

    autocast: bool = False
    """Whether autocast runs the adapters' matmuls in the model's dtype. PEFT casts activations up
    to the adapters' dtype, and autocast down again, and the narrow copy is saved; with
    `Training.layer_kernels` only the factors of adapters without dropout are cast."""

    dropout: float = 0.0
    """LoRA's dropout; above zero its mask and its output are saved too."""

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= _MOST_RANK:
            raise ConfigError(
                f"LoRA's rank is {show(self.rank)}; it is the inner size of a matrix product, so "
                f"give 1 to {_MOST_RANK:,} (16 is common), or no LoRA at all"
            )
        if isinstance(self.targets, str) and self.targets != ALL_LINEAR:
            raise ConfigError(
                f"LoRA's targets are {self.targets!r}; give {ALL_LINEAR!r} or a tuple of module "
                "names such as ('q_proj', 'v_proj')"
            )

    def adapts(self, name: str) -> bool:
        """Whether a linear module with this name is adapted; False for an empty name.

        A fused module is named by its own name ("qkv_proj").
        """
        return bool(name) and (self.targets == ALL_LINEAR or name in self.targets)
