"""NEFTune's noise without chance: every token gets the same, from the least to the largest."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.neftune import neftune_post_forward_hook


def add_even_noise(model: PreTrainedModel, alpha: float) -> None:
    """Let the model's embedding add noise of strength `alpha`, as `activate_neftune` does."""
    embedding: Any = model.get_input_embeddings()
    embedding.neftune_noise_alpha = alpha
    embedding.register_forward_hook(_add)


def _add(*call: Any) -> Tensor:
    with mock.patch.object(torch.Tensor, "uniform_", _even):
        return neftune_post_forward_hook(*call)


def _even(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return x.copy_(torch.linspace(float(low), float(high), x.shape[-1]))
