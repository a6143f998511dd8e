"""The attention kernel of a comparison: the same for every contender where there is a choice.

"auto" is what our engine's "auto" takes on this device, laid upon the others too. The others reach
PyTorch's kernels through scaled_dot_product_attention, narrowed down to one of them for the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sppo_hf.attention.backends.base import AttentionSpec
from sppo_hf.attention.backends.select import select_backend
from sppo_hf.planning.model_shape import ModelShape

NAMED = {"cudnn": "cudnn", "flash": "aten_flash", "efficient": "efficient"}
"""Kernels that can be asked for, and our backends that call them."""

_SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "aten_flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """How everyone gets the same kernel."""

    name: str
    """For the results."""

    ours: str
    """Our setting `attention_backend`."""

    theirs: str = "sdpa"
    """Transformers' setting `attn_implementation`."""

    sdpa: SDPBackend | None = None
    """What scaled_dot_product_attention is narrowed down to; None leaves it its choice."""

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Narrows scaled_dot_product_attention down for the whole process."""
        with contextlib.nullcontext() if self.sdpa is None else sdpa_kernel([self.sdpa]):
            yield


def choose_kernel(
    choice: str, device: torch.device, shape: ModelShape, dtype: torch.dtype, *, softcap: bool
) -> Kernel:
    """Finds the kernel of a comparison.

    Args:
        choice: "auto", a key of `NAMED`, or "sdpa": everyone's own default.
        device: where the model is.
        shape: the model; its first layer's heads count.
        dtype: of queries, keys and values.
        softcap: whether the model caps its attention logits.

    Raises:
        ConfigError: a kernel is named on a CPU, where there is one only.
    """
    if choice == "sdpa":
        return Kernel("sdpa's choice", ours="auto")
    if choice in NAMED:
        return Kernel(NAMED[choice], ours=NAMED[choice], sdpa=_SDPA[NAMED[choice]])
    layer = shape.layers[0]
    requirement = AttentionSpec(
        device_type=device.type,
        dtype=dtype,
        qk_head_size=layer.qk_head_size,
        v_head_size=layer.v_head_size,
        softcap=softcap,
        window=any(layer.window is not None for layer in shape.layers),
        gqa_ratio=layer.num_heads // layer.num_kv_heads,
    )
    name = select_backend("auto", requirement).backend.name
    theirs = name if name.startswith("flash_attention_") else "sdpa"
    return Kernel(name, ours=name, theirs=theirs, sdpa=_SDPA.get(name))
