"""Where the bytes of a step go: per tier, by cause, moment by moment.

Knows nothing of torch, speeds or a config's budgets. Every figure is a prediction from the model's
shape and the decisions; those that are assumptions rather than consequences say so (`optimizer`,
`workspace`, `reserve`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

from sppo_hf.errors import BudgetError
from sppo_hf.planning.decisions import Decisions
from sppo_hf.planning.layer import LayerShape
from sppo_hf.planning.modes import TIERS, FrameMode, Saved, Tier
from sppo_hf.planning.moments import MemoryEstimate, Moment
from sppo_hf.planning.shape import FLOAT32_BYTES, ModelShape
from sppo_hf.planning.tier_bytes import TierBytes
from sppo_hf.rules import format_bytes

# The assumption behind `optimizer`: AdamW with both moments in float32.
OPTIMIZER_BYTES_PER_PARAMETER = 8
# What the driver, kernels' code, cuBLAS and cuDNN's plans take beside all tensors: an assumption.
CONTEXT_BYTES = {"cpu": 0, "cuda": 1536 * 2**20}
# The caching allocator's and the heap's holes, as a share of what comes and goes in a step.
FRAGMENTATION = {"cpu": 0.03, "cuda": 0.02}
HOST_SLAB_BYTES = 256 * 2**20
_IN_SLABS = ("products", "skeletons")
_NO_MODES: frozenset[FrameMode] = frozenset()


def estimate(
    shape: ModelShape, decisions: Decisions, *, device_kind: str = "cuda"
) -> MemoryEstimate:
    """Predicts the bytes of one forward (and backward, when training) on one device.

    Walks the chunks. After forward of chunk i the device holds K/V and kept frames of chunks 0..i.
    Backward of chunk i starts with those and the dK/dV sums of chunks 0..i (none for the last
    chunk: nobody has written them) and ends with the frames and sums of chunks 0..i-1. Between
    start and end both change linearly, so the peak is at one of them.

    Args:
        shape: the model.
        decisions: bounds, modes, tiers and look-ahead.
        device_kind: "cpu" or "cuda".
    """
    return MemoryModel(shape, decisions, device_kind).estimate()


class MemoryModel:
    """The terms of the estimate, one by one, so that the solver can add them up its own way."""

    def __init__(self, shape: ModelShape, decisions: Decisions, device_kind: str) -> None:
        """Prepare to predict `decisions`; its modes are read by `estimate` alone."""
        self._shape = shape
        self._what = decisions
        self._kind = device_kind
        self._parameter_bytes = shape.parameter_bytes or shape.dtype_bytes
        # Sums over all layers, and asked for at thousands of moments.
        self._lora_bytes = shape.lora_bytes
        self._frame_bytes: dict[tuple[int, Saved], int] = {}
        self._like = shape.alike
        self._kinds = sorted(set(self._like))
        self._layer_kv = max(shape.kv_bytes_per_token(i) for i in self._kinds)
        self._layer_dkv = max(shape.dkv_bytes_per_token(i) for i in self._kinds)
        self._kv = shape.kv_bytes_per_token() * decisions.batch_rows
        self._dkv = shape.dkv_bytes_per_token() * decisions.batch_rows
        lengths = decisions.chunk_lengths
        self._longest = list(
            accumulate(range(len(lengths)), lambda a, b: max(a, b, key=lengths.__getitem__))
        )
        """The longest of the first 1, 2 ... N chunks."""
        self._passes_disk = decisions.kv_tier == "disk" or (
            decisions.training
            and any(mode.tier == "disk" for row in decisions.layer_modes for mode in row)
        )
        self._modes: list[tuple[frozenset[FrameMode], frozenset[FrameMode]]] = []
        """Modes of each chunk, and of all before it."""
        before = _NO_MODES
        for row in decisions.layer_modes:
            self._modes.append((frozenset(row), before))
            before |= self._modes[-1][0]
        self._kept_logits = self._kept_logits_bytes()

    def estimate(self) -> MemoryEstimate:
        """Returns all moments of the step."""
        held = self._held_by_chunk()
        return MemoryEstimate(
            moments=tuple(self._moment(*moment, held) for moment in self.moments())
        )

    def moments(self) -> Iterator[tuple[int, str, int, int, int]]:
        """Yields (chunk, phase, K/V tokens, dK/dV tokens, chunks whose frames are held)."""
        bounds = self._what.bounds
        last = len(bounds) - 1
        for chunk, (_, end) in enumerate(bounds):
            yield chunk, "forward", end, 0, chunk + 1
        if not self._what.training:
            return
        for chunk in range(last, -1, -1):
            start, end = bounds[chunk]
            yield chunk, "start of backward", end, 0 if chunk == last else end, chunk + 1
            yield chunk, "end of backward", end, start, chunk

    def frame_bytes(self, layer: int, chunk: int, saved: Saved) -> int:
        """Bytes that one frame saves."""
        key = self._like[layer], saved
        if key not in self._frame_bytes:
            self._frame_bytes[key] = self._shape.frame_bytes_per_token(layer, saved)
        start, end = self._what.bounds[chunk]
        size = self._frame_bytes[key] * (end - start) + self._shape.state_bytes(layer)
        return size * self._what.batch_rows

    def fixed_device(
        self,
        chunk: int,
        phase: str,
        kv_tokens: int,
        dkv_tokens: int,
        modes: frozenset[FrameMode],
        before: frozenset[FrameMode],
    ) -> TierBytes:
        """Device bytes at a moment, waiting frames left out.

        Args:
            chunk: the running chunk.
            phase: "forward", "start of backward" or "end of backward".
            kv_tokens: tokens whose K/V exist.
            dkv_tokens: tokens whose dK/dV sums exist.
            modes: modes of the running chunk, for what is rebuilt and what runs.
            before: modes of all chunks before it, for what is on its way meanwhile.
        """
        shape, what = self._shape, self._what
        training = what.training
        kv, dkv = self._kv * kv_tokens, self._dkv * dkv_tokens
        if what.kv_tier != "device":
            kv, dkv = self.stream_bytes(chunk, backward=phase != "forward")
        moving = dict(
            kv=kv,
            dkv=dkv,
            hidden=self._hidden_bytes(chunk, phase),
            logits_tile=self.logits_bytes(chunk) if phase == "forward" else self._kept_logits,
            workspace=self._workspace_beside(chunk, phase, modes),
            copies=self._copies_bytes(chunk, modes, before) if training else 0,
        )
        return TierBytes(
            weights=shape.weight_bytes
            - self._lora_bytes
            + (shape.cached_cast_bytes if phase == "forward" else 0),
            lora=self._lora_bytes,
            gradients=self.gradient_bytes(chunk, phase),
            optimizer=OPTIMIZER_BYTES_PER_PARAMETER * shape.trainable_parameters if training else 0,
            reserve=CONTEXT_BYTES[self._kind]
            + int(FRAGMENTATION[self._kind] * sum(moving.values())),
            **moving,
        )

    def _moment(
        self,
        chunk: int,
        phase: str,
        kv_tokens: int,
        dkv_tokens: int,
        framed: int,
        held: dict[Tier, list[dict[str, int]]],
    ) -> Moment:
        what = self._what
        modes, before = self._modes[chunk] if what.training else (_NO_MODES, _NO_MODES)
        fixed = self.fixed_device(chunk, phase, kv_tokens, dkv_tokens, modes, before)
        device = {**dict(fixed.items()), **held["device"][framed]}
        if self._kind == "cpu" and phase == "end of backward":
            # What recomputed frames keep on a CPU are parts of slabs, which go chunk by chunk.
            whole = held["device"][chunk + 1]
            device |= {cause: whole[cause] for cause in _IN_SLABS if cause in whole}
        # Frames come and go like everything else that fragments.
        device["reserve"] += int(FRAGMENTATION[self._kind] * sum(held["device"][framed].values()))
        away: dict[Tier, dict[str, int]] = {
            tier: dict(held[tier][framed]) for tier in TIERS if tier != "device"
        }
        if what.kv_tier != "device":
            away[what.kv_tier].update(kv=self._kv * kv_tokens, dkv=self._dkv * dkv_tokens)
        if self._passes_disk:
            away["host"]["copies"] = what.staging_bytes
        used = sum(away["host"].values())
        away["host"]["slabs"] = -used % HOST_SLAB_BYTES if self._kind == "cuda" else 0
        return Moment(
            name=f"{phase} of chunk {chunk + 1} of {what.num_chunks}",
            chunk=chunk,
            device=TierBytes(**device),
            host=TierBytes(**away["host"]),
            disk=TierBytes(**away["disk"]),
        )

    def _held_by_chunk(self) -> dict[Tier, list[dict[str, int]]]:
        """Bytes by tier and cause of the frames of the first 0, 1 ... N chunks."""
        held: dict[Tier, list[dict[str, int]]] = {tier: [{}] for tier in TIERS}
        for chunk in range(self._what.num_chunks):
            sums = {tier: Counter(held[tier][-1]) for tier in TIERS}
            if self._what.training:
                counts = Counter(zip(self._like, self._what.layer_modes[chunk], strict=True))
                for (layer, mode), count in counts.items():
                    size = count * self.frame_bytes(layer, chunk, mode.saved)
                    sums[mode.tier][CAUSES[mode.saved]] += size
            for tier in TIERS:
                held[tier].append(dict(sums[tier]))
        return held

    def _copies_bytes(
        self, chunk: int, modes: frozenset[FrameMode], before: frozenset[FrameMode]
    ) -> int:
        """Frames on their way: those leaving, or those that came back ahead, beside the running.

        Chunks before a kept one may still leave while it runs forward, and come back while it
        runs backward.
        """
        running = max((self._largest(chunk, m) for m in modes if m.offload), default=0)
        longest = self._longest[chunk]
        largest = max((self._largest(longest, m) for m in before if m.offload), default=running)
        largest = max(largest, running)
        if not largest:
            return self._what.leave_bytes or 0 if self._what.kv_tier != "device" else 0
        out = 2 * largest if self._what.leave_bytes is None else self._what.leave_bytes
        return running + max(out, self._what.fetch_bytes or 0, largest)

    def _largest(self, chunk: int, mode: FrameMode) -> int:
        return max(self.frame_bytes(layer, chunk, mode.saved) for layer in self._kinds)

    def stream_bytes(self, chunk: int, *, backward: bool) -> tuple[int, int]:
        """K/V and dK/dV on the device while they are streamed, in the busiest layer.

        Beside the chunk's own: the block in use and the next one, and where a block is several
        chunks, the run that they are joined to. In backward the sums of as many and of the block
        before, which is leaving, and the gradient of the block in use, not yet added.
        """
        what = self._what
        start, end = what.bounds[chunk]
        own = end - start
        longest_start, longest_end = what.bounds[self._longest[chunk]]
        longest = longest_end - longest_start
        block = self._block_tokens(chunk)
        joined = block if block > longest else 0
        kv = self._layer_kv * (2 * block + joined + own)
        if not backward:
            return what.batch_rows * kv, 0
        dkv = self._layer_dkv * (3 * block + own) + self._layer_kv * block
        return what.batch_rows * kv, what.batch_rows * dkv

    def _hidden_bytes(self, chunk: int, phase: str) -> int:
        what, shape = self._what, self._shape
        if not what.training:
            return 0
        bounds = what.bounds
        waiting = bounds[chunk][0 if phase == "end of backward" else 1]
        # What the final norm was given, and the gradient of what it returned.
        tokens = 2 * waiting
        if self._kind == "cpu" and shape.embedding_trained:
            # Embedded once for the whole sequence; in backward their gradient gathers as a whole.
            tokens += what.total_tokens * (1 if phase == "forward" else 2)
        return what.batch_rows * tokens * shape.hidden_size * shape.dtype_bytes

    def gradient_bytes(self, chunk: int, phase: str) -> int:
        """Gradients at a moment: of earlier batches, and this batch's from its first backward on.

        Autograd sums up a parameter's gradients of all chunks before it adds them to what is there.
        The head's sum comes with the loss, in float32 at least.
        """
        what, shape = self._what, self._shape
        if not what.training:
            return 0
        before = shape.gradient_bytes if what.accumulates else 0
        if phase == "forward" or (phase == "start of backward" and chunk == what.num_chunks - 1):
            return before + self._vocabulary_bytes(max(FLOAT32_BYTES, shape.dtype_bytes))
        return before + shape.gradient_bytes

    def _workspace_beside(self, chunk: int, phase: str, modes: frozenset[FrameMode]) -> int:
        """Workspace at a moment: layers and head do not run at once, nor layers and embedding."""
        size = self.workspace_bytes(chunk, phase, modes)
        if phase == "forward":
            return max(0, size - self.logits_bytes(chunk))
        # On a CPU the embedding runs once per sequence, and backward of the first chunk ends it.
        if phase == "end of backward" and (chunk == 0 or self._kind != "cpu"):
            size = max(size, self._vocabulary_bytes(self._parameter_bytes))
        return size

    def _vocabulary_bytes(self, size: int) -> int:
        """A gradient of embedding or head with elements of so many bytes, where they train."""
        shape = self._shape
        return shape.vocab_size * shape.hidden_size * size if shape.embedding_trained else 0

    def _kept_logits_bytes(self) -> int:
        what, shape = self._what, self._shape
        if not what.return_logits:
            return 0
        return what.batch_rows * what.total_tokens * shape.vocab_size * shape.dtype_bytes

    def logits_bytes(self, chunk: int) -> int:
        """Bytes while the loss of a chunk is computed.

        A tile in the model's dtype and in float32, its logarithms of probabilities and its
        gradient; from the second tile on also the head's gradient of one, beside the sum.
        """
        what, shape = self._what, self._shape
        start, end = what.bounds[chunk]
        tokens = (end - start) * what.batch_rows
        tile = min(what.tile_tokens, tokens)
        float32_bytes = max(FLOAT32_BYTES, shape.dtype_bytes)
        narrow_bytes = shape.dtype_bytes if shape.dtype_bytes < float32_bytes else 0
        per_token = shape.vocab_size * (narrow_bytes + 3 * float32_bytes)
        sums = what.training and (chunk > 0 or tokens > tile)
        head = self._vocabulary_bytes(self._parameter_bytes) if sums else 0
        return self._kept_logits + tile * per_token + head

    def workspace_bytes(self, chunk: int, phase: str, modes: frozenset[FrameMode]) -> int:
        """Temporaries of the busiest layer over one chunk.

        The MLP holds about two intermediates in forward and four with their gradients in backward,
        beside two or four full-width tensors; attention holds q, its output and (in backward) their
        gradients, and one layer's whole prefix of K/V (and dK/dV of one call) once more. CUDA's
        flash kernels (FlashAttention 2's and cuDNN's) write dK/dV for every query head before they
        sum those that share a key head. A layer that is recomputed has its whole frame rebuilt, and
        under autocast casts its weights once more.
        """
        what, shape = self._what, self._shape
        start, end = what.bounds[chunk]
        backward = phase != "forward"
        copies = 4 if backward else 2
        prefix = 0 if what.kv_tier != "device" or start == 0 else end
        most = 0
        for index in self._kinds:
            layer = shape.layers[index]
            full_width = copies * layer.hidden_size
            mlp = copies * layer.mlp_width + full_width
            attention = (copies // 2) * (layer.q_elements + layer.attention_output_elements)
            joined = layer.kv_elements * (prefix * (2 if backward else 1))
            if backward and self._kind == "cuda" and layer.num_heads > layer.num_kv_heads:
                per_key = layer.q_elements + layer.attention_output_elements
                joined += per_key * self._keys_of_a_call(chunk)
            if not backward:
                mlp += self._wide_adapters_elements(layer)
            size = (end - start) * max(mlp, attention + full_width) + joined
            rebuilt = 0
            if backward and any(mode.recompute for mode in modes):
                rebuilt = self.frame_bytes(index, chunk, "whole") + shape.cast_bytes(index)
            most = max(most, size * shape.dtype_bytes * what.batch_rows + rebuilt)
        return most

    def _wide_adapters_elements(self, layer: LayerShape) -> int:
        """Elements, of the model's dtype, of what wider adapters of the MLP compute beside it.

        The second factor's product, that times the scale, and its sum with the frozen product.
        """
        lora = self._shape.lora
        if lora is None or lora.autocast or lora.dtype_bytes <= self._shape.dtype_bytes:
            return 0
        names = layer.traits.names
        if not any(map(lora.adapts, (names.up, names.gate, names.gate_up))):
            return 0
        return 3 * layer.mlp_width * lora.dtype_bytes // self._shape.dtype_bytes

    def _keys_of_a_call(self, chunk: int) -> int:
        """The most keys that one call of an attention kernel is given."""
        what = self._what
        end = what.bounds[chunk][1]
        return end if what.kv_tier == "device" else self._block_tokens(chunk)

    def _block_tokens(self, chunk: int) -> int:
        """Tokens of a block of streamed K/V: of at least one chunk, at most of all before."""
        what = self._what
        start, end = what.bounds[chunk]
        longest_start, longest_end = what.bounds[self._longest[chunk]]
        return min(max(what.kv_block_tokens, longest_end - longest_start), max(start, end - start))


CAUSES: dict[Saved, str] = {"whole": "frames", "products": "products", "skeleton": "skeletons"}
"""The field of `TierBytes` that frames of a kind are counted under."""


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
