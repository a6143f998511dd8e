"""Optional kernels in decoder layers, each compared with the code that it replaces before use.

*Norms and gated activations* (Liger's kernels, or compiled). Eager PyTorch runs a norm or
`act(gate) * up` as several passes over memory; Liger's kernels take one each way. They are used on
CUDA if liger-kernel is installed and each passes a comparison: the norm or MLP runs with the kernel
and with its own code on random values, forward and backward, and takes the kernel only if that is
as near to float32 as its own code. A module that is more than a norm or a gated product (a clamp, a
scale, another activation) fails the comparison.

The instance's `forward` is replaced. What a layer saves then is another profile
(`Training.layer_kernels`), which `like_kernels` makes it possible to trace without a GPU. Kernels
run inside `selective.made_of`, or all matmuls before them would be kept. Not covered: experts,
which have code of their own, and weights that FSDP2 shards.

[Note: a kernel that writes into what it has saved] Liger's gated product writes its gradients over
the gate and up projections that autograd saved for it. That is exact here, because nothing else
saves those two and backward runs once; a norm is told not to write into its gradient, which a
residual shares.

[Note: what is compiled] With `compile: true` the same norms and MLPs are compiled instead. Not the
whole layer: its attention calls back into the engine, and the layer's own hooks would be traced.
Compiled code does not run under a dispatch mode, so no layer saves its matmuls alone, and
recomputation repeats all of them. A module with hooks is not compiled, since they would be compiled
with it. Exact up to rounding: inductor keeps float32 between operations that eager code rounds to
bfloat16.

*Liger's own patches.* With `TrainingArguments(use_liger_kernel=True)` and the like, norms, MLPs and
rotary embedding of the model run Liger's code already. They are left as they are (`runs_liger`).
Liger's functions then say in chunks what they read, as the kernels above do, and run as torch code
in a trace (`watch_liger`, `liger_in_torch`).

*Rotary embedding* (Liger's kernel). Eager PyTorch rotates queries and keys in some ten passes over
memory, forward and backward; a copy and the kernel take two. Attention looks the function up in the
globals of its module, which all models of the family in the process share. So there it is replaced
by one that chooses: in the decoder layers of a model in chunks that uses these kernels it runs
Liger's, if that agrees, and the model's own code everywhere else. The first call with other numbers
of heads, sizes or dtypes compares the two on random values, as for norms. Not covered: functions
that take other arguments, or one tensor at a time (Gemma 3n and 4), and tables for a part of the
head, unless the model's function and this release of Liger's both know them.

[Note: the halves of rotary tables] Liger's kernel reads the left halves of cos and sin, and takes
the right ones to be equal. In the call that compares, the host waits to see whether they are.
Later tables of that model are not read: they come out of the same code.

[Note: rotating copies] Liger's kernel writes over queries and keys, and in backward over their
gradients. Queries may be a matmul's output that is kept for recomputation, and gradients may be
shared, so it gets copies. They are made by `clone`, because dependencies on matmuls are followed by
storage (see `selective`): a clone depends on its source alone, but new memory that torch does not
fill depends on all earlier matmuls, so that outputs of key and value projections would be kept.

*Adapters.* PEFT's LoRA layer returns `base(x) + lora_B(lora_A(x)) * scaling`: the second product,
its scaling and the sum are three passes over an activation as wide as the layer, in forward and in
every rerun, and scaling and the sum of two gradients of x are as many in backward. The product is
added into the base's output instead, in one matmul, and the gradient of x likewise
(`_AdaptedLinear`), which rounds once where PEFT's code rounds three times. Plain LoRA alone: DoRA
and other variants, several adapters in a batch, merged weights, a quantised base layer, adapters of
another dtype than the layer's input, and layers whose parts have hooks run PEFT's code. Under
autocast, adapters in float32, as PEFT makes them, are cast for each product: PEFT copies the whole
input to float32, and autocast copies it back. No package is needed, so this is done on every
device.

*8-bit linear layers.* The autograd functions of bitsandbytes' `Linear8bitLt` keep their input as an
attribute of the graph's node, past autograd's saved tensors, so that it could be neither recomputed
nor offloaded: the inputs of all layers and chunks would stay on the device until backward. Their
backward reads it for the gradient of the weight alone, which an 8-bit weight has not. So it is
dropped as soon as such a layer has run.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import logging
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils import _python_dispatch

from sppo_hf.attention.backends.select import relative_error
from sppo_hf.config import SPPOConfig
from sppo_hf.engine.chunk_context import current
from sppo_hf.engine.model_parts import (
    ModelParts,
    has_hooks,
    own_class,
    referenced_names,
)
from sppo_hf.engine.selective import made_of
from sppo_hf.errors import ConfigError, first_line

logger = logging.getLogger(__name__)

# B batch rows, C tokens of a chunk, M tokens, D model width, F width of the gated product, N query
# heads, K KV heads, H head size, R width of rotary tables (H, or less where a part is rotated).

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that Liger computes in float32; a float64 model would lose digits."""

_SLACK = 1.1
"""Factor by which a kernel may be farther from float32 than the module's own code."""

_ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Maximum relative difference of dtypes that are compared with the module's own code."""

Forward = Callable[..., Any]
"""A module's forward, which gets the module first."""

ResultT = TypeVar("ResultT")

_PROBE_TOKENS = 64
_GATED = {"gate_proj", "up_proj", "down_proj"}
_MARK = "_sppo_layer_kernel"
_SAVING = ("norm", "gated product")
"""Kernels that save other tensors than the code that they replace."""
_COMPILED = "_sppo_compiled"


def prepare_layers(parts: ModelParts, config: SPPOConfig, device: torch.device) -> None:
    """Give decoder layers the kernels of the settings; may be called again.

    Raises:
        ConfigError: `compile` is set, and `torch.compile` does not work here or for this model.
    """
    watch_liger()
    if config.compile:
        compile_layers(parts, device)
    elif config.layer_kernels == "auto":
        use_layer_kernels(parts, device)


