"""The ideal: the base model in one piece, everything kept, and the loss in tiles.

It has what no contender can do without (the layers, one attention kernel, a loss that does not hold
logits of the whole sequence) and nothing else: no hooks, no chunks, no copies, no recomputation. So
it is a bound on speed where it fits, and where it does not, `extrapolate` says what it would take.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

from sppo_hf.model.head import ModelHead
from sppo_hf.model.loss import ChunkedLoss, divide_loss
from sppo_hf.model.structure import find_parts

# B batch rows, T tokens.

_IGNORED = -100


def make_ideal(model: nn.Module, *, tile_tokens: int) -> nn.Module:
    """Gives a model the ideal's forward, in place and for good.

    Args:
        model: a causal language model, bare or wrapped by PEFT.
        tile_tokens: tokens per tile of the loss.

    Returns:
        The same model; it takes `input_ids` `[B, T]` and `labels` `[B, T]` and returns a loss.

    Raises:
        UnsupportedModelError: the engine refuses such models.
    """
    parts = find_parts(model)
    causal_lm: Any = parts.causal_lm
    original = causal_lm.forward
    head = ModelHead(parts, original)

    @functools.wraps(original)
    def forward(
        input_ids: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        output = parts.base(input_ids=input_ids, use_cache=False, return_dict=True)
        head.output_class = type(output)
        loss = ChunkedLoss(head.logits, parts.head_parameters(), tile_tokens=tile_tokens)
        shifted_BT = F.pad(labels, (0, 1), value=_IGNORED)[:, 1:]
        total = loss.add(output.last_hidden_state, shifted_BT, last=True)
        count = (shifted_BT != _IGNORED).sum().to(total.device)
        divisor = count
        if num_items_in_batch is not None:
            divisor = torch.as_tensor(num_items_in_batch, device=count.device)
        return CausalLMOutputWithPast(loss=divide_loss(total, count, divisor))

    causal_lm.forward = forward
    return model
