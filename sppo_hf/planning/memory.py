"""Where the bytes of a step come from: what layers, chunks and the model's ends take, as arrays.

`ByteTables` has the quantities, each in one place; who holds them from when to when is said by
`lowering`, and by `pipeline_cost` for the units of a pipeline. Every figure is a prediction from
the model's shape and the batch; those that are assumptions rather than consequences say so
(`optimizer`, `workspace`, `reserve`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import numpy as np

from sppo_hf.errors import BudgetError
from sppo_hf.planning.activation_modes import SAVED
from sppo_hf.planning.causes import Cause
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.memory_snapshots import Bytes, Points
from sppo_hf.planning.model_profile import FLOAT32_BYTES, LayerProfile
from sppo_hf.planning.model_shape import ModelShape
from sppo_hf.planning.tiers import Tier
from sppo_hf.planning.tile_sizes import MAX_COPIED_BYTES, parallel_heads
from sppo_hf.rules import format_bytes

# The assumption behind `optimizer`: AdamW with both moments in float32.
OPTIMIZER_BYTES_PER_PARAMETER = 8
# What the driver, kernels' code, cuBLAS and cuDNN's plans take beside all tensors: an assumption.
CONTEXT_BYTES = {"cpu": 0, "cuda": 1536 * 2**20}
# The caching allocator's and the heap's holes, as a share of what comes and goes in a step.
FRAGMENTATION = {"cpu": 0.03, "cuda": 0.02}
HOST_SLAB_BYTES = 256 * 2**20
# Of a node of autograd's graph, with its edges, hooks and a frame's notes: 325,110 bytes that the C
# library gave out for each forward of a Gated DeltaNet layer of Qwen3.5, whose graph has 445.
GRAPH_NODE_BYTES = 730


def standing_device_bytes(shape: ModelShape, device_kind: str) -> int:
    """Returns what training holds on the device at the end of backward, whatever the batch."""
    return shape.standing_bytes + CONTEXT_BYTES[device_kind]


def byte_tables(shape: ModelShape, decisions: Decisions, device_kind: str) -> ByteTables:
    """Returns the tables of a batch; those of one batch are made once, whatever its modes are."""
    return _byte_tables(_Batch(shape, decisions, device_kind))


class _Batch:
    """What tables follow from. Shapes are compared as objects: by their fields would take longer.

    It holds the shape, whose address therefore stays its own.
    """

    def __init__(self, shape: ModelShape, decisions: Decisions, device_kind: str) -> None:
        self.shape, self.decisions, self.device_kind = shape, decisions, device_kind
        what = decisions
        self._key = (
            *(id(shape), device_kind, what.bounds, what.batch_rows, what.training),
            *(what.tile_tokens, what.accumulates, what.return_logits, what.kv_tier),
            *(what.kv_block_tokens, what.by_layer, what.layer_tile_tokens),
        )

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Batch) and self._key == other._key


@lru_cache(maxsize=64)
def _byte_tables(batch: _Batch) -> ByteTables:
    return ByteTables(batch.shape, batch.decisions, batch.device_kind)


class ByteTables:
    """Bytes of one batch shape. Arrays are [kinds, chunks] where nothing else is said.

    A kind is a set of layers that save and take the same; `kind_of` says which a layer is of.
    """

    def __init__(self, shape: ModelShape, decisions: Decisions, device_kind: str) -> None:
        """Work out what all other quantities rest on; see `byte_tables`."""
        self._decisions, batch_rows = decisions, decisions.batch_rows
        self._sp, alike = shape.sp, shape.layer_kinds
        bounds, kv_block_tokens = decisions.bounds, decisions.kv_block_tokens
        if shape.sp > 1:
            # A rank's shares of chunks, laid end to end.
            own = (shape.tokens_per_rank(end - start) for start, end in bounds)
            bounds = tuple(pairwise(accumulate(own, initial=0)))
            kv_block_tokens = shape.tokens_per_rank(kv_block_tokens)
        shape = shape.per_rank
        self.shape = shape
        """What runs here; of ranks that share a sequence, one of them."""
        self.rows = batch_rows
        self.training = decisions.training
        self.kv_tier: Tier = decisions.kv_tier
        self.device_kind = device_kind
        self.streams = decisions.kv_tier != "device"
        """Whether K/V travel."""
        self.accumulates = decisions.accumulates
        """Whether gradients of earlier batches are there."""
        self._parameter_bytes = shape.parameter_bytes or shape.dtype_bytes
        self.starts, self.ends = np.array(bounds, dtype=np.int64).T
        """[chunks] First token of each chunk, and the one behind its last."""
        self.lengths = self.ends - self.starts
        """[chunks] Tokens."""
        in_a_tile = -(-decisions.layer_tile_tokens // batch_rows)
        self._at_once = np.minimum(self.lengths, in_a_tile) if in_a_tile else self.lengths
        """[chunks] Tokens of each row on which token-wise modules of layers run at once."""
        by_layer = decisions.by_layer
        self.points = Points(len(bounds), shape.num_layers, self.training, by_layer)
        kinds, self.kind_of = np.unique(np.array(alike), return_inverse=True)
        self.kinds: list[int] = kinds.tolist()
        """[kinds] A layer of each kind; [layers] the kind of each layer."""
        tokens = batch_rows * self.lengths
        per_token = [[shape.activation_bytes_per_token(i, s) for s in SAVED] for i in self.kinds]
        states = batch_rows * _by_kind(shape.state_bytes, self.kinds)
        self.saved = np.array(per_token, dtype=np.int64)[:, :, None] * tokens + states[:, :, None]
        """[kinds, saved, chunks] What is saved of a layer, by how much of it is (`SAVED`)."""
        self.kv_per_token = batch_rows * _by_kind(shape.kv_bytes_per_token, self.kinds)
        """[kinds, 1] Keys and values of one token of all rows."""
        self.dkv_per_token = batch_rows * _by_kind(shape.dkv_bytes_per_token, self.kinds)
        """[kinds, 1] Their gradient sums."""
        self.kv = self.kv_per_token * self.lengths
        """A chunk's keys and values."""
        self.dkv = self.dkv_per_token * np.append(self.lengths[:-1], 0)
        """A chunk's gradient sums; backward of the last chunk, which comes first, has none: it
        writes those of all chunks before it."""
        longest = np.maximum.accumulate(self.lengths)
        most = np.maximum(self.starts, self.lengths)
        self.block_tokens = np.minimum(np.maximum(kv_block_tokens, longest), most)
        """[chunks] Tokens of a block of streamed K/V: of one chunk at least, at most of all
        before."""
        self._longest = longest

    def of_layers(self, table: Bytes) -> Bytes:
        """Spreads a table over layers: [kinds, chunks] to [chunks, layers]."""
        return table[self.kind_of].T

    # -- what is streamed ----------------------------------------------------------------------

    @cached_property
    def prefix_tokens(self) -> Bytes:
        """Tokens before a chunk that its queries see, in whole chunks."""
        rows: list[Bytes] = []
        for kind in self.kinds:
            window = self.shape.layers[kind].window
            hidden = np.zeros_like(self.starts)
            if window is not None:
                # The chunk's first query sees `window - 1` keys before its own.
                first = np.maximum(self.starts - window + 1, 0)
                hidden = self.starts[np.searchsorted(self.starts, first, side="right") - 1]
            rows.append(self.starts - hidden)
        return np.array(rows)

    @cached_property
    def both_ways(self) -> tuple[bool, bool]:
        """Whether copies run to the host and back at once, in forward and in backward.

        Weights that rest on the host come while activations leave, and their gradients leave while
        activations come back.
        """
        resting = self.shape.host_resident
        comes = resting is not None and not resting.stays
        leaves = resting is not None and resting.gradient_bytes > 0
        return self.streams or comes, self.streams or leaves

    @cached_property
    def kv_in_forward(self) -> Bytes:
        """To the device: the prefix's K/V, which queries attend to beside their own."""
        return self.streams * self.kv_per_token * self.prefix_tokens

    @cached_property
    def kv_out_forward(self) -> Bytes:
        """Away from it: the chunk's own K/V."""
        return self.streams * self.kv

    @cached_property
    def kv_in_backward(self) -> Bytes:
        """To it: K/V of prefix and chunk; their sums too, once a later chunk has written them."""
        tokens = self.prefix_tokens + self.lengths
        sums = self.dkv_per_token * tokens
        sums[:, -1] = 0
        return self.streams * (self.kv_per_token * tokens + sums)

    @cached_property
    def kv_out_backward(self) -> Bytes:
        """Away from it: the prefix's sums; the chunk's own are complete and used at once."""
        return self.streams * self.dkv_per_token * self.prefix_tokens

    @cached_property
    def kv_in_transit(self) -> tuple[Bytes, Bytes, Bytes]:
        """[chunks] K/V in forward, K/V and dK/dV in backward while streamed, in the busiest layer.

        Beside the chunk's own: the block in use and the next one, and where a block is several
        chunks, the run that they are joined to. In backward the sums of as many and of the block
        before, which is leaving, and the gradient of the block in use, not yet added.
        """
        block = self.block_tokens
        joined = np.where(block > self._longest, block, 0)
        kv_per_token, dkv_per_token = self.kv_per_token.max(), self.dkv_per_token.max()
        kv = kv_per_token * (2 * block + joined + self.lengths)
        dkv = dkv_per_token * (3 * block + self.lengths) + kv_per_token * block
        return kv, kv, dkv

    # -- what passes while a unit runs -----------------------------------------------------------

    @cached_property
    def workspace_forward(self) -> Bytes:
        """Temporaries of a layer's forward."""
        return self._workspace(backward=False)

    @cached_property
    def workspace_backward(self) -> Bytes:
        """Temporaries of a layer's backward; what a recomputed layer rebuilds comes on top."""
        return self._workspace(backward=True)

    @cached_property
    def rebuilt(self) -> Bytes:
        """What a recomputed layer rebuilds: its frame, and under autocast casts of its weights.

        Where token-wise modules run in tiles, of what they save one tile of one of them.
        """
        whole = self.saved[:, SAVED.index("whole")]
        layers = self.shape.layers
        tiled = self.rows * _by_kind(lambda kind: layers[kind].tiled_bytes, self.kinds)
        tile = self.rows * _by_kind(lambda kind: layers[kind].tile_bytes, self.kinds)
        less = tiled * self.lengths - tile * self._at_once
        less = np.where(self._at_once < self.lengths, np.maximum(less, 0), 0)
        return whole - less + _by_kind(self.shape.cast_bytes, self.kinds)

    def _workspace(self, *, backward: bool) -> Bytes:
        """Temporaries of a layer over one chunk.

        The MLP holds about two intermediates in forward and four with their gradients in backward
        (of a tile, where it runs in tiles), beside two or four full-width tensors; attention holds
        q, its output and (in backward) their gradients, and one layer's whole prefix of K/V (and
        dK/dV of one call) once more. CUDA's flash kernels (FlashAttention 2's and cuDNN's) write
        dK/dV for every query head before they sum those that share a key head. A CPU's may be given
        K/V of a call with repeated heads, and gives back as many gradients.
        """
        copies = 4 if backward else 2
        nothing = np.zeros_like(self.ends)
        prefix = nothing if self.streams else np.where(self.starts > 0, self.ends, 0)
        keys_of_a_call = self.block_tokens if self.streams else self.ends
        rows: list[Bytes] = []
        repeated: list[Bytes] = []
        for kind in self.kinds:
            layer = self.shape.layers[kind]
            full_width = copies * layer.hidden_size
            mlp = copies * layer.mlp_width
            mlp += 0 if backward else self._wide_adapters_elements(layer)
            per_query = layer.q_elements + layer.attention_output_elements
            joined = layer.kv_elements * prefix * (2 if backward else 1)
            if backward and self.device_kind == "cuda" and layer.num_heads > layer.num_kv_heads:
                joined = joined + per_query * keys_of_a_call
            attention = self.lengths * (copies // 2) * per_query
            busiest = np.maximum(self._at_once * mlp, attention) + self.lengths * full_width
            rows.append(busiest + joined)
            repeated.append(2 * self._repeated_bytes(layer, keys_of_a_call) * backward)
        return np.array(rows) * (self.shape.dtype_bytes * self.rows) + np.array(repeated)

    def _repeated_bytes(self, layer: LayerProfile, keys: Bytes) -> Bytes:
        """[chunks] Copies of keys and values with which a CPU's attention keeps threads busy."""
        own = layer.num_kv_heads // self._sp
        if self.device_kind != "cpu" or not own:
            return np.zeros_like(keys)
        heads = layer.num_heads // self._sp
        repeated = parallel_heads(self.rows, heads, own, self.shape.cpu_threads)
        # A token of a rank's share stands for its heads of as many tokens as there are ranks.
        elements = self._sp * repeated * (layer.qk_head_size + layer.v_head_size)
        size = max(FLOAT32_BYTES, self.shape.dtype_bytes) * self.rows * elements * keys
        return np.where((repeated > own) & (size <= MAX_COPIED_BYTES), size, 0)

    def _wide_adapters_elements(self, layer: LayerProfile) -> int:
        """Elements, of the model's dtype, of what wider adapters of the MLP compute beside it.

        The second factor's product, that times the scale, and its sum with the frozen product.
        """
        lora = self.shape.lora
        if lora is None or lora.autocast or lora.dtype_bytes <= self.shape.dtype_bytes:
            return 0
        return 3 * layer.adapted_mlp_width * lora.dtype_bytes // self.shape.dtype_bytes

    @cached_property
    def kept_logits(self) -> int:
        """Logits of the whole sequence, where the caller gets them."""
        if not self._decisions.return_logits:
            return 0
        tokens = self.rows * self._decisions.total_tokens
        return tokens * self.shape.vocab_size * self.shape.dtype_bytes

    @cached_property
    def logits(self) -> Bytes:
        """[chunks] Bytes while a chunk's loss is computed, beside logits that are kept.

        A tile in the model's dtype and its logarithms of probabilities in float32, in whose place
        its gradient comes, once more in the model's dtype if that is narrower. From the second tile
        on also the head's gradient of one, beside the sum, where it is not added on the spot (see
        `engine.loss`). Not counted: what a head saves that caps its logits.
        """
        shape = self.shape
        tokens = self.lengths * self.rows
        tile = np.minimum(self._decisions.tile_tokens, tokens)
        float32_bytes = max(FLOAT32_BYTES, shape.dtype_bytes)
        narrow_bytes = shape.dtype_bytes if shape.dtype_bytes < float32_bytes else 0
        per_token = shape.vocab_size * (shape.dtype_bytes + float32_bytes + narrow_bytes)
        sums = (tokens > tile) & self.training
        sums[1:] = self.training
        if self.device_kind == "cpu" and not narrow_bytes:
            sums[:] = False
        return tile * per_token + sums * self.vocabulary_gradient_bytes(self._parameter_bytes)

    @cached_property
    def embedding_backward(self) -> Bytes:
        """[chunks] What backward of the embedding takes behind a chunk's first layer.

        By layer, and on a CPU, the embedding runs once per sequence, and backward of the first
        chunk ends it.
        """
        ends = np.ones_like(self.lengths)
        if self.device_kind == "cpu" or self.points.by_layer:
            ends[1:] = 0
        return ends * self.vocabulary_gradient_bytes(self._parameter_bytes)

    @cached_property
    def graph(self) -> Bytes:
        """Autograd's graph of a layer over a chunk, however many rows: objects of host memory."""
        if self.device_kind != "cpu" or not self.training:
            return np.zeros_like(self.kv)
        layers = self.shape.layers
        nodes = _by_kind(lambda kind: layers[kind].graph_nodes, self.kinds)
        added = _by_kind(lambda kind: layers[kind].graph_nodes_per_1024, self.kinds)
        return GRAPH_NODE_BYTES * (nodes + added * self.lengths // 1024)

    def vocabulary_gradient_bytes(self, size: int) -> int:
        """A gradient of embedding or head with elements of so many bytes, where they train."""
        shape = self.shape
        return shape.vocab_size * shape.hidden_size * size if shape.embedding_trained else 0

    # -- what stays ------------------------------------------------------------------------------

    @cached_property
    def standing(self) -> dict[Cause, int]:
        """What the device holds from step to step, but gradients."""
        shape = self.shape
        away = 0 if shape.host_resident is None else shape.host_resident.optimizer_bytes
        states = (shape.states_bytes - away) * self.training
        lora = min(shape.lora_bytes, shape.weight_bytes)
        return {
            Cause.WEIGHTS: shape.weight_bytes - lora,
            Cause.LORA: lora,
            Cause.OPTIMIZER: states,
        }

    @cached_property
    def host_resident(self) -> dict[Cause, int]:
        """The same of the host, where weights or the optimizer are there."""
        resting = self.shape.host_resident
        if resting is None:
            return {}
        adds_up = self.accumulates and self.device_kind == "cuda"
        gradients = resting.gradient_bytes + resting.arriving_bytes * adds_up
        return {
            Cause.WEIGHTS: resting.weight_bytes,
            Cause.OPTIMIZER: resting.optimizer_bytes * self.training,
            Cause.GRADIENTS: gradients * self.training,
        }

    @cached_property
    def gradients(self) -> tuple[int, int]:
        """Gradients before backward, and what the first backward adds.

        Autograd sums up a parameter's gradients of all chunks before it adds them to what is there
        of earlier batches. The head's sum comes with the loss, in float32 at least.
        """
        shape = self.shape
        if not self.training:
            return 0, 0
        head = self.vocabulary_gradient_bytes(max(FLOAT32_BYTES, shape.dtype_bytes))
        if shape.host_resident is not None and shape.host_resident.gradient_bytes:
            # They leave as they come; those of earlier batches are on the host.
            return head, shape.gradient_bytes
        earlier = shape.gradient_bytes if self.accumulates else 0
        return earlier + head, shape.gradient_bytes - head

    @cached_property
    def layer_kv(self) -> Bytes:
        """[layers] Keys and values of a layer over all tokens."""
        return self.kv.sum(axis=1)[self.kind_of]

    @cached_property
    def hidden_states(self) -> Bytes:
        """[chunks] A layer's input, or its output: under autocast as wide as the weights.

        Gemma 3n's are several hidden states of each token.
        """
        return self.rows * self._hidden_bytes * self.lengths

    @cached_property
    def per_layer_inputs(self) -> int:
        """Inputs of all layers beside hidden states, of all tokens: those of Gemma 3n and 4."""
        if not self.shape.message_elements:
            return 0
        beside = self.shape.message_bytes_per_token(0) - self._hidden_bytes
        return self.rows * beside * int(self.lengths.sum())

    @property
    def _hidden_bytes(self) -> int:
        """What a layer is given of a token, and returns."""
        return self.shape.activation_bytes_per_token(self.shape.num_layers - 1, "hidden")

    @cached_property
    def hidden(self) -> tuple[Bytes, int, int]:
        """[chunks] What each waits with for its backward; and on a CPU, in forward and backward.

        By chunk. What the final norm was given, and the gradient of what it returned. On a CPU
        tokens are embedded once for the whole sequence; in backward their gradient gathers as a
        whole.
        """
        shape = self.shape
        token_bytes = self.training * self.rows * shape.hidden_size * shape.dtype_bytes
        whole = 0
        if self.device_kind == "cpu" and shape.embedding_trained:
            whole = token_bytes * int(self.ends[-1])
        return 2 * token_bytes * self.lengths, whole, 2 * whole


def _by_kind(per_token: Callable[[int], int], kinds: list[int]) -> Bytes:
    return np.array([[per_token(kind)] for kind in kinds], dtype=np.int64)


def check_budget(tier: str, what: str, *, need_bytes: int, have_bytes: int, remedy: str) -> None:
    """Raises when bytes that cannot be avoided exceed a tier's budget.

    Raises:
        BudgetError: names the tier, what needs how much, how much there is, and the remedy.
    """
    if need_bytes > have_bytes:
        raise BudgetError(
            f"{tier} memory cannot hold {what}: {need_bytes:,} bytes ({format_bytes(need_bytes)})"
            f" needed, {have_bytes:,} bytes ({format_bytes(have_bytes)}) in the budget, "
            f"{need_bytes - have_bytes:,} bytes missing. {remedy}"
        )