def restore_layers(parts: ModelParts) -> None:
    """Restore every module's own code."""
    _rotary.pop(parts.causal_lm, None)
    for module in parts.causal_lm.modules():
        if _mark(module):
            del module.__dict__["forward"]
        if module.__dict__.pop(_COMPILED, False):
            module._compiled_call_impl = None


def compile_layers(parts: ModelParts, device: torch.device) -> None:
    """Compile norms and MLPs of decoder layers; see [Note: what is compiled].

    Raises:
        ConfigError: `torch.compile` does not work here, or FSDP2 shards the model.
    """
    if parts.is_sharded():
        raise ConfigError(
            f"compile=True, but FSDP2 shards {parts.name}, whose hooks would be compiled too. "
            "Allowed: compile without FSDP2. Remedy: drop compile."
        )
    _check_compiler(device)
    for module in filter(_is_candidate, _modules(parts)):
        if module._compiled_call_impl is None and not has_hooks(module):
            # Chunks differ in length; one graph serves all.
            module.compile(dynamic=True)
            module.__dict__[_COMPILED] = True


def _check_compiler(device: torch.device) -> None:
    """Compile something small, forward and backward, to see that it works here."""
    values = torch.ones(4, device=device, requires_grad=True)
    try:
        with torch.enable_grad():
            torch.compile(lambda x: (x * 2).sin().sum())(values).backward()
    # Dynamo, Inductor, Triton and the compiler raise errors of their own.
    except Exception as error:
        reason = first_line(error).rstrip(".")
        raise ConfigError(
            f"compile=True, but torch.compile does not work on {device}: {reason}. Allowed: on a "
            "GPU with Triton, on a CPU with a C++ compiler. Remedy: install it, or drop compile."
        ) from error


def free_inputs_of_8_bit_layers(parts: ModelParts) -> None:
    """Have the 8-bit linear layers of decoder layers drop their inputs once they have run.

    May be called again.
    """
    for module in (module for layer in parts.layers for module in layer.modules()):
        is_8_bit = type(module).__name__ == "Linear8bitLt" and not module.weight.requires_grad
        if is_8_bit and "forward" not in module.__dict__:
            module.__dict__["forward"] = types.MethodType(_forward_without_input, module)


def _forward_without_input(self: Any, x: Tensor) -> Tensor:
    """Run a `Linear8bitLt`, and drop what its node of the graph keeps for the weight's gradient."""
    output: Tensor = type(self).forward(self, x)
    node: Any = output.grad_fn
    if not x.numel():
        return output  # their backward has another branch for no tokens
    if hasattr(node, "tensors"):  # MatMul8bitLt: quantized input, outliers, input
        node.tensors = (None,) * len(node.tensors)
    if hasattr(node, "A"):  # MatMul8bitFp, on a CPU
        node.A = None
    return output


setattr(_forward_without_input, _MARK, "8-bit")


def liger_runs_on(device: torch.device) -> bool:
    """Whether Liger's kernels can run on a device."""
    found = all(importlib.util.find_spec(name) is not None for name in ("liger_kernel", "triton"))
    return device.type == "cuda" and found


def use_layer_kernels(parts: ModelParts, device: torch.device) -> None:
    """Use kernels in modules where they pass the comparison; may be called again.

    That of rotary embedding is compared in the first chunk.
    """
    liger = None
    if liger_runs_on(device):
        use_rotary_kernel(parts, device)
        liger = importlib.import_module("liger_kernel.ops")
    kernels = _Kernels(liger, device)
    for module in () if parts.is_sharded() else _modules(parts):
        forward = None if "forward" in module.__dict__ else kernels.forward_for(module)
        if forward is not None:
            module.__dict__["forward"] = types.MethodType(forward, module)


def _modules(parts: ModelParts) -> Iterator[nn.Module]:
    """Yield all modules of the decoder layers, and the final norm."""
    for root in (*parts.layers, parts.final_norm()):
        if root is not None:
            yield from root.modules()


def _mark(module: nn.Module) -> str:
    """Name of the kernel that a module was given; "" for none."""
    return getattr(module.__dict__.get("forward"), _MARK, "")


def _is_candidate(module: nn.Module) -> bool:
    if "forward" in module.__dict__ or not (_is_norm(module) or _is_gated(module)):
        return False
    if runs_liger(module):
        return False
    weight = next(module.parameters(), None)
    return weight is not None and weight.dtype in _DTYPES and not weight.is_meta


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    named = type(module).__name__.endswith("RMSNorm") and _epsilon(module) is not None
    return named and isinstance(weight, nn.Parameter) and len(list(module.parameters())) == 1


def _is_gated(module: nn.Module) -> bool:
    names = {name for name, _ in module.named_children()}
    return _GATED <= names <= {*_GATED, "act_fn"} and callable(getattr(module, "act_fn", None))


