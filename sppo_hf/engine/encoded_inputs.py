"""What a multimodal model gives its text decoder for rows with images, video or sound.

The model's own code runs once, as far as the decoder: encoders, and the embedding of all tokens,
into which it puts what they return. Chunks are then slices of what the decoder was given, and call
the decoder instead of the base model. Where tokens of an image see each other in both directions,
no chunk ends between them. A model that builds another mask for images is refused.

[Note: trained encoders] What they would save for backward, often more than all text, is not kept.
They run once more when the backward of all chunks has ended, layer by layer where their layers
support it (`recompute.checkpoint`), so that until then only embeddings are held. Frozen encoders
save nothing and run once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from sppo_hf.engine.attention_interface import (
    IMPLEMENTATION,
    MaskMeaning,
    attention_implementation,
    document_positions,
)
from sppo_hf.engine.chunk_runner import ChunkInputs
from sppo_hf.engine.forward_calls import ForwardCall, is_of_encoders, is_switch, real_spans
from sppo_hf.engine.loss import UnknownOutput
from sppo_hf.engine.model_parts import (
    CACHE_ARGUMENTS,
    CAPTURES,
    ROUTER_SWITCH,
    ModelParts,
    patched_attribute,
)
from sppo_hf.engine.recompute import checkpoint
from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.planning.config_file import count_embedded

# B batch rows, T tokens of the sequence, D model width, E tokens that stand for images.

_ADDED_IN_LAYERS = {
    "deepstack_visual_embeds": "visual_pos_masks",
    "deepstack_features": "vision_mask",
}
"""Tensors `[E, D]`, one for each of some layers, which a decoder adds to the hidden states at the
tokens that a mask marks (DeepStack, arXiv 2406.04334), and the name of the mask."""

_PER_LAYER = "per_layer_inputs"
"""Embeddings `[B, T, layers, size]` that layers read beside the hidden states (Gemma 4)."""

_CALLS_OWN = (*CACHE_ARGUMENTS, "use_cache", "return_dict", "attention_mask", "cache_position")
"""Arguments of the decoder that every chunk's call sets by itself, or does without."""


@dataclass(frozen=True, slots=True)
class EncodedInputs:
    """The decoder's inputs for whole rows."""

    inputs: ChunkInputs
    output_class: type
    """Class of what the base model returns."""


def encoders(parts: ModelParts) -> list[nn.Module]:
    """Modules of the base model outside of its text decoder and embedding."""
    text = {*parts.decoder.modules(), *parts.causal_lm.get_input_embeddings().modules()}
    return [module for module in parts.base.modules() if module not in text]


def train_encoders(parts: ModelParts) -> bool:
    """Whether any parameter of the encoders, or of what projects their output, trains."""
    own = (module.parameters(recurse=False) for module in encoders(parts))
    return any(parameter.requires_grad for group in own for parameter in group)


def encoded_token_bytes(call: ForwardCall) -> tuple[int, int]:
    """Device bytes of the inputs of `encode`, held until forward ends, and of their gradients.

    For each token, as in `ModelShape`; nothing for rows of text alone.
    """
    if not call.encoder_inputs:
        return 0, 0
    parts = call.parts
    embedding = parts.causal_lm.get_input_embeddings()
    size = parts.causal_lm.dtype.itemsize * parts.text_config.hidden_size
    held = count_embedded(parts.causal_lm.config) * size
    trained = any(p.requires_grad for p in embedding.parameters()) or train_encoders(parts)
    # Autograd assembles the gradient of all tokens from those of chunks.
    return held, 2 * held if trained and torch.is_grad_enabled() else 0


def encode(call: ForwardCall) -> tuple[dict[str, Any], type]:
    """Run the base model of a call up to its text decoder.

    Returns:
        The arguments of the decoder, and the class of the base model's output.

    Raises:
        ConfigError: The base model does not read an input.
    """
    parts = call.parts
    optional = {"attention_mask": call.attention_mask, "position_ids": call.position_ids}
    given = {
        **call.tokens,
        **call.constants,
        **{name: x for name, x in optional.items() if x is not None},
    }
    for argument in call.encoder_inputs:
        # A base model that takes any keyword could leave it unread.
        read = argument in parts.base_arguments() or not is_of_encoders(argument)
        if parts.decoder is parts.base or not read:
            raise ConfigError(
                f"{parts.name}: {argument} is not read by its {type(parts.base).__name__}, whose "
                "text decoder could then be given what it reads. Train on batches of text (leave "
                f"{argument} out), or revert the model."
            )
    if torch.is_grad_enabled() and train_encoders(parts):
        layers = [one for one in encoders(parts) if isinstance(one, GradientCheckpointingLayer)]
        run = functools.partial(_run_encoders, parts, given, layers)
        return checkpoint(run)
    return _run_encoders(parts, given, [])


