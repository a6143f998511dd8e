"""The arguments of one call of a causal language model's forward, and the layout of its batch.

`read_call` sorts the arguments into inputs that are sliced along the tokens, arguments of the loss,
and constants that every chunk gets; those that have no meaning in chunks are refused.

`ForwardCall.layout` says which keys each query sees (row lengths, padding, packed documents), which
chunks have no label and which are padding alone. It is read from the device once, a few integers
before the first chunk (the only such read in a step; the device is idle then, because the batch has
just been copied to it). As in the unmodified model, padding is given by `attention_mask`, packing
by `position_ids` that restart (without an attention mask only, as in Transformers) or by
`cu_seq_lens_q`. Masks with padding between real tokens or of more than two dims, and left padding
with labels, are refused.

[Note: left padding]
Padding on the left is treated as a document of its own before the row's: real tokens do not see it,
and what its queries see does not matter as long as nothing is predicted there. The unmodified model
counts positions from the first column, padding included, and so does the chunked one. Its recurrent
layers keep padding out of their states by zeros; ours begin anew behind it, which is the same.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sppo_hf.attention.segments import RowSpans
from sppo_hf.config import SPPOConfig
from sppo_hf.engine.attention_interface import document_positions, is_causal_with
from sppo_hf.engine.family_guard import left_padding_reason
from sppo_hf.engine.foreign_code import foreign_head_module
from sppo_hf.engine.model_parts import CACHE_ARGUMENTS, ROUTER_SWITCH, ModelParts
from sppo_hf.errors import ConfigError

# B batch rows, T tokens of the sequence, D model width.

_LOSS_ARGUMENTS = ("labels", "shift_labels", "num_items_in_batch", "ignore_index")
_PACKING_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
CLASSIFIER_LABELS = ("labels", "start_positions", "end_positions")
_HEAD_ARGUMENTS = ("fused_lm_head",)
"""Keywords with which TRL makes its own head compute log-probabilities in tiles."""
_OTHER_INPUTS = ("image", "pixel", "video", "audio", "feature")
"""Parts of the names of inputs other than text, of which each chunk would get all."""
_MODALITIES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
"""Inputs of multimodal models that mark tokens as text, image or sound."""
_OUTPUT_SWITCHES = ("output_attentions", "output_hidden_states")


@dataclass(slots=True)
class ForwardCall:
    """The arguments of one call."""

    tokens: dict[str, Tensor]
    """Inputs with a token dim, first `input_ids` `[B, T]` or `inputs_embeds` `[B, T, D]`."""
    attention_mask: Tensor | None
    position_ids: Tensor | None
    cu_seq_lens: Tensor | None
    cu_seq_lens_k: Tensor | None
    shift_labels: Tensor | None
    """Labels at the positions that predict them, `[B, T]`; None without labels."""
    num_items_in_batch: Tensor | int | None
    ignore_index: int
    loss_arguments: dict[str, Any]
    """Arguments of the loss as given, for models that compute head and loss themselves."""
    head_arguments: dict[str, Any]
    """Arguments of a head that gets the whole hidden states: of TRL's own; of a classifier all that
    the call was given."""
    router_loss: bool
    """Whether the load-balancing loss of routers is asked for, by keyword or config."""
    constants: dict[str, Any]
    """Arguments that every chunk gets unchanged."""
    switched_on: tuple[str, ...]
    """Keywords and config fields that are on and collect tensors of the whole sequence."""
    cache: str | None
    """Name of the argument that holds a cache, if there is one."""
    kept_positions: Tensor | None
    """Positions that `logits_to_keep` selects, `[B, K]`; None for all."""
    uses_cache: bool
    caches_by_default: bool
    """Whether the unmodified model would make a cache, as Transformers' configs have it."""
    return_dict: bool
    parts: ModelParts

    @property
    def has_labels(self) -> bool:
        """Whether the call asks for a loss."""
        if self.parts.is_classifier:
            return any(self.head_arguments.get(name) is not None for name in CLASSIFIER_LABELS)
        return self.shift_labels is not None

    @property
    def _first(self) -> Tensor:
        return next(iter(self.tokens.values()))

    @property
    def batch_rows(self) -> int:
        """B."""
        return self._first.shape[0]

    @property
    def total_tokens(self) -> int:
        """T."""
        return self._first.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the inputs."""
        return self._first.device

    @property
    def router_switch(self) -> dict[str, bool]:
        """Argument of the base model; none for models without routers."""
        is_known = self.router_loss or self.parts.has_router_loss()
        return {ROUTER_SWITCH: self.router_loss} if is_known else {}

    def positions(self) -> Tensor:
        """Positions of the tokens, `[B or 1, T]`, counted from 0 unless given; may have axes."""
        if self.position_ids is not None:
            return self.position_ids
        return torch.arange(self.total_tokens, device=self.device)[None]

    @property
    def aligned_labels(self) -> Tensor | None:
        """The labels as given, `[B, T]`; None without labels or with `logits_to_keep`."""
        labels: Tensor | None = self.loss_arguments.get("labels")
        return labels if self.kept_positions is None else None

    def select_kept_logits(self, logits_BTV: Tensor) -> Tensor:
        """Logits of the positions that `logits_to_keep` selects, `[B, K, V]`."""
        if self.kept_positions is None:
            return logits_BTV
        kept_BK1 = self.kept_positions[..., None].to(logits_BTV.device)
        return logits_BTV.take_along_dim(kept_BK1, dim=1)

    def layout(self, *, all_positions: bool = False) -> BatchLayout:
        """The layout of the batch; see `read_layout`, which reads a few integers from the device.

        With `all_positions`, positions without labels count as used, because their logits were
        requested.

        Raises:
            ConfigError: The mask has gaps, shapes are wrong, left padding cannot be exact, or keys
                are packed differently from queries.
        """
        of_q, of_k = self.cu_seq_lens, self.cu_seq_lens_k
        if of_k is not None and of_k is not of_q and (of_q is None or not torch.equal(of_q, of_k)):
            raise ConfigError(
                "cu_seq_lens_k is not cu_seq_lens_q. Chunked sequences take documents that attend "
                "to themselves: give the same offsets for both."
            )
        positions = self.position_ids
        if positions is not None and self.attention_mask is None and self.cu_seq_lens is None:
            positions = document_positions(self.parts, positions)
            if positions is None:
                _warn_if_documents_are_joined(self.position_ids, self.parts.name)
        elif positions is not None and positions.ndim > 2:
            positions = None
        layout = read_layout(
            batch_rows=self.batch_rows,
            total_tokens=self.total_tokens,
            attention_mask=self.attention_mask,
            position_ids=positions,
            cu_seq_lens=self.cu_seq_lens,
            shift_labels_BT=None if all_positions else self._predicted_labels(),
            ignore_index=self.ignore_index,
            left_padding=self._left_padding_reason,
            blocks=bool(getattr(self.parts.text_config, "attention_chunk_size", None)),
        )
        by_positions = self.attention_mask is None and self.cu_seq_lens is None
        if by_positions and layout.rows is not None and self.caches_by_default:
            warnings.warn(
                "position_ids restart or jump, so documents in a row do not see each other. They "
                f"do in the unmodified model while {_config_owner(self.parts)} has use_cache=True, "
                "unless it runs FlashAttention. Set use_cache = False there (the Trainer does for "
                "model.config) to have both agree, or give an attention_mask if a row is one "
                "document.",
                stacklevel=2,
            )
        return layout

    def _predicted_labels(self) -> Tensor | None:
        """Labels at the positions that predict them; a classifier predicts no tokens."""
        if not self.parts.is_classifier:
            return self.shift_labels
        shape = (self.batch_rows, self.total_tokens)
        return torch.full(shape, self.ignore_index, device=self.device)

    def _left_padding_reason(self) -> str:
        """Return why rows may not begin with padding; "" where they may."""
        name, kind = self.parts.name, self.parts.classifier_kind
        if kind == "ForQuestionAnswering":
            return f"{name} looks for the span at all positions, padding among them"
        labels = self.head_arguments.get("labels")
        if kind == "ForTokenClassification":
            if labels is None:
                return f"{name} without labels returns logits of all positions, padding among them"
            if bool(((labels != self.ignore_index) & (self.attention_mask == 0)).any()):
                return f"there are labels at padding (set them to {self.ignore_index})"
        if kind is not None and (own := foreign_head_module(self.parts)):
            return f"{own} in the head may read padding, too"
        if kind == "ForSequenceClassification" and self._has_row_of_padding_tokens():
            return f"all tokens of a row are the padding token, so that {name} reads the padding"
        return left_padding_reason(self.parts, self.batch_rows)

    def _has_row_of_padding_tokens(self) -> bool:
        """Whether the real tokens of a row that begins with padding are all padding tokens, too.

        Transformers takes the last other token, and the first of the row where there is none. Rows
        without real tokens are exact.
        """
        mask, tokens = self.attention_mask, self.tokens.get("input_ids")
        number = self.parts.text_config.pad_token_id
        if mask is None or tokens is None or number is None:
            return False
        real = mask != 0
        alone = real.any(1) & ~real[:, 0] & ~(real & (tokens != number)).any(1)
        return bool(alone.any())

    def divisor(self, count: Tensor) -> Tensor:
        """Divisor of the summed loss, as in Transformers, shape `[]`."""
        number = self.num_items_in_batch
        if number is None:
            return count
        if not isinstance(number, Tensor):
            # Filled on the device; a copy from the host would wait for the whole forward.
            return torch.full((), number, device=count.device)
        # Pageable memory is read before the call returns, so no wait is needed.
        return number.to(count.device, non_blocking=number.device.type == "cpu")

    def micro_batch_rows(self, config: SPPOConfig) -> int:
        """Rows that run together."""
        return min(config.micro_batch_size or self.batch_rows, self.batch_rows)

    def row_groups(self, config: SPPOConfig) -> Iterator[tuple[int, int]]:
        """Yield half-open ranges of rows that run together."""
        size = self.micro_batch_rows(config)
        for start in range(0, self.batch_rows, size):
            yield start, min(start + size, self.batch_rows)

    def refuse_unsupported(self, name: str) -> None:
        """Refuse arguments that have no meaning in chunks.

        Raises:
            ConfigError: Names the argument and a remedy.
        """
        self._refuse_shapes()
        for switch in self.switched_on:
            remedy = f"set {switch} = False" if "." in switch else f"call it without {switch}"
            raise ConfigError(
                f"{name}: {switch}=True collects tensors of the whole sequence, which chunked "
                f"training exists to avoid. Remedy: {remedy}."
            )
        if self.cache is not None:
            raise ConfigError(
                f"{name}: {self.cache} together with labels (as in prefix tuning) is not "
                "supported in chunked training. Use LoRA, or revert the model."
            )
        self._read_other_modalities(name)
        if self.batch_rows == 0 or self.total_tokens == 0:
            raise ConfigError(
                f"{name}: the batch is empty ({self.batch_rows} rows of {self.total_tokens} "
                "tokens). Check the data collator."
            )

        self._refuse_unlearned_positions(name)

    def _refuse_unlearned_positions(self, name: str) -> None:
        """Refuse positions beyond a table that has learned one vector for each (GPT-2's)."""
        if (table := self.parts.learned_positions()) is None:
            return
        table_name, positions = table
        given = self.position_ids
        last = self.total_tokens - 1 if given is None else int(given.max())
        if last >= positions:
            raise ConfigError(
                f"{name}: a row has position {last:,}, but {table_name} has learned "
                f"{positions:,} positions, 0 to {positions - 1:,}. Remedy: cut or pack the rows to "
                f"at most {positions:,} tokens, or train a model with rotary positions."
            )

    def _takes_axes(self) -> bool:
        """Whether positions may have axes (time, height, width) for rotary tables."""
        tables = self.parts.decoder.children()
        return any(getattr(table, "mrope_section", None) for table in tables)

    @property
    def encoder_inputs(self) -> dict[str, Any]:
        """Inputs for the encoders of a multimodal model, and those that mark tokens as theirs."""
        if not self.parts.is_multimodal:
            return {}
        return {
            argument: value
            for argument, value in [*self.tokens.items(), *self.constants.items()]
            if (argument in _MODALITIES or is_of_encoders(argument)) and not is_switch(value)
        }

    def _read_other_modalities(self, name: str) -> None:
        """Drop what marks all tokens as text, and refuse inputs that no encoder of the model reads.

        If there are inputs for encoders, they get all arguments; see `encoded_inputs`.
        """
        given = self.encoder_inputs
        if not any(map(is_of_encoders, given)):
            for argument, value in given.items():
                if isinstance(value, Tensor) and self._marks_text_only(argument, value):
                    self.tokens.pop(argument, None)
                    self.constants.pop(argument, None)
        if self.encoder_inputs:
            return
        is_multimodal = self.parts.is_multimodal
        for argument, value in [*self.tokens.items(), *self.constants.items()]:
            if isinstance(value, Tensor) and is_of_encoders(argument):
                seen = "holds images or sound"
            elif is_multimodal and argument in self.constants and not is_switch(value):
                seen = "cannot be sliced along the tokens"
            else:
                continue
            raise ConfigError(
                f"{name}: {argument} {seen}, which chunks do not take. Train on batches of text "
                f"(leave {argument} out), or revert the model."
            )

    def _marks_text_only(self, argument: str, value: Tensor) -> bool:
        """Whether all tokens have one type, with which attention is causal."""
        low, high = (int(x) for x in torch.stack([value.min(), value.max()]).tolist())
        return low == high and is_causal_with(self.parts, argument, low)

    def _refuse_shapes(self) -> None:
        """Refuse positions and offsets whose types or shapes models do not accept."""
        named = {
            "attention_mask": self.attention_mask,
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.cu_seq_lens,
            "cu_seq_lens_k": self.cu_seq_lens_k,
        }
        for name, value in named.items():
            _refuse_other_types(name, value)
        positions = self.position_ids
        allowed = {(1, self.total_tokens), (self.batch_rows, self.total_tokens)}
        if positions is not None and self._takes_axes() and positions.ndim == 3:
            allowed |= {(axes, rows, tokens) for axes in (3, 4) for rows, tokens in allowed}
        if positions is not None and tuple(positions.shape) not in allowed:
            shapes = " or ".join(map(str, sorted(allowed)))
            raise ConfigError(
                f"position_ids has shape {tuple(positions.shape)}; allowed is {shapes}: a position "
                "for every token of the batch, or of every row. Check the data collator."
            )
        if positions is not None and (positions.is_complex() or positions.dtype == torch.bool):
            raise ConfigError(
                f"position_ids has dtype {positions.dtype}; allowed are numbers that count tokens, "
                "such as torch.long. Check the data collator."
            )
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            ends = named[name]
            if ends is None:
                continue
            whole = not (ends.is_floating_point() or ends.is_complex() or ends.dtype == torch.bool)
            if ends.ndim != 1 or len(ends) < 2 or not whole:
                raise ConfigError(
                    f"{name} has shape {tuple(ends.shape)} and dtype {ends.dtype}; allowed is one "
                    "dimension of at least two whole numbers, the offsets at which packed "
                    f"documents begin and the last one ends: [0, …, {self.total_tokens}]."
                )


def read_call(
    parts: ModelParts, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ForwardCall:
    """Read the arguments of a call of `forward`.

    Raises:
        ConfigError: Inputs or labels are not tensors, or their rows and tokens do not match.
    """
    given = _bind(forward, args, kwargs)
    classifier_arguments = dict(given)
    inputs = {n: given.pop(n) for n in ("input_ids", "inputs_embeds") if given.get(n) is not None}
    if len(inputs) != 1:
        raise ConfigError("give exactly one of input_ids and inputs_embeds to the model.")
    for name, value in inputs.items():
        _refuse_other_types(name, value)
    first = next(iter(inputs.values()))
    if first.ndim < 2:
        raise ConfigError(
            f"{next(iter(inputs))} has shape {tuple(first.shape)}; allowed are rows of tokens, "
            "[rows, tokens] or [rows, tokens, width]. Add a first dimension with x[None]."
        )
    loss_arguments = {n: given.pop(n) for n in _LOSS_ARGUMENTS if given.get(n) is not None}
    packing = {n: given.pop(n, None) for n in _PACKING_ARGUMENTS}
    ignore_index = loss_arguments.get("ignore_index", -100)
    switches = {n: given.pop(n, None) for n in _OUTPUT_SWITCHES}
    router_loss = parts.has_router_loss(given.pop(ROUTER_SWITCH, None))
    use_cache = given.pop("use_cache", None)
    caches = [n for n in CACHE_ARGUMENTS if given.pop(n, None) is not None]
    return_dict = given.pop("return_dict", None)
    keep = given.pop("logits_to_keep", None)
    kept = _kept_positions(keep, first) if loss_arguments else None
    if keep is not None:
        # A head that gets the whole hidden states selects the positions itself.
        loss_arguments["logits_to_keep"] = keep
    head_arguments = {n: given.pop(n) for n in _HEAD_ARGUMENTS if given.get(n)}
    if parts.is_classifier:
        given = {n: value for n, value in given.items() if n not in CLASSIFIER_LABELS}
        # Its loss knows no other `ignore_index`.
        head_arguments, loss_arguments, ignore_index = classifier_arguments, {}, -100
    call = ForwardCall(
        tokens=inputs,
        attention_mask=given.pop("attention_mask", None),
        position_ids=given.pop("position_ids", None),
        cu_seq_lens=packing["cu_seq_lens_q"],
        cu_seq_lens_k=packing["cu_seq_lens_k"],
        shift_labels=_shift_labels(loss_arguments, first, kept, ignore_index),
        num_items_in_batch=loss_arguments.get("num_items_in_batch"),
        ignore_index=ignore_index,
        loss_arguments=loss_arguments,
        head_arguments=head_arguments,
        router_loss=router_loss,
        constants={},
        switched_on=_switched_on(parts, switches),
        cache=next(iter(caches), None),
        kept_positions=kept,
        uses_cache=bool(caches or use_cache),
        caches_by_default=use_cache is None and getattr(parts.text_config, "use_cache", False),
        return_dict=bool(
            parts.causal_lm.config.return_dict if return_dict is None else return_dict
        ),
        parts=parts,
    )
    for name, value in given.items():
        if value is None or name in ("input_ids", "inputs_embeds"):
            continue
        if isinstance(value, Tensor) and value.shape[:2] == first.shape[:2]:
            call.tokens[name] = value
        else:
            call.constants[name] = value
    return call


def _switched_on(parts: ModelParts, given: dict[str, Any]) -> tuple[str, ...]:
    """Keywords that are true, and config fields that are true and not overridden by a keyword."""
    owner = _config_owner(parts)
    fields = [
        f"{owner}.{name}"
        for name in _OUTPUT_SWITCHES
        if given[name] is None and getattr(parts.text_config, name, False)
    ]
    return (*(name for name, value in given.items() if value), *fields)


def is_of_encoders(argument: str) -> bool:
    """Whether an argument, by its name, is for encoders of images, video or sound."""
    return any(word in argument for word in _OTHER_INPUTS)


def is_switch(value: object) -> bool:
    """Whether an argument is a plain value, which means the same for every chunk."""
    return isinstance(value, (bool, int, float, str))


def _bind(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    signature = inspect.signature(forward)
    given = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given


def _refuse_other_types(name: str, value: object) -> None:
    if value is not None and not isinstance(value, Tensor):
        raise ConfigError(
            f"{name} is of type {type(value).__name__}; allowed is a torch.Tensor. Convert it with "
            "torch.tensor(…) in the data collator."
        )


def _kept_positions(keep: int | Tensor | None, first: Tensor) -> Tensor | None:
    """Positions whose logits the unmodified model would compute, `[B, K]`; None for all."""
    if keep is None or (isinstance(keep, int) and keep == 0):
        return None
    if not isinstance(keep, int):
        _refuse_other_types("logits_to_keep", keep)
    positions = torch.arange(first.shape[1], device=first.device)
    if isinstance(keep, int):
        return positions[-keep:].expand(first.shape[0], -1)
    if keep.ndim > 1 and keep.dtype == torch.bool:
        raise ConfigError(
            f"logits_to_keep is a mask of shape {tuple(keep.shape)}. Allowed with labels: a number "
            "of last tokens, a mask of tokens, or positions. Remedy: drop logits_to_keep and mask "
            "labels with -100 instead; masked positions cost no logits memory."
        )
    kept_BK = positions[keep.to(first.device)].expand(first.shape[0], -1)
    ordered_BK = kept_BK.sort(dim=1).values
    if bool((ordered_BK[:, 1:] == ordered_BK[:, :-1]).any()):
        raise ConfigError(
            "logits_to_keep selects a token twice. Allowed with labels: each token at most once. "
            "Remedy: logits_to_keep.unique(), and labels cut to it."
        )
    return kept_BK


def _shift_labels(
    loss_arguments: dict[str, Any], first: Tensor, kept: Tensor | None, ignore: int
) -> Tensor | None:
    """Labels at the positions that predict them, `[B, T]`; None without labels.

    With `logits_to_keep`, labels are those of the selected tokens. The unmodified model shifts them
    among these tokens, so the first one is not predicted; all other tokens have no label.
    """
    rows, total_tokens = first.shape[:2]
    tokens = total_tokens if kept is None else kept.shape[1]
    labels = loss_arguments.get("labels")
    shifted = loss_arguments.get("shift_labels")
    for name, value in (("labels", labels), ("shift_labels", shifted)):
        _refuse_other_types(name, value)
        if value is None or value.shape == (rows, tokens):
            continue
        if kept is not None:
            raise ConfigError(
                f"{name} has shape {tuple(value.shape)}, but logits_to_keep selects {tokens} of "
                f"{total_tokens} tokens, so it must have ({rows}, {tokens}). Remedy: cut it to the "
                "same tokens, or drop logits_to_keep: masked positions cost no logits memory."
            )
        raise ConfigError(
            f"{name} has shape {tuple(value.shape)}, the inputs have {tuple(first.shape[:2])} "
            "rows and tokens; they must agree. Check the data collator."
        )
    if shifted is None and labels is not None:
        shifted = F.pad(labels, (0, 1), value=ignore)[:, 1:]
    if shifted is None or kept is None:
        return shifted
    whole = shifted.new_full((rows, total_tokens), ignore)
    return whole.scatter(1, kept.to(whole.device), shifted)


# -- the layout of a batch -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The layout of one batch."""

    rows: tuple[RowSpans, ...] | None
    """Documents and padding per row; None if plain causal attention gives the same."""
    used_tokens: int
    """Tokens from this one on are padding in every row and have no label."""
    labelled: tuple[bool, ...] | None
    """For each token position, whether any row has a label there; None without labels."""

    def spans(self, start: int, end: int) -> tuple[RowSpans, ...] | None:
        """Return documents and padding of rows `[start, end)`; None as in `rows`."""
        return None if self.rows is None else self.rows[start:end]

    def has_label(self, start: int, end: int) -> bool:
        """Whether any position in `[start, end)` has a label, or no labels are given."""
        return self.labelled is None or any(self.labelled[start:end])


def read_layout(
    *,
    batch_rows: int,
    total_tokens: int,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seq_lens: Tensor | None,
    shift_labels_BT: Tensor | None,
    ignore_index: int,
    left_padding: Callable[[], str] = lambda: "",
    blocks: bool = False,
) -> BatchLayout:
    """Read the layout of a batch of B rows of T tokens.

    Args:
        batch_rows: B.
        total_tokens: T.
        attention_mask: `[B, T]`, nonzero for real tokens, or None.
        position_ids: `[B or 1, T]` as given by the caller, or None.
        cu_seq_lens: Cumulative document lengths of a batch of one packed row, or None.
        shift_labels_BT: Labels aligned with the positions that predict them, or None.
        ignore_index: The label that is not counted.
        left_padding: Returns why rows of this model may not begin with padding; "" if they may. It
            must count positions from the first column, whatever the mask is, and begin states
            behind the padding.
        blocks: Whether layers attend within blocks of tokens (Llama 4). The model counts blocks by
            positions, chunked attention from a document's first token.

    Raises:
        ConfigError: A mask has padding between real tokens or a wrong shape, left padding cannot be
            exact, or with `blocks` a later document of a row does not begin at position 0.
    """
    labelled_T = None if shift_labels_BT is None else (shift_labels_BT != ignore_index).any(0)
    labelled = None if labelled_T is None else tuple(labelled_T.tolist())
    if cu_seq_lens is not None:
        rows = _packed_by_lengths(cu_seq_lens, batch_rows, total_tokens)
        return BatchLayout(rows, total_tokens, labelled)
    if attention_mask is not None:
        spans = real_spans(attention_mask, batch_rows, total_tokens)
        if any(start for start, _ in spans):
            _refuse_left_padding(spans, shift_labels_BT, ignore_index, left_padding)
        _warn_if_packing_is_ignored(position_ids, attention_mask)
        return _padded(spans, total_tokens, labelled, shift_labels_BT, ignore_index)
    rows = None if position_ids is None else _packed_by_positions(position_ids, batch_rows)
    if blocks and rows is not None and position_ids is not None:
        _refuse_shifted_documents(position_ids)
    return BatchLayout(rows, total_tokens, labelled)


def _padded(
    spans: list[tuple[int, int]],
    total_tokens: int,
    labelled: tuple[bool, ...] | None,
    shift_labels_BT: Tensor | None,
    ignore_index: int,
) -> BatchLayout:
    rows = tuple(
        RowSpans(_spans([0, start] if start else [0], total_tokens), end) for start, end in spans
    )
    layout = BatchLayout(rows, total_tokens, labelled)
    if all(span == (0, total_tokens) for span in spans):
        return replace(layout, rows=None)
    if shift_labels_BT is None or labelled is None:
        return layout
    at = torch.arange(total_tokens, device=shift_labels_BT.device)
    end_B1 = torch.tensor([end for _, end in spans], device=shift_labels_BT.device)[:, None]
    pads_count = bool(((shift_labels_BT != ignore_index) & (at >= end_B1)).any())
    if pads_count or not any(labelled):
        return layout
    # Right padding comes after all real queries, and its own queries have no label: without left
    # padding, plain causal attention gives every number that counts. Tokens that are padding in all
    # rows need not run.
    has_left_padding = any(start for start, _ in spans)
    used_tokens = max(end for _, end in spans)
    return replace(layout, rows=rows if has_left_padding else None, used_tokens=used_tokens)


def real_spans(mask: Tensor, batch_rows: int, total_tokens: int) -> list[tuple[int, int]]:
    """Return `(start, end)` of each row's real tokens; `(0, 0)` for a row of padding alone."""
    if mask.ndim != 2 or tuple(mask.shape) != (batch_rows, total_tokens):
        raise ConfigError(
            f"attention_mask has shape {tuple(mask.shape)}; chunked sequences take a padding mask "
            f"of shape ({batch_rows}, {total_tokens}): 1 for real tokens, 0 for padding. Documents "
            "packed into a row need no mask: leave it out and let position_ids restart at 0 with "
            "every document."
        )
    real_BT = mask != 0
    at = torch.arange(total_tokens, device=mask.device)
    start_B = real_BT.int().argmax(1)
    end_B = start_B + real_BT.sum(1)
    whole_B = (real_BT == ((at >= start_B[:, None]) & (at < end_B[:, None]))).all(1)
    binary_B = ((mask == 1) | ~real_BT).all(1)
    flags = [whole_B.to(end_B.dtype), binary_B.to(end_B.dtype)]
    starts, ends, whole, binary = torch.stack([start_B, end_B, *flags]).tolist()
    if not all(binary):
        # Some collators number the documents of a packed row here, for attention code of their own;
        # Transformers reads every number as a real token and lets the documents see each other.
        row = binary.index(0)
        raise ConfigError(
            f"attention_mask has values other than 0 and 1 in row {row}, for example "
            f"{mask[row][real_BT[row] & (mask[row] != 1)][0].item()}. Allowed: 1 for real tokens, "
            "0 for padding. Remedy, if they number documents packed into a row: leave the mask out "
            "and let position_ids restart at 0 with every document."
        )
    if not all(whole):
        raise ConfigError(
            f"attention_mask has padding between real tokens in row {whole.index(0)}. Chunked "
            "sequences take rows whose real tokens are contiguous: drop the padding in between."
        )
    return list(zip(starts, ends, strict=True))


def _refuse_left_padding(
    spans: list[tuple[int, int]],
    shift_labels_BT: Tensor | None,
    ignore_index: int,
    of_model: Callable[[], str],
) -> None:
    """Refuse left padding where it cannot be known to be exact."""
    row = next(index for index, (start, _) in enumerate(spans) if start)
    reason = "without labels it is not known that nothing is predicted there"
    if shift_labels_BT is not None:
        reason = of_model()
    if shift_labels_BT is not None and not reason:
        at = torch.arange(shift_labels_BT.shape[1], device=shift_labels_BT.device)
        start_B1 = torch.tensor([start for start, _ in spans], device=at.device)[:, None]
        counts_B = ((shift_labels_BT != ignore_index) & (at < start_B1)).any(1)
        if bool(counts_B.any()):
            row = int(counts_B.nonzero()[0, 0])
            reason = (
                f"there are labels that padding would have to predict (the first real token is at "
                f"index {spans[row][0]}; set its label to {ignore_index})"
            )
    if reason:
        raise ConfigError(
            f"attention_mask has left padding in row {row}: {reason}. Right padding is always "
            "fine: set tokenizer.padding_side = 'right', or drop the padding. TRL's trainers that "
            "generate (GRPOTrainer, RLOOTrainer and others) pad prompts on the left whatever is "
            "set: give them prompts of one length."
        )


def _packed_by_positions(position_ids: Tensor, batch_rows: int) -> tuple[RowSpans, ...] | None:
    breaks = (torch.diff(position_ids, dim=-1) != 1).nonzero().tolist()
    if not breaks:
        return None
    total = position_ids.shape[-1]
    starts: list[list[int]] = [[0] for _ in range(position_ids.shape[0])]
    for row, before in breaks:
        starts[row].append(before + 1)
    rows = tuple(RowSpans(_spans(row, total), total) for row in starts)
    return rows * batch_rows if len(rows) == 1 else rows


def _refuse_shifted_documents(position_ids: Tensor) -> None:
    """Refuse a document after another one of the same row whose positions do not begin at 0."""
    begins = torch.diff(position_ids, dim=-1) != 1
    firsts = position_ids[:, 1:][begins]
    if bool((firsts != 0).any()):
        seen = int(firsts[firsts != 0][0])
        raise ConfigError(
            f"position_ids has a document in the middle of a row that begins at position {seen}. "
            "This model attends within blocks of tokens, which are counted from position 0. "
            "Allowed: packed documents that each begin at 0. Remedy: let position_ids restart at 0 "
            "with every document."
        )


def _packed_by_lengths(
    cu_seq_lens: Tensor, batch_rows: int, total_tokens: int
) -> tuple[RowSpans, ...]:
    ends = cu_seq_lens.tolist()
    if batch_rows != 1 or ends[0] != 0 or ends[-1] != total_tokens or ends != sorted(ends):
        raise ConfigError(
            f"cu_seq_lens_q={ends[:4]}...{ends[-1:]} with a batch of {batch_rows} x {total_tokens} "
            "tokens; packed documents take one row and rising offsets from 0 to its length."
        )
    starts = sorted(set(ends[:-1]) - {total_tokens})
    return (RowSpans(_spans(starts, total_tokens), total_tokens),)


def _spans(starts: list[int], total: int) -> tuple[tuple[int, int], ...]:
    return tuple(zip(starts, [*starts[1:], total], strict=True))


def _config_owner(parts: ModelParts) -> str:
    """Where a user finds the config of the text model."""
    return "model.config" + ("" if parts.text_config is parts.causal_lm.config else ".text_config")


def _warn_if_documents_are_joined(position_ids: Tensor | None, name: str) -> None:
    if position_ids is not None and bool((torch.diff(position_ids, dim=-1) < 0).any()):
        warnings.warn(
            f"position_ids restart, but {name} makes no mask of them in Transformers: documents in "
            "a row see each other, here as there, unless it runs FlashAttention there. Give "
            "cu_seq_lens_q and cu_seq_lens_k to keep them apart "
            "(DataCollatorWithFlattening(return_flash_attn_kwargs=True) does).",
            stacklevel=2,
        )


def _warn_if_packing_is_ignored(position_ids: Tensor | None, mask: Tensor) -> None:
    if position_ids is None:
        return
    real_BT = mask != 0  # positions of padding do not matter
    both_real = real_BT[:, 1:] & real_BT[:, :-1]
    if bool(((torch.diff(position_ids, dim=-1) < 0) & both_real).any()):
        warnings.warn(
            "position_ids restart, but an attention_mask is given: Transformers then lets packed "
            "documents see each other, and so does the chunked model. Leave attention_mask out to "
            "keep packed documents apart.",
            stacklevel=2,
        )