def _epsilon(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def _kind(module: nn.Module) -> tuple[Any, ...]:
    weight = next(module.parameters())
    shapes = tuple(tuple(p.shape) for p in module.parameters())
    act = getattr(module, "act_fn", None)
    settings = getattr(module, "config", None)
    return type(module), type(act), id(settings), _epsilon(module), weight.dtype, shapes


class _Kernels:
    """Forwards with kernels that agree with modules' own code."""

    def __init__(self, liger: Any, device: torch.device) -> None:
        """Compare on `device`; `liger` has Liger's functions, None for adapters alone."""
        self._liger = liger
        self._device = device
        self._found: dict[Hashable, Forward | None] = {}

    def forward_for(self, module: nn.Module) -> Forward | None:
        """Return a forward with the kernel for a module; None if none agrees."""
        adapter = _only_adapter(module)
        if adapter is None and (self._liger is None or not _is_candidate(module)):
            return None
        # Modules of a class with the same settings run the same code: compared once.
        key = _kind(module) if adapter is None else _adapter_kind(module, adapter)
        if key not in self._found:
            keeps = "LoRA layers keep PEFT's code"
            if adapter is None:
                keeps = f"{type(module).__name__} keeps its own code"
            self._found[key] = _tried(keeps, functools.partial(self._find, module, adapter))
        return self._found[key]

    def _find(self, module: nn.Module, adapter: str | None) -> Forward | None:
        if adapter is not None:
            agrees = _adapter_agrees(module, adapter, self._device)
            return _adapted_forward if agrees else None
        if _is_norm(module):
            kernels, agrees, forward = _norms(module, self._liger), _norm_agrees, _norm_forward
        else:
            kernels, agrees, forward = _products(self._liger), _product_agrees, _gated_forward
        found = (kernel for kernel in kernels if agrees(module, kernel, self._device))
        return next(map(forward, found), None)


def _tried(keeps: str, find: Callable[[], ResultT]) -> ResultT | None:
    """Return what a trial finds; None if it fails, with a warning of what `keeps` its own code."""
    try:
        # What is tried is not the layer's work, which modes and hooks watch.
        with (
            _python_dispatch._disable_current_modes(),
            torch.autograd.graph.saved_tensors_hooks(_itself, _itself),
        ):
            return find()
    except Exception as error:  # noqa: BLE001 - a kernel of another release, or no compiler
        logger.warning("%s: the kernel for it failed when tried (%s)", keeps, first_line(error))
        return None


def _norms(module: nn.Module, liger: Any) -> Iterator[Callable[..., Tensor]]:
    epsilon = _epsilon(module)
    for offset, casting in ((0.0, "llama"), (1.0, "gemma"), (0.0, "gemma")):

        def kernel(
            x_MD: Tensor, weight_D: Tensor, offset: float = offset, casting: str = casting
        ) -> Tensor:
            return liger.LigerRMSNormFunction.apply(x_MD, weight_D, epsilon, offset, casting, False)

        yield kernel


def _products(liger: Any) -> Iterator[Callable[..., Tensor]]:
    for function in (liger.LigerSiLUMulFunction, liger.LigerGELUMulFunction):
        yield function.apply


def like_kernels(layers: Sequence[nn.Module]) -> dict[nn.Module, Callable[..., Tensor]]:
    """Return forwards for modules of layers that save what modules with kernels save.

    For tracing what layers save where there is no GPU: torch code in the place of Liger's kernels,
    for the norms and MLPs that pass the same comparison with it. Adapters add in place.
    """
    kernels = _Kernels(_LIKE_LIGER, torch.device("cpu"))
    modules = (module for layer in layers for module in layer.modules())
    forwards = {module: kernels.forward_for(module) for module in modules}
    return {m: types.MethodType(one, m) for m, one in forwards.items() if one is not None}


def saves_like_kernels(parts: ModelParts) -> bool:
    """Whether decoder layers save what those of `like_kernels` do.

    Whether the engine gave them the kernels or Liger's own patch did. False also where a kernel was
    not taken, or only by some of these modules: then layers save more.
    """
    modules = [module for layer in parts.layers for module in layer.modules()]
    if not any(_mark(module) in _SAVING or runs_liger(module) for module in modules):
        return False
    kernels = _Kernels(_LIKE_LIGER, torch.device("cpu"))
    return all(kernels.forward_for(m) is None for m in modules if _is_candidate(m))


def _norm_forward(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != self.weight.dtype:
            # Under autocast: the kernel's result has the input's dtype, that of the module's own
            # code may have the weight's.
            return type(self).forward(self, hidden_states)
        with made_of(hidden_states, self.weight):
            return kernel(hidden_states, self.weight)

    setattr(forward, _MARK, "norm")
    return forward


def _gated_forward(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        # Of adapters on one of them: the kernel's result would have the dtype of the gate. And
        # hooks on the activation see what it gets and returns.
        hooked = isinstance(self.act_fn, nn.Module) and has_hooks(self.act_fn)
        if hooked or gate.dtype != up.dtype:
            product = self.act_fn(gate) * up
        else:
            with made_of(gate, up):
                product = kernel(gate, up)
        return self.down_proj(product)

    setattr(forward, _MARK, "gated product")
    return forward


def _norm_agrees(module: nn.Module, kernel: Callable[..., Tensor], device: torch.device) -> bool:
    weight = module.weight
    assert isinstance(weight, Tensor), "a norm has a weight"

    def own(x_MD: Tensor, weight_D: Tensor) -> Tensor:
        return functional_call(module, {"weight": weight_D}, (x_MD,))

    shapes = ((_PROBE_TOKENS, weight.shape[0]), tuple(weight.shape))
    return _agree(own, kernel, shapes, weight.dtype, device)


def _product_agrees(module: nn.Module, kernel: Callable[..., Tensor], device: torch.device) -> bool:
    """Whether an MLP's elementwise part, between its projections, is what a kernel computes.

    Both in the weights' dtype and in that of the projections under autocast.
    """
    width = getattr(module.gate_proj, "out_features", None)
    if not isinstance(width, int):
        return False
    bare = copy.copy(module)
    bare.__dict__["_modules"] = dict(module._modules)

    def own(gate_MF: Tensor, up_MF: Tensor) -> Tensor:
        bare._modules["gate_proj"] = _Constant(gate_MF)
        bare._modules["up_proj"] = _Constant(up_MF)
        bare._modules["down_proj"] = nn.Identity()
        return type(module).forward(bare, gate_MF)

    shapes = ((_PROBE_TOKENS, width),) * 2
    dtypes = {next(module.parameters()).dtype}
    if torch.is_autocast_enabled(device.type):
        dtypes.add(torch.get_autocast_dtype(device.type))
    return all(_agree(own, kernel, shapes, dtype, device) for dtype in dtypes)


class _Constant(nn.Module):
    """A projection that returns a given output."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, _: Tensor) -> Tensor:
        return self.output


def _agree(
    own: Callable[..., Any],
    kernel: Callable[..., Any],
    shapes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
    output_shapes: tuple[tuple[int, ...], ...] | None = None,
) -> bool:
    """Whether outputs and gradients of a kernel are as near to float32 as those of `own`.

    Both take tensors of `shapes`, and return one of the first shape, or those of `output_shapes`.
    """
    generator = torch.Generator(device).manual_seed(0)
    drawn = [
        torch.randn(s, device=device, generator=generator)
        for s in (*shapes, *(output_shapes or shapes[:1]))
    ]
    values = [value.to(dtype) for value in drawn[: len(shapes)]]
    grads = [grad.to(dtype) for grad in drawn[len(shapes) :]]
    own_results, kernel_results = _run(own, values, grads), _run(kernel, values, grads)
    if dtype in _ROUNDING:
        pairs = zip(own_results, kernel_results, strict=True)
        return all(relative_error(b, a) <= _ROUNDING[dtype] for a, b in pairs)
    exact = _run(own, [value.float() for value in values], [grad.float() for grad in grads])
    slack = torch.finfo(dtype).eps / 16
    return all(
        b.dtype == a.dtype and relative_error(b, e) <= _SLACK * relative_error(a, e) + slack
        for a, b, e in zip(own_results, kernel_results, exact, strict=True)
    )


def _run(
    function: Callable[..., Any], values: Sequence[Tensor], grads: Sequence[Tensor]
) -> list[Tensor]:
    leaves = [value.clone().requires_grad_() for value in values]
    with torch.enable_grad():
        # Not the leaves themselves: a kernel may write into what it saves.
        made = function(*(leaf * 1 for leaf in leaves))
        outputs = (made,) if isinstance(made, Tensor) else tuple(made)
        # Copies: a kernel may write into them too.
        gradients = torch.autograd.grad(outputs, leaves, [grad.clone() for grad in grads])
    return [*(output.detach() for output in outputs), *gradients]


# -- in the kernels' place ----------------------------------------------------------------------


def _for_all_inputs(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of the first inputs; releases of Liger differ in how many settings follow."""
    return *grads, *(None,) * (len(ctx.needs_input_grad) - len(grads))


class _NormLikeLiger(torch.autograd.Function):
    """`LigerRMSNormFunction` in torch code: saves the input and the root's reciprocal."""

    @staticmethod
    def forward(
        ctx: Any, x_MD: Tensor, weight_D: Tensor, eps: float, offset: float, *_: Any
    ) -> Tensor:
        x_MD = x_MD.contiguous()
        scale_M1 = torch.rsqrt(x_MD.float().pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x_MD, weight_D, scale_M1)
        ctx.offset = offset
        return (x_MD.float() * scale_M1 * (weight_D.float() + offset)).to(x_MD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_MD, weight_D, scale_M1 = ctx.saved_tensors
        normed_MD, grad_MD = x_MD.float() * scale_M1, grads[0].float()
        scaled_MD = grad_MD * (weight_D.float() + ctx.offset)
        dx_MD = scaled_MD - normed_MD * (scaled_MD * normed_MD).mean(-1, keepdim=True)
        dweight_D = (grad_MD * normed_MD).flatten(0, -2).sum(0)
        dx_MD = (dx_MD * scale_M1).to(x_MD.dtype)
        return _for_all_inputs(ctx, dx_MD, dweight_D.to(weight_D.dtype))


def _gated_like_liger(activation: Callable[..., Tensor], derivative: Callable[..., Tensor]) -> Any:
    """Make one of Liger's gated products in torch code: saves gate and up projection."""

    class GatedLikeLiger(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate_MF: Tensor, up_MF: Tensor, *_: Any) -> Tensor:
            gate_MF, up_MF = gate_MF.contiguous(), up_MF.contiguous()  # halves of one matmul
            ctx.save_for_backward(gate_MF, up_MF)
            return (activation(gate_MF.float()) * up_MF.float()).to(gate_MF.dtype)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            gate_MF, up_MF = (saved.float() for saved in ctx.saved_tensors)
            grad_MF, dtype = grads[0].float(), grads[0].dtype
            dgate_MF = derivative(grad_MF * up_MF, gate_MF).to(dtype)
            return _for_all_inputs(ctx, dgate_MF, (grad_MF * activation(gate_MF)).to(dtype))

    return GatedLikeLiger


_LIKE_LIGER = types.SimpleNamespace(
    LigerRMSNormFunction=_NormLikeLiger,
    LigerSiLUMulFunction=_gated_like_liger(F.silu, torch.ops.aten.silu_backward),
    LigerGELUMulFunction=_gated_like_liger(
        functools.partial(F.gelu, approximate="tanh"),
        functools.partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    ),
)


# -- Liger's own patches -----------------------------------------------------------------------


def runs_liger(module: nn.Module) -> bool:
    """Whether a module runs code of Liger's, by its class or by a forward put into it."""
    return _is_ligers(getattr(module.forward, "__func__", None))


def builds_with_liger(model_class: type) -> bool:
    """Whether Liger has replaced classes or functions of which a model class is made."""
    return any(map(_is_ligers, list(module_globals(model_class).values())))


def _is_ligers(code: Any) -> bool:
    return str(getattr(code, "__module__", "")).partition(".")[0] == "liger_kernel"


class _RotaryLikeLiger(torch.autograd.Function):
    """`LigerRopeFunction` in torch code: saves the tables."""

    @staticmethod
    def forward(
        ctx: Any, q_BNCH: Tensor, k_BKCH: Tensor, cos_BCR: Tensor, sin_BCR: Tensor, *settings: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos_BCR, sin_BCR)
        # Behind positions and a dim; given where tables are half as wide as what they rotate.
        width = settings[2] if len(settings) > 2 else None
        ctx.half = (width or min(cos_BCR.shape[-1], q_BNCH.shape[-1])) // 2
        q_BNCH, k_BKCH = (_rotate(x, cos_BCR, sin_BCR, ctx.half) for x in (q_BNCH, k_BKCH))
        return q_BNCH, k_BKCH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos_BCR, sin_BCR = ctx.saved_tensors
        return _for_all_inputs(ctx, *(_rotate(x, cos_BCR, -sin_BCR, ctx.half) for x in grads))


def _rotate(x_BNCH: Tensor, cos_BCR: Tensor, sin_BCR: Tensor, half: int) -> Tensor:
    x_BCNH = x_BNCH.transpose(1, 2)  # the layout of the result, as of Liger's
    cos, sin = (table[..., None, :half] for table in (cos_BCR, sin_BCR))
    left, right, rest = x_BCNH.split((half, half, x_BCNH.shape[-1] - 2 * half), -1)
    turned_BCNH = torch.cat((left * cos - right * sin, right * cos + left * sin, rest), -1)
    return turned_BCNH.to(x_BNCH.dtype).transpose(1, 2)


class _CopyLikeLiger(torch.autograd.Function):
    """Liger's other rotary embeddings but for the values: saves the tables."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, *tables: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*(table for table in tables if isinstance(table, Tensor)))
        return q.clone(), k.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _for_all_inputs(ctx, *(grad.clone() for grad in grads))


class _ExpertsLikeLiger(torch.autograd.Function):
    """`LigerFusedMoEFunction` but for the values: all tokens take the first expert.

    Its products are convolutions, since no rerun can keep what runs within a kernel, while a
    matmul's output would be kept. They are in the dtype of `x`, under autocast too.
    """

    @staticmethod
    def forward(
        ctx: Any, x_MD: Tensor, up_EGD: Tensor, down_EDF: Tensor, chosen_MK: Tensor, weights: Tensor
    ) -> Tensor:
        tokens, choices = chosen_MK.shape
        routes = torch.zeros(3, tokens * choices, dtype=torch.int32, device=x_MD.device)
        gathered_ND = x_MD.repeat_interleave(choices, 0)
        with torch.autocast(x_MD.device.type, enabled=False):
            both_NG = _product_in_kernel(gathered_ND, up_EGD[0])
            gate_NF, up_NF = both_NG.chunk(2, -1)
            made_ND = _product_in_kernel(F.silu(gate_NF) * up_NF, down_EDF[0])
        weights_N = weights.flatten().contiguous()
        ctx.save_for_backward(x_MD, up_EGD, down_EDF, both_NG, weights_N, routes)
        return made_ND.view(tokens, choices, -1).sum(1).to(x_MD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_MD, up_EGD, down_EDF, both_NG, weights_N, _ = ctx.saved_tensors
        choices, needed = len(weights_N) // len(x_MD), ctx.needs_input_grad
        grad_ND = grads[0].repeat_interleave(choices, 0)
        gate_NF, up_NF = both_NG.chunk(2, -1)
        dup_EGD = ddown_EDF = None
        dproduct_NF = grad_ND @ down_EDF[0]
        dboth_NG = torch.cat((dproduct_NF * up_NF, dproduct_NF * gate_NF), -1)
        dx_MD = (dboth_NG @ up_EGD[0]).view(len(x_MD), choices, -1).sum(1)
        if needed[1]:
            dup_EGD = (dboth_NG.t() @ x_MD.repeat_interleave(choices, 0)).expand_as(up_EGD)
        if needed[2]:
            ddown_EDF = (grad_ND.t() @ (F.silu(gate_NF) * up_NF)).expand_as(down_EDF)
        return dx_MD, dup_EGD, ddown_EDF, None, weights_N.view(len(x_MD), choices)


def _product_in_kernel(x_ND: Tensor, weight_GD: Tensor) -> Tensor:
    return F.conv1d(x_ND[..., None], weight_GD[..., None].to(x_ND.dtype)).squeeze(-1)


_IN_TORCH: dict[str, Callable[..., Any]] = {
    "LigerFusedMoEFunction": _ExpertsLikeLiger.apply,
    # Torch saves the same of these.
    "LigerLayerNormFunction": lambda x, w, b, eps: F.layer_norm(x, x.shape[-1:], w, b, eps),
    "LigerReLUSquaredFunction": lambda x: F.relu(x).square(),
    "LigerRopeFunction": _RotaryLikeLiger.apply,
    "LigerQwen2VLMRopeFunction": _CopyLikeLiger.apply,
    "LigerLlama4RopeFunction": _CopyLikeLiger.apply,
    **{name: function.apply for name, function in vars(_LIKE_LIGER).items()},
}
"""By the name of one of Liger's functions that its patches put into layers: torch code that saves
what it saves."""

_in_torch: ContextVar[bool] = ContextVar("sppo_hf.liger_in_torch", default=False)


@contextlib.contextmanager
def liger_in_torch() -> Iterator[None]:
    """Context in which Liger's functions run as torch code that saves the same, on any tensors.

    For traces and tiny copies of models with Liger's own patches: their tensors are on no GPU.
    """
    watch_liger()
    token = _in_torch.set(True)
    try:
        yield
    finally:
        _in_torch.reset(token)


def watch_liger() -> None:
    """Have Liger's functions say what they read (`made_of`); may be called again.

    Modules that Liger's own patches have changed call them. Nothing is done unless they are
    imported.
    """
    for name, function in list(vars(sys.modules.get("liger_kernel.ops", object)).items()):
        is_function = isinstance(function, type) and issubclass(function, torch.autograd.Function)
        # A class has an `apply` of its own only here.
        if is_function and "apply" not in vars(function):
            function.apply = functools.partial(_apply_watched, function, _IN_TORCH.get(name))


def _apply_watched(function: Any, in_torch: Callable[..., Any] | None, *args: Any) -> Any:
    if in_torch is not None and _in_torch.get():
        return in_torch(*args)
    with made_of(*(value for value in args if isinstance(value, Tensor))):
        return super(function, function).apply(*args)


# -- adapters ----------------------------------------------------------------------------------


def _only_adapter(module: Any) -> str | None:
    """Name of the adapter of a plain LoRA layer with one; None for other modules and states."""
    kind = type(module)
    if kind.__name__ != "Linear" or not kind.__module__.startswith("peft.tuners.lora."):
        return None
    names: list[str] = module.active_adapters
    if module.disable_adapters or module.merged or len(names) != 1:
        return None
    (name,) = names
    if name not in module.lora_A or name in module.lora_variant:
        return None
    parts = module.base_layer, module.lora_A[name], module.lora_B[name]
    # Their weights are used; they themselves are not called, nor are hooks. Other stages' are meta.
    bare = all(
        type(part) is nn.Linear
        and type(part.weight) in (Tensor, nn.Parameter, FakeTensor)
        and not part.weight.is_meta
        and "forward" not in part.__dict__
        and not has_hooks(part)
        for part in parts
    )
    return name if bare and parts[1].bias is parts[2].bias is None else None


def _adapted_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Forward of a LoRA layer: x [..., D] to [..., F]."""
    name = None if args or kwargs else _only_adapter(self)
    if name is None or x.dim() < 2:
        return type(self).forward(self, x, *args, **kwargs)
    base, dropout = self.base_layer, self.lora_dropout[name]
    factors = self.lora_A[name].weight, self.lora_B[name].weight
    autocast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
    # PEFT's dropout is of a copy in float32, for which it draws another mask than for the input.
    wide = torch.float32 if autocast and type(dropout) is nn.Identity else dtype
    if not dtype == x.dtype == base.weight.dtype or {f.dtype for f in factors} - {dtype, wide}:
        return type(self).forward(self, x)
    x_MD = x.flatten(0, -2)
    dropped_MD = dropout(x_MD)
    sum_MF: Tensor = _AdaptedLinear.apply(
        *(x_MD, None if dropped_MD is x_MD else dropped_MD),
        *(base.weight, base.bias, *factors, self.scaling[name]),
    )
    return sum_MF.view(*x.shape[:-1], sum_MF.shape[-1])


setattr(_adapted_forward, _MARK, "adapter")


class _AdaptedLinear(torch.autograd.Function):
    """A linear layer of `x` plus its adapter's two products of `x`, or of `x` after dropout."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MD: Tensor,
        dropped_MD: Tensor | None,
        weight_FD: Tensor,
        bias_F: Tensor | None,
        first_RD: Tensor,
        second_FR: Tensor,
        scaling: float,
    ) -> Tensor:
        sum_MF = F.linear(x_MD, weight_FD, bias_F)
        input_MD = x_MD if dropped_MD is None else dropped_MD
        inner_MR = F.linear(input_MD, first_RD.to(x_MD.dtype))
        of_weight = (x_MD,) if ctx.needs_input_grad[2] and dropped_MD is not None else ()
        ctx.save_for_backward(input_MD, inner_MR, weight_FD, first_RD, second_FR, *of_weight)
        ctx.scaling, ctx.drops = scaling, dropped_MD is not None
        return sum_MF.addmm_(inner_MR, second_FR.to(x_MD.dtype).t(), alpha=scaling)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_MF,), needed = grads, ctx.needs_input_grad
        input_MD, inner_MR, weight_FD, first_RD, second_FR, *of_weight = ctx.saved_tensors
        dinner_MR = (grad_MF @ second_FR.to(grad_MF.dtype)).mul_(ctx.scaling)
        narrow_RD = first_RD.to(grad_MF.dtype)
        dx_MD = grad_MF @ weight_FD if needed[0] else None
        ddropped_MD = None
        if ctx.drops:
            ddropped_MD = dinner_MR @ narrow_RD if needed[1] else None
        elif dx_MD is not None:
            dx_MD.addmm_(dinner_MR, narrow_RD)
        return (
            dx_MD,
            ddropped_MD,
            grad_MF.t() @ (of_weight or [input_MD])[0] if needed[2] else None,
            grad_MF.sum(0) if needed[3] else None,
            (dinner_MR.t() @ input_MD).to(first_RD.dtype) if needed[4] else None,
            (grad_MF.t() @ inner_MR).mul_(ctx.scaling).to(second_FR.dtype) if needed[5] else None,
            None,
        )


_PROBE_SIZES = (48, 8, 32)
"""D, R and F of the layer with which PEFT's code is compared; it is the same code at any size."""


def _adapter_dtypes(module: Any, name: str) -> tuple[torch.dtype, ...]:
    """Dtypes of the base layer and of both factors."""
    layers = module.base_layer, module.lora_A[name], module.lora_B[name]
    return tuple(layer.weight.dtype for layer in layers)


def _runs_under_autocast(module: Any, name: str) -> bool:
    """Whether factors are float32, and the base layer what autocast makes of them."""
    dtype, *others = _adapter_dtypes(module, name)
    return dtype in (torch.bfloat16, torch.float16) and {*others} == {torch.float32}


def _adapter_kind(module: Any, name: str) -> tuple[Any, ...]:
    has_bias = module.base_layer.bias is not None
    return type(module), _adapter_dtypes(module, name), has_bias, module.scaling[name]


def _adapter_agrees(module: Any, name: str, device: torch.device) -> bool:
    """Whether a LoRA layer computes what `_AdaptedLinear` does."""
    dtype, *others = _adapter_dtypes(module, name)
    under_autocast = _runs_under_autocast(module, name)
    if {*others} != {dtype} and not under_autocast:
        return False
    has_bias = module.base_layer.bias is not None
    inputs, rank, outputs = _PROBE_SIZES
    bare = copy.copy(module)
    bare.__dict__["_modules"] = dict(module._modules)
    with torch.device("meta"):
        bare._modules["base_layer"] = nn.Linear(inputs, outputs, bias=has_bias)
        for key, sizes in (("lora_A", (inputs, rank)), ("lora_B", (rank, outputs))):
            bare._modules[key] = nn.ModuleDict({name: nn.Linear(*sizes, bias=False)})
    # A new random mask in every run could not be compared.
    bare._modules["lora_dropout"] = nn.ModuleDict({name: nn.Identity()})

    def run(forward: Callable[..., Tensor], x_MD: Tensor, *weights: Tensor) -> Tensor:
        names = ("lora_A.{}.weight", "lora_B.{}.weight", "base_layer.weight", "base_layer.bias")
        values = dict(zip((key.format(name) for key in names), weights, strict=False))
        bare.__dict__["forward"] = types.MethodType(forward, bare)
        narrow = under_autocast and x_MD.dtype == dtype
        if narrow:
            values |= {key: value.float() for key, value in values.items() if "lora_" in key}
        with torch.autocast(device.type, dtype if narrow else None, enabled=narrow):
            return functional_call(bare, values, (x_MD,))

    shapes = ((_PROBE_TOKENS, inputs), (rank, inputs), (outputs, rank), (outputs, inputs))
    shapes += ((outputs,),) * has_bias
    own, kernel = (functools.partial(run, f) for f in (type(module).forward, _adapted_forward))
    with torch.autocast(device.type, enabled=False):
        return _agree(own, kernel, shapes, dtype, device, ((_PROBE_TOKENS, outputs),))


# -- functions that attention and mixers look up in their module -------------------------------

_CHOICE_MARK = "_sppo_chooses"

Choose = Callable[[tuple[Any, ...], dict[str, Any]], Callable[..., Any] | None]
"""Given the arguments of a call, returns what runs instead of the function; None if that runs."""


def module_globals(module_class: type[nn.Module]) -> dict[str, Any]:
    """Return the names of the Python module that a class is defined in."""
    return vars(sys.modules[module_class.__module__])


def replace_by_choice(names: dict[str, Any], name: str, choose: Choose) -> None:
    """Replace a global function by one that asks `choose` at every call, unless this was done."""
    function = names[name]
    if hasattr(function, _CHOICE_MARK):
        return

    @functools.wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        other = choose(args, kwargs)
        return (function if other is None else other)(*args, **kwargs)

    setattr(chosen, _CHOICE_MARK, True)
    names[name] = chosen


# -- rotary embedding --------------------------------------------------------------------------

_ROTARY_ARGUMENTS = ["q", "k", "cos", "sin"]


def use_rotary_kernel(parts: ModelParts, device: torch.device) -> None:
    """Use Liger's rotary embedding in chunks of a model, where it agrees; may be called again."""
    try:
        liger = importlib.import_module("liger_kernel.ops.rope")
        forward, backward = liger.rope_forward, liger.rope_backward
    except (ImportError, AttributeError):
        return  # another release
    _rotary.setdefault(parts.causal_lm, _RotaryKernel(forward, backward, device))
    classes = {own_class(module) for layer in parts.layers for module in layer.modules()}
    for kind in {base for each in classes for base in each.__mro__}:
        if kind.__module__ not in sys.modules:
            continue  # of code that was generated
        names = module_globals(kind)
        for name in sorted(referenced_names(kind) & names.keys()):
            if _is_rotary(names[name]):
                choose = functools.partial(_choose_rotary, names[name], (kind.__module__, name))
                replace_by_choice(names, name, choose)


def _is_rotary(function: Any) -> bool:
    """Whether a function takes queries, keys and rotary tables, by the names of its arguments."""
    # The package `kernels` makes modules of functions.
    code = function.forward if isinstance(function, nn.Module) else function
    if not inspect.isroutine(code):
        return False
    try:
        return list(inspect.signature(code).parameters)[:4] == _ROTARY_ARGUMENTS
    except (TypeError, ValueError):
        return False


def _choose_rotary(
    own: Callable[..., Any], place: tuple[str, str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any] | None:
    """Return the kernel if the running model takes it for such arguments."""
    # First, as compilers cannot trace the rest.
    if torch.compiler.is_compiling() or len(args) != 4 or kwargs not in ({}, {"unsqueeze_dim": 1}):
        return None
    context = current()
    if context is None or context.layer is None:
        return None
    kernel = _rotary.get(context.model.causal_lm)
    if kernel is None or not kernel.can_run(*args):
        return None
    # Reruns do what the first forward did, and have no runner.
    return kernel if kernel.agrees(own, place, args, may_try=context.runner is not None) else None


class _RotaryKernel:
    """Liger's rotary embedding for a model, and where it agrees with the model's own code."""

    def __init__(
        self, forward: Callable[..., Any], backward: Callable[..., Any], device: torch.device
    ) -> None:
        self._forward = forward
        self._backward = backward
        self._device_type = device.type
        self._takes_parts = "rotary_dim" in inspect.signature(forward).parameters
        self._verdicts: dict[Hashable, bool] = {}

    def __call__(
        self, q_BNCH: Tensor, k_BKCH: Tensor, cos_BCR: Tensor, sin_BCR: Tensor, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Return q and k, rotated; they have the memory layout `[B, C, heads, H]`."""
        q_BCNH, k_BCKH = _Rotated.apply(
            *(q_BNCH.transpose(1, 2), k_BKCH.transpose(1, 2), cos_BCR, sin_BCR),
            *(self._forward, self._backward),
        )
        return q_BCNH.transpose(1, 2), k_BCKH.transpose(1, 2)

    def can_run(self, q_BNCH: Any, k_BKCH: Any, cos_BCR: Any, sin_BCR: Any) -> bool:
        """Whether the kernel knows such tensors; fake ones it does not."""
        tensors = q_BNCH, k_BKCH, cos_BCR, sin_BCR
        if any(type(x) is not Tensor or x.device.type != self._device_type for x in tensors):
            return False
        if not q_BNCH.dim() == k_BKCH.dim() == 4 or cos_BCR.dim() != 3:
            return False
        rows, _, tokens, size = q_BNCH.shape
        width = cos_BCR.shape[2]
        return (
            q_BNCH.dtype in _DTYPES
            and q_BNCH.dtype == k_BKCH.dtype
            and q_BNCH.numel() > 0
            and k_BKCH.numel() > 0
            and tokens > 1  # the first token's tables would tell nothing about others
            and (rows, tokens, size) == (k_BKCH.shape[0], *k_BKCH.shape[2:])
            and cos_BCR.shape == sin_BCR.shape
            and cos_BCR.dtype == sin_BCR.dtype
            and cos_BCR.shape[0] in (1, rows)
            and cos_BCR.shape[1] == tokens
            and width % 2 == 0
            and (width == size or (width < size and self._takes_parts))
            and not (cos_BCR.requires_grad or sin_BCR.requires_grad)
        )

    def agrees(
        self,
        own: Callable[..., Any],
        place: tuple[str, str],
        args: tuple[Tensor, Tensor, Tensor, Tensor],
        *,
        may_try: bool,
    ) -> bool:
        """Whether the kernel computes what `own` does, the function at `place`.

        Tried once for numbers of heads, sizes and dtypes; False if it was not and may not be.
        """
        q_BNCH, k_BKCH, cos_BCR, _ = args
        heads, tables = (q_BNCH.shape[1], k_BKCH.shape[1]), cos_BCR.shape
        key = place, heads, q_BNCH.shape[3], q_BNCH.dtype, tables[0] == 1, tables[2], cos_BCR.dtype
        if key not in self._verdicts:
            if not may_try:
                return False
            agrees = functools.partial(self._agrees, own, *args)
            keeps = "Rotary embedding keeps the model's own code"
            self._verdicts[key] = bool(_tried(keeps, agrees))
        return self._verdicts[key]

    @torch.inference_mode(False)
    def _agrees(self, own: Callable[..., Any], *args: Tensor) -> bool:
        with torch.autocast(self._device_type, enabled=False):
            return _halves_are_equal(*args[2:]) and self._computes(own, *args)

    def _computes(
        self, own: Callable[..., Any], q_BNCH: Tensor, k_BKCH: Tensor, cos_BCR: Tensor, _: Tensor
    ) -> bool:
        """Whether the kernel computes what `own` does on random values of such shapes."""
        dtype, device = q_BNCH.dtype, q_BNCH.device
        generator = torch.Generator(device).manual_seed(1)
        rows, width = min(cos_BCR.shape[0], 2), cos_BCR.shape[2]
        half = torch.randn(rows, _PROBE_TOKENS, width // 2, device=device, generator=generator)
        angles = 3 * torch.cat((half, half), dim=-1)
        tables = angles.cos().to(cos_BCR.dtype), angles.sin().to(cos_BCR.dtype)

        def in_dtype_of(q: Tensor) -> Iterator[Tensor]:
            return (table if q.dtype == dtype else table.to(q.dtype) for table in tables)

        shapes = tuple((2, x.shape[1], _PROBE_TOKENS, x.shape[3]) for x in (q_BNCH, k_BKCH))
        return _agree(
            lambda q, k: own(q, k, *in_dtype_of(q)),
            lambda q, k: self(q, k, *in_dtype_of(q)),
            *(shapes, dtype, device, shapes),
        )


def _halves_are_equal(cos_BCR: Tensor, sin_BCR: Tensor) -> bool:
    """See [Note: the halves of rotary tables]; False also for tables that rotate nothing."""
    halves = torch.stack((cos_BCR, sin_BCR)).chunk(2, dim=-1)
    return torch.equal(*halves) and bool(sin_BCR.any())


class _Rotated(torch.autograd.Function):
    """Queries `[B, C, N, H]` and keys `[B, C, K, H]`, rotated by Liger's kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BCNH: Tensor,
        k_BCKH: Tensor,
        cos_BCR: Tensor,
        sin_BCR: Tensor,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos_BCR, sin_BCR)
        ctx.kernel = backward
        return _rotated_copies(forward, q_BCNH, k_BCKH, cos_BCR, sin_BCR)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_rotated_copies(ctx.kernel, *grads, *ctx.saved_tensors), None, None, None, None


def _rotated_copies(
    kernel: Callable[..., Any], q_BCNH: Tensor, k_BCKH: Tensor, cos_BCR: Tensor, sin_BCR: Tensor
) -> tuple[Tensor, Tensor]:
    """Run a kernel that rotates in place on copies; see [Note: rotating copies]."""
    # In the layout in which it reads memory, or it would make copies of its own.
    q_BCNH = q_BCNH.clone(memory_format=torch.contiguous_format)
    k_BCKH = k_BCKH.clone(memory_format=torch.contiguous_format)
    kernel(q_BCNH.transpose(1, 2), k_BCKH.transpose(1, 2), cos_BCR, sin_BCR)
    return q_BCNH, k_BCKH


def _itself(tensor: Tensor) -> Tensor:
    return tensor


_rotary: weakref.WeakKeyDictionary[nn.Module, _RotaryKernel] = weakref.WeakKeyDictionary()
"""By causal language model: the kernel, where the model's layers use kernels."""