def _run_encoders(
    parts: ModelParts, given: dict[str, Any], recomputed: Sequence[nn.Module]
) -> tuple[dict[str, Any], type]:
    """Do what `encode` does; the layers of `recomputed` save their inputs alone."""
    decoder = parts.decoder
    signature = inspect.signature(decoder.forward)
    seen: dict[str, Any] = {}

    def decode(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments |= arguments.pop(name, {})
        seen.update(arguments)
        return UnknownOutput(last_hidden_state=seen.get("inputs_embeds"))

    with (
        # So that masks which the base model builds say what they mean.
        attention_implementation(IMPLEMENTATION, (parts.text_config,)),
        patched_attribute("forward", {decoder: decode}),
        patched_attribute(CAPTURES, dict.fromkeys((parts.base, decoder), True)),
        patched_attribute("gradient_checkpointing", dict.fromkeys(recomputed, True)),
        patched_attribute("_gradient_checkpointing_func", dict.fromkeys(recomputed, checkpoint)),
    ):
        output = parts.base(**given, use_cache=False, return_dict=True)
    return seen, type(output)


def as_inputs(call: ForwardCall, seen: dict[str, Any]) -> ChunkInputs:
    """Sort the arguments of the decoder into what is sliced along the tokens and what is not.

    Raises:
        ConfigError: The decoder is given something else for images than chunks can take.
        UnsupportedModelError: With these inputs its attention is neither causal nor, for the tokens
            of an image, in both directions.
    """
    parts, shape = call.parts, (call.batch_rows, call.total_tokens)
    embeds = seen.pop("inputs_embeds", None)
    _check_embeddings(call, embeds)
    masks = _masks(call, seen.get("attention_mask"))
    positions = _positions(call, seen.pop("position_ids", None))
    tokens = {"inputs_embeds": embeds}
    added, row_numbers = {}, {}
    for name, mask_name in _ADDED_IN_LAYERS.items():
        tensors, mask = seen.pop(name, None), seen.pop(mask_name, None)
        if tensors is not None:
            added[name] = _at_all_tokens(tensors, mask)
            if mask.ndim == 2:  # it is an index of the hidden states, as row numbers can be
                row_numbers[mask_name] = torch.arange(len(mask), device=mask.device)
            else:
                tokens[mask_name] = torch.ones_like(mask)
    constants = {}
    for name, value in seen.items():
        if value is None or name in _CALLS_OWN or name == ROUTER_SWITCH:
            continue
        # Not by shape alone: states of an image may be as long as rows by chance.
        by_token = name == _PER_LAYER or (name in call.tokens and not is_of_encoders(name))
        if by_token and isinstance(value, Tensor) and tuple(value.shape[:2]) == shape:
            tokens[name] = value
        elif is_switch(value):
            constants[name] = value
        else:
            raise ConfigError(
                f"{parts.name}: its text decoder is given {name} for images or sound, which cannot "
                "be sliced along the tokens. Train on batches of text, or revert the model."
            )
    return ChunkInputs(tokens, positions, constants | call.router_switch, added, row_numbers, masks)


def _masks(call: ForwardCall, given: Any) -> dict[Any, MaskMeaning]:
    """Return the masks that the base model has built for its decoder, by kind of layer.

    Nothing where they are causal, as those are that the decoder builds for a chunk by itself.
    """
    masks = given if isinstance(given, dict) else {None: given}
    for one in masks.values():
        known = isinstance(one, MaskMeaning) and one.refusal is None
        cannot = call.cu_seq_lens is not None or call.parts.has_recurrent_state
        refused = not known or (one.spans and cannot)
        if one is not None and one is not call.attention_mask and refused:
            raise UnsupportedModelError(
                f"{call.parts.name} builds an attention mask for images that is neither causal nor "
                "lets the tokens of each image alone see each other in both directions (or does so "
                "in packed rows, or beside recurrent layers), which chunks cannot do. Remedy: "
                f"train on batches of text (leave {', '.join(call.encoder_inputs)} out), or revert "
                "the model."
            )
    if not any(isinstance(m, MaskMeaning) and m.spans for m in masks.values()):
        return {}
    if call.attention_mask is None:
        return masks
    real = real_spans(call.attention_mask, call.batch_rows, call.total_tokens)
    return {kind: mask.within(real) for kind, mask in masks.items()}


def _check_embeddings(call: ForwardCall, embeds: Tensor | None) -> None:
    """Refuse a decoder that embeds the tokens itself, and rows of another length than the labels'.

    Some base models put all that they encode of an image in the place of one token.
    """
    if embeds is None:
        raise ConfigError(
            f"{call.parts.name}: its text decoder is given images or sound beside the tokens, not "
            "in their embeddings, which chunks do not take. Train on batches of text, or revert "
            "the model."
        )
    rows, tokens = embeds.shape[:2]
    if (rows, tokens) != (call.batch_rows, call.total_tokens):
        raise ConfigError(
            f"{call.parts.name} makes {rows} rows of {tokens} tokens of this batch of "
            f"{call.batch_rows} rows of {call.total_tokens}; chunks take rows that keep their "
            "length. Remedy: give a token for every feature of an image or sound, as its processor "
            "does."
        )


def _positions(call: ForwardCall, positions: Tensor | None) -> Tensor:
    """Return the positions of the tokens, which models count in other ways for images."""
    if positions is None:
        return call.positions()
    if positions.ndim == 1:
        positions = positions[None]
    if call.position_ids is None and call.attention_mask is None and call.cu_seq_lens is None:
        separating = document_positions(call.parts, positions)
        if separating is not None and bool((torch.diff(separating, dim=-1) != 1).any()):
            raise ConfigError(
                f"{call.parts.name} counts positions for images by which it takes a row for "
                "several packed documents. Remedy: give an attention_mask."
            )
    return positions


def _at_all_tokens(tensors: Any, mask: Tensor) -> dict[Any, Tensor]:
    """Return tensors `[E, D]` as `[B, T, D]`, zero elsewhere, by their index or key."""
    marked_BT = mask[..., 0] if mask.ndim == 3 else mask
    by_layer = tensors if isinstance(tensors, dict) else dict(enumerate(tensors))
    at_all = {}
    for key, tensor_ED in by_layer.items():
        whole = tensor_ED.new_zeros(*marked_BT.shape, tensor_ED.shape[-1])
        whole[marked_BT] = tensor_ED
        at_all[key] = whole
    return at_all
