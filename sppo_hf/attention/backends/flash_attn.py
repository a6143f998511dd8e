"""The flash-attn packages, versions 2, 3 and 4, on CUDA; each only if it is installed.

The packages change their signatures between releases. Every argument therefore goes by its name,
names that an installed release does not know are left out if their value turns the feature off (no
window, no soft cap), and anything else that is missing makes the backend unsupported.

Shapes: B batch, N query heads, K key/value heads, C query tokens, T key tokens, H head size.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from sppo_hf.attention.backends.adapters import (
    BottomRightBackend,
    KernelCall,
    KernelNeeds,
    head_variants,
    with_documents,
)
from sppo_hf.attention.backends.base import (
    HALF_DTYPES,
    AttentionSpec,
    Backend,
    BackwardInputs,
    missing_kernel,
    register_backend,
)
from sppo_hf.errors import first_line

logger = logging.getLogger(__name__)


class _FlashAttention(BottomRightBackend):
    """Base of the three packages' backends: finds the module, calls it by argument names."""

    module_name: str
    package_name: str
    largest_head_size = 256
    native_head_sizes = False
    """Whether values may have another head size than keys."""
    kernels: tuple[str, str]
    """Names of forward and backward; "{}" stands for what names that of packed documents."""
    forward_extra: ClassVar[dict[str, Any]] = {}
    lse_name = "softmax_lse"
    fills_gradients = True
    """Whether backward fills gradients that it is given, rather than returning them."""
    unlimited: int | None = -1
    """An unlimited window side, in the package's words."""

    @classmethod
    def variants(cls) -> tuple[Callable[[], Backend], ...]:
        """Return variants that leave more or less of heads and documents to the kernel."""
        return with_documents(head_variants(cls, native_sizes=cls.native_head_sizes))

    def __init__(
        self,
        *,
        grouped_heads: bool = True,
        equal_head_sizes: bool = True,
        documents_at_once: bool = True,
        interface: Any = None,
    ) -> None:
        """Make one for `KernelNeeds`; the package is imported at the first call.

        `documents_at_once` lets the kernel handle packed documents in one call; `interface` is the
        module with its functions, None for the installed package's.
        """
        self.needs = KernelNeeds(
            grouped_heads=grouped_heads, head_multiple=8, equal_head_sizes=equal_head_sizes
        )
        self.documents_at_once = documents_at_once
        self._interface = interface

    def reason_unsupported(self, requirement: AttentionSpec) -> str | None:
        """CUDA, 16 bits, head sizes up to 256, and the package must be installed."""
        reason = missing_kernel(
            requirement,
            "cuda",
            HALF_DTYPES,
            largest_head_size=self.largest_head_size,
            softcap=True,
        )
        if reason is not None or self._interface is not None:
            return reason
        return _reason_not_found(self.module_name, self.package_name)

    @property
    def interface(self) -> Any:
        if self._interface is None:
            self._interface = importlib.import_module(self.module_name)
        return self._interface

    def kernel_forward(
        self, q_BCNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, call: KernelCall
    ) -> tuple[Tensor, Tensor]:
        given = {"q": q_BCNH, "k": k_BTKH, "v": v_BTKH, "return_softmax": False}
        out_BCNH, lse_BNC, *_ = self._call(self.kernels[0], given | self.forward_extra, call)
        return out_BCNH, lse_BNC

    def kernel_backward(
        self, given: BackwardInputs, call: KernelCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = given._asdict()
        tensors[self.lse_name] = tensors.pop("lse")
        tensors |= {name: tensors[name].contiguous() for name in ("dout", "out")}
        grads = _empty_gradients(tensors) if self.fills_gradients else {}
        settings = {"deterministic": torch.are_deterministic_algorithms_enabled()}
        returned = self._call(self.kernels[1], tensors | grads | settings, call)
        return (grads["dq"], grads["dk"], grads["dv"]) if grads else returned

    def _call(self, kernel: str, arguments: dict[str, Any], call: KernelCall) -> Any:
        varlen = "" if call.offsets is None else "varlen_"
        function = getattr(self.interface, kernel.format(varlen))
        off = {"dropout_p": 0.0, "alibi_slopes": None}
        return _call(function, arguments | off | _settings(call, self.unlimited))


@register_backend("flash_attention_2", cuda=3)
class FlashAttention2(_FlashAttention):
    """Package flash-attn."""

    module_name = "flash_attn.flash_attn_interface"
    package_name = "flash-attn"
    kernels = "_flash_attn_{}forward", "_flash_attn_{}backward"


@register_backend("flash_attention_3", cuda=1)
class FlashAttention3(_FlashAttention):
    """Package flash-attn-3 (Hopper)."""

    module_name = "flash_attn_interface"
    package_name = "flash-attn-3"
    kernels = "_flash_attn_forward", "_flash_attn_backward"


@register_backend("flash_attention_4", cuda=2)
class FlashAttention4(_FlashAttention):
    """Package flash-attn-4 (CuTe kernels for Hopper and Blackwell)."""

    module_name = "flash_attn.cute.interface"
    package_name = "flash-attn-4"
    kernels = "_flash_attn_fwd", "_flash_attn_bwd"
    native_head_sizes = True
    forward_extra: ClassVar[dict[str, Any]] = {"return_lse": True}
    lse_name = "lse"
    fills_gradients = False
    unlimited = None


_OFFSETS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def _settings(call: KernelCall, unlimited: int | None) -> dict[str, Any]:
    """Return the arguments for mask, scale and soft cap, as the packages name them."""
    left, right = (
        unlimited if side is None else side for side in (call.reach.left, call.reach.right)
    )
    lengths = {} if call.offsets is None else dict(zip(_OFFSETS, call.offsets, strict=True))
    return lengths | {
        "softmax_scale": call.scale,
        "causal": call.reach.causal,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": 0.0 if call.softcap is None else call.softcap,
    }


_OFF: dict[str, tuple[Any, ...]] = {
    "window_size_left": (-1, None),
    # A causal mask says by itself that nothing is seen to the right.
    "window_size_right": (-1, None, 0),
    "softcap": (0.0,),
    "alibi_slopes": (None,),
    "dropout_p": (0.0,),
    "return_softmax": (False,),
    "deterministic": (False,),
}
"""Values that turn a feature off: a release that does not know its name can be called without."""


def _call(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a kernel function by argument names, in whichever release's spelling."""
    known = _parameters(function)
    arguments = dict(arguments)
    if "is_causal" in known and "causal" not in known:
        arguments["is_causal"] = arguments.pop("causal")
    if "window_size" in known and "window_size_left" not in known:
        sides = ("window_size_left", "window_size_right")
        arguments["window_size"] = tuple(arguments.pop(side) for side in sides)
    for name in [name for name in arguments if name not in known]:
        value = arguments.pop(name)
        if name in _OFFSETS[2:]:
            continue  # a release that does not take it computes it from the offsets
        if not any(value is off or value == off for off in _OFF.get(name, ())):
            raise TypeError(f"this release's {_name(function)} does not know {name}={value!r}")
    # Older releases list every argument without defaults; those about caches and the like are off.
    for name, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and name not in arguments:
            arguments[name] = None
    return function(**arguments)


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Parameters of a function, also of one that was wrapped as a custom operator."""
    inner = getattr(function, "_init_fn", function)
    return dict(inspect.signature(inner).parameters)


def _name(function: Callable[..., Any]) -> str:
    return getattr(getattr(function, "_init_fn", function), "__name__", repr(function))


def _empty_gradients(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous buffers for the kernel to fill."""
    return {
        f"d{name}": torch.empty_like(tensors[name], memory_format=torch.contiguous_format)
        for name in ("q", "k", "v")
    }


def _reason_not_found(module_name: str, package_name: str) -> str | None:
    """Return why a package's module cannot be found, None if it can.

    Finding it imports its parent packages. One that was built for other versions of what it needs
    may raise any exception: flash-attn-4 raises AttributeError with another release of CuTe.
    """
    try:
        spec = importlib.util.find_spec(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module_name}.".startswith(f"{missing}."):
            logger.debug("%s cannot be imported", module_name, exc_info=True)
            return f"cannot be imported (package {package_name}; {first_line(error)})"
        spec = None
    return f"is not installed (package {package_name})" if spec is None else None
