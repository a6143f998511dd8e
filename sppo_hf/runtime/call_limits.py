"""What a model that is cut into stages cannot be called for; the same on every rank."""

from __future__ import annotations

import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from sppo_hf.config import SPPOConfig
from sppo_hf.errors import ConfigError, UnsupportedModelError
from sppo_hf.model.calls import ForwardCall
from sppo_hf.model.structure import ModelParts


def refuse_call(parts: ModelParts, config: SPPOConfig, call: ForwardCall) -> None:
    """Refuse calls of a cut model that ask for more than the standard loss.

    Args:
        parts: The model.
        config: The settings.
        call: The call.

    Raises:
        ConfigError: No labels, logits of whole sequences, or inputs that need a gradient.
        UnsupportedModelError: A loss that is not the standard one.
    """
    name = parts.name
    if not call.has_labels:
        raise ConfigError(
            f"{name} is cut into {config.pp_size} stages (pp_size) and was called without "
            "labels, as generate() and predictions of logits do. Allowed: calls with labels, "
            "which return the loss. Remedy: pass labels; to generate, load the saved "
            "checkpoint without SPPO; in the Trainer set prediction_loss_only=True, and leave "
            "label_smoothing_factor and compute_loss_func out."
        )
    standard = parts.causal_lm.loss_function is ForCausalLMLoss
    if not call.head_arguments and not standard:
        raise UnsupportedModelError(
            f"{name} computes its loss outside the standard one for causal language models, "
            "which a pipeline cannot take apart. Train it with pp_size=1."
        )
    if getattr(parts.text_config, "output_router_logits", False):
        raise UnsupportedModelError(
            f"{name}: config.output_router_logits=True adds a loss of the routers of all layers, "
            f"which in a pipeline are on {config.pp_size} ranks. Set "
            "model.config.output_router_logits = False, or train it with pp_size=1."
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in call.tokens.values()):
        raise ConfigError(
            "inputs_embeds that need a gradient would get it before the loss's backward, from "
            "the first rank alone. Allowed with pp_size > 1: input_ids, or inputs_embeds that "
            "need none. Remedy: inputs_embeds.detach(), or pp_size=1."
        )
    if config.return_logits:
        raise ConfigError(
            "return_logits=True collects the logits of whole sequences, which in a pipeline "
            "are on its last rank alone. Allowed: return_logits=False with pp_size > 1. "
            "Remedy: drop return_logits."
        )
    call.refuse_unsupported(name)
