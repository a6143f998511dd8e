"""Optional kernels in decoder layers, each tried beside the code that it stands for.

*Norms and gated activations* (Liger's, or compiled). Eager PyTorch runs a norm or `act(gate) * up`
as several passes over memory; Liger's kernels take one each way. They are used on CUDA where liger-
kernel is installed, and nothing is believed: each norm, and each MLP, is tried beside its own code
on random values, forward and backward, and keeps its own code unless the kernel is as near to
float32 as that is. A module that is more than a plain norm or a plain gated product (a clamp, a
scale, another activation) fails that comparison.

What is replaced is `forward` on the instance. Not covered: rotary embedding, which Transformers'
attention takes from its file's globals, so that replacing it would change every model of that
family in the process; experts, which have code of their own; and weights that FSDP2 shards.

[Note: a kernel that writes into what it has saved] Liger's gated product writes its gradients over
the gate and the up projection that autograd saved for it. That is exact here, because those two are
saved by no one else and a backward runs once; a norm is asked not to write into its gradient, which
a residual shares.

[Note: what is compiled] With `compile: true` the same norms and MLPs are compiled instead. Not the
whole layer: its attention calls back into the engine, and the layer's own hooks would be traced.
Compiled code runs in eager mode beside a dispatch mode, so no layer keeps its matrix products
alone, and recomputation repeats all of them. A module with hooks stays as it is, for they would be
compiled with it. Exact up to rounding: inductor keeps float32 between operations that eager code
rounds to bfloat16.

*Mixers.* Transformers takes the scan and the convolution of a mixer from flash-linear-attention,
mamba-ssm or causal-conv1d where they are installed, and from torch code of its own elsewhere.
Chunks ask more of a kernel than training without chunks: it begins with a state from before and
hands one on, and gradients flow through both. So each is tried beside the torch code before the
first step, on two chunks of random values, forward and backward, on the device where the model
runs. One that fails or differs is named in a warning, and mixers take the torch code in its place.
The choice is made where the mixer looks the function up, among the globals of its file. It holds in
chunks alone: a model that is not converted runs as it did before.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import inspect
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sppo_hf.attention.backends.select import TOLERANCE, relative_error
from sppo_hf.config import SPPOConfig
from sppo_hf.engine.chunk_context import ChunkContext, current
from sppo_hf.engine.recurrent_state import LayerStates, StateCache
from sppo_hf.engine.structure import ModelParts, mixers_of, referenced_names
from sppo_hf.errors import ConfigError, first_line

logger = logging.getLogger(__name__)

# B batch rows, C tokens of a chunk, M tokens, D model width, F width of the gated product.

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What Liger computes with float32 inside; a float64 model would lose digits."""

_SLACK = 1.1
"""How much farther from float32 a kernel may be than the module's own code."""

_ROUNDING = {torch.float32: 1e-5}
"""Where the module's own code is the measure: the largest relative difference."""

_PROBE_TOKENS = 64
_GATED = {"gate_proj", "up_proj", "down_proj"}
_MARK = "_sppo_layer_kernel"
_COMPILED = "_sppo_compiled"


def prepare_layers(parts: ModelParts, config: SPPOConfig, device: torch.device) -> None:
    """Give norms and MLPs the kernels that the settings ask for; again is fine.

    Raises:
        ConfigError: They are to be compiled, and `torch.compile` does not work here or for this
            model.
    """
    if config.compile:
        compile_layers(parts, device)
    elif config.layer_kernels == "auto":
        use_layer_kernels(parts, device)


def restore_layers(parts: ModelParts) -> None:
    """Give every module its own code back."""
    for module in parts.causal_lm.modules():
        if hasattr(getattr(module.__dict__.get("forward"), "__func__", None), _MARK):
            del module.__dict__["forward"]
        if module.__dict__.pop(_COMPILED, False):
            module._compiled_call_impl = None


def compile_layers(parts: ModelParts, device: torch.device) -> int:
    """Compile norms and MLPs of decoder layers; see [Note: what is compiled].

    Returns:
        How many modules are compiled now.

    Raises:
        ConfigError: `torch.compile` does not work here, or FSDP2 shards the model.
    """
    if parts.is_sharded():
        raise ConfigError(
            f"compile=True, but FSDP2 shards {parts.name}, whose hooks would be compiled too. "
            "Allowed: compile without FSDP2. Remedy: drop compile."
        )
    _refuse_without_compiler(device)
    count = 0
    for module in _candidates(parts):
        hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        if module._compiled_call_impl is None and not hooked:
            # Chunks differ in length; one graph serves all.
            module.compile(dynamic=True)
            module.__dict__[_COMPILED] = True
        count += _COMPILED in module.__dict__
    return count


def _refuse_without_compiler(device: torch.device) -> None:
    """Compile something small, forward and backward, before a model is changed."""
    values = torch.ones(4, device=device, requires_grad=True)
    try:
        with torch.enable_grad():
            torch.compile(lambda x: (x * 2).sin().sum())(values).backward()
    # Of Dynamo, Inductor, Triton or whatever runs the compiler, each with its own.
    except Exception as error:
        reason = first_line(error).rstrip(".")
        raise ConfigError(
            f"compile=True, but torch.compile does not work on {device}: {reason}. Allowed: on a "
            "GPU with Triton, on a CPU with a C++ compiler. Remedy: install it, or drop compile."
        ) from error


def liger_runs_on(device: torch.device) -> bool:
    """Whether Liger's kernels can be tried on a device."""
    found = all(importlib.util.find_spec(name) is not None for name in ("liger_kernel", "triton"))
    return device.type == "cuda" and found


def use_layer_kernels(parts: ModelParts, device: torch.device) -> dict[str, int]:
    """Put Liger's kernels where they are proven equal; again is fine.

    Returns:
        How many modules take a kernel, by the kernel's name.
    """
    counts: dict[str, int] = {}
    if parts.is_sharded() or not liger_runs_on(device):
        return counts
    from liger_kernel import ops  # type: ignore[import-not-found]

    proven: dict[Any, Callable[..., Tensor] | None] = {}
    for module in _candidates(parts):
        # Modules of a class with the same settings run the same code: tried once.
        key = _kind(module)
        if key not in proven:
            proven[key] = _find_kernel(module, ops, device)
        forward = proven[key]
        if forward is not None:
            module.__dict__["forward"] = types.MethodType(forward, module)
            counts[getattr(forward, _MARK)] = counts.get(getattr(forward, _MARK), 0) + 1
    return counts


def _candidates(parts: ModelParts) -> Iterator[nn.Module]:
    """Yield norms and MLPs that run their class's own forward, of layers and behind them."""
    roots = [*parts.layers, parts.final_norm()]
    for root in (root for root in roots if root is not None):
        for module in root.modules():
            plain = "forward" not in module.__dict__ and (_is_norm(module) or _is_gated(module))
            weight = next(module.parameters(), None)
            if plain and weight is not None and weight.dtype in _DTYPES and not weight.is_meta:
                yield module


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


def _find_kernel(module: nn.Module, ops: Any, device: torch.device) -> Callable[..., Tensor] | None:
    """Return the first kernel that does what a module does, as a forward for it."""
    found = _norms(module, ops) if _is_norm(module) else _gated_products(ops)
    try:
        for name, kernel in found:
            if _is_norm(module):
                good, forward = _norm_agrees(module, kernel, device), _norm_forward(kernel)
            else:
                good, forward = _product_agrees(module, kernel, device), _gated_forward(kernel)
            if good:
                setattr(forward, _MARK, name)
                return forward
    except Exception as error:  # noqa: BLE001 - kernels of another release, or no compiler
        logger.warning(
            "%s keeps its own code: Liger's kernel for it failed when tried (%s)",
            type(module).__name__,
            first_line(error),
        )
    return None


def _norms(module: nn.Module, ops: Any) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    epsilon = _epsilon(module)
    for offset, casting in ((0.0, "llama"), (1.0, "gemma"), (0.0, "gemma")):

        def kernel(
            x_MD: Tensor, weight_D: Tensor, offset: float = offset, casting: str = casting
        ) -> Tensor:
            return ops.LigerRMSNormFunction.apply(x_MD, weight_D, epsilon, offset, casting, False)

        yield "norm", kernel


def _gated_products(ops: Any) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    for function in (ops.LigerSiLUMulFunction, ops.LigerGELUMulFunction):
        yield "gated product", function.apply


def _norm_forward(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return kernel(hidden_states, self.weight)

    return forward


def _gated_forward(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(kernel(self.gate_proj(x), self.up_proj(x)))

    return forward


def _norm_agrees(module: nn.Module, kernel: Callable[..., Tensor], device: torch.device) -> bool:
    weight = module.weight
    assert isinstance(weight, Tensor), "a norm has a weight"

    def own(x_MD: Tensor, weight_D: Tensor) -> Tensor:
        return functional_call(module, {"weight": weight_D}, (x_MD,))

    shapes = ((_PROBE_TOKENS, weight.shape[0]), tuple(weight.shape))
    return _agree(own, kernel, shapes, weight.dtype, device)


def _product_agrees(module: nn.Module, kernel: Callable[..., Tensor], device: torch.device) -> bool:
    """Whether an MLP's elementwise part, between its projections, is what a kernel computes."""
    width = getattr(module.gate_proj, "out_features", None)
    if not isinstance(width, int):
        return False
    bare = copy.copy(module)
    bare.__dict__["_modules"] = dict(module._modules)

    def own(gate_MF: Tensor, up_MF: Tensor) -> Tensor:
        bare._modules["gate_proj"] = _Gives(gate_MF)
        bare._modules["up_proj"] = _Gives(up_MF)
        bare._modules["down_proj"] = nn.Identity()
        return type(module).forward(bare, gate_MF)

    shapes = ((_PROBE_TOKENS, width),) * 2
    return _agree(own, kernel, shapes, next(module.parameters()).dtype, device)


class _Gives(nn.Module):
    """Stands for a projection whose output is known."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, _: Tensor) -> Tensor:
        return self.output


def _agree(
    own: Callable[..., Tensor],
    kernel: Callable[..., Tensor],
    shapes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether outputs and gradients of a kernel are as near to float32 as the module's own."""
    generator = torch.Generator(device).manual_seed(0)
    drawn = [torch.randn(s, device=device, generator=generator) for s in shapes]
    values = [value.to(dtype) for value in drawn]
    grad = torch.randn(shapes[0], device=device, generator=generator).to(dtype)
    ours, theirs = _run(own, values, grad), _run(kernel, values, grad)
    if dtype in _ROUNDING:
        return all(_error(b, a) <= _ROUNDING[dtype] for a, b in zip(ours, theirs, strict=True))
    exact = _run(own, [value.float() for value in values], grad.float())
    return all(
        b.dtype == a.dtype and _error(b, e) <= _SLACK * _error(a, e) + torch.finfo(dtype).eps / 16
        for a, b, e in zip(ours, theirs, exact, strict=True)
    )


def _run(
    function: Callable[..., Tensor], values: list[Tensor], grad_output: Tensor
) -> list[Tensor]:
    leaves = [value.clone().requires_grad_() for value in values]
    with torch.enable_grad():
        # A kernel may write into what it saves, which a leaf must survive.
        output = function(*(leaf * 1 for leaf in leaves))
        gradients = torch.autograd.grad(output, leaves, grad_output)
    return [output.detach(), *gradients]


def _error(value: Tensor, expected: Tensor) -> float:
    """Return the error relative to the norm; not a number counts as infinite."""
    difference = (value.double() - expected.double()).norm() / expected.double().norm()
    return float(difference.nan_to_num(float("inf")))


# -- mixers ------------------------------------------------------------------------------------

PACKAGES = ("fla", "mamba_ssm", "causal_conv1d", "kernels")
"""Whose kernels Transformers may take."""

_MIXER_TOKENS = 300
"""Of each of the two chunks: more than a block of a scan's kernel (64 to 256), and no multiple."""

_CHOOSES = "_sppo_chooses"

_rejected: weakref.WeakKeyDictionary[nn.Module, set[tuple[str, str]]] = weakref.WeakKeyDictionary()
"""By causal language model: file and name of the functions of which it takes the torch code."""


def check_mixer_kernels(parts: ModelParts, device: torch.device) -> tuple[str, ...]:
    """Let mixers take torch code where an installed kernel does not agree with it; again is fine.

    Returns:
        The functions, by name, for which the model's chunks take the torch code.
    """
    rejected = _rejected.setdefault(parts.causal_lm, set())
    for mixer in _kinds_of_mixers(parts):
        for name in _kernels(mixer):
            place = type(mixer).__module__, name
            why = None if place in rejected else _disagreement(mixer, name, parts, device)
            if why is not None:
                _let_models_choose(mixer, name)
                rejected.add(place)
                logger.warning(
                    "%s takes torch code for %s, which is slower: the installed kernel %s. "
                    "Remedy: install another release of it, or none.",
                    type(mixer).__name__,
                    name,
                    why,
                )
    return tuple(sorted(name for _, name in rejected))


@contextlib.contextmanager
def torch_code_alone(parts: ModelParts) -> Iterator[None]:
    """Let no mixer of the model's family use a kernel, in chunks or not.

    For a tiny model of it, which runs in float64 and on the CPU: no kernel does.
    """
    with contextlib.ExitStack() as stack:
        for mixer in _kinds_of_mixers(parts):
            names = _globals(mixer)
            for name in _kernels(mixer):
                stack.callback(names.__setitem__, name, names[name])
                names[name] = _torch_code(names[name])
        yield


def _kinds_of_mixers(parts: ModelParts) -> Iterator[nn.Module]:
    """Yield a mixer of each kind; none where no package has a kernel."""
    if not any(importlib.util.find_spec(name) for name in PACKAGES):
        return
    seen: set[tuple[Any, ...]] = set()
    for mixer in (mixer for layer in parts.layers for mixer in mixers_of(layer)):
        # Mixers of a class with parameters alike run the same code.
        shapes = tuple((name, p.shape, p.dtype) for name, p in mixer.named_parameters())
        if (type(mixer), shapes) not in seen:
            seen.add((type(mixer), shapes))
            yield mixer


def _globals(mixer: nn.Module) -> dict[str, Any]:
    return vars(sys.modules[type(mixer).__module__])


def _kernels(mixer: nn.Module) -> Iterator[str]:
    """Yield the functions of a mixer that Transformers may have a kernel for."""
    names = _globals(mixer)
    for name in sorted(referenced_names(type(mixer)) & names.keys()):
        function = names[name]
        # Transformers' decorator leaves the torch code in `__wrapped__`.
        if callable(function) and inspect.isfunction(code := inspect.unwrap(function)):
            if code is not function:
                yield name


def _torch_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The torch code behind a function, called as that is."""
    code = inspect.unwrap(function)
    known = inspect.signature(code).parameters

    def called(*args: Any, **kwargs: Any) -> Any:
        return code(*args, **{name: value for name, value in kwargs.items() if name in known})

    return called


def _let_models_choose(mixer: nn.Module, name: str) -> None:
    """Put a function in the place of another that takes its torch code where that is decided."""
    names, place = _globals(mixer), (type(mixer).__module__, name)
    function, torch_code = names[name], _torch_code(names[name])
    if hasattr(function, _CHOOSES):
        return

    @functools.wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        context = current()
        model = None if context is None else context.model.causal_lm
        rejects = model is not None and place in _rejected.get(model, ())
        return (torch_code if rejects else function)(*args, **kwargs)

    setattr(chosen, _CHOOSES, True)
    names[name] = chosen


def _disagreement(
    mixer: nn.Module, name: str, parts: ModelParts, device: torch.device
) -> str | None:
    """What is wrong with the kernel behind `name`; None if it agrees with the torch code."""
    names = _globals(mixer)
    kernels = {other: names[other] for other in _kernels(mixer)}
    try:
        names.update({other: _torch_code(kernel) for other, kernel in kernels.items()})
        try:
            expected = _two_chunks(mixer, parts, device)
        except Exception as error:  # noqa: BLE001 - out of memory, ...: says nothing of the kernel
            logger.warning("%s was not tried: its torch code failed (%s)", name, first_line(error))
            return None
        # One at a time, so that the one that differs is known.
        names[name] = kernels[name]
        try:
            found = _two_chunks(mixer, parts, device)
        except Exception as error:  # noqa: BLE001 - no such device, no compiler, ...
            return f"failed when tried: {first_line(error).rstrip('.')}"
    finally:
        names.update(kernels)
    missing = [what for what in expected if what not in found]
    if missing:
        return f"gives no {missing[0].removeprefix('the ')}"
    # The coarsest of all: under autocast, gradients of float32 weights are no better than the rest.
    most = max(TOLERANCE[truth.dtype] for truth in expected.values())
    for what, truth in expected.items():
        error = relative_error(found[what].double(), truth.double())
        if not error <= most:
            return f"differs in {what} (relative error {error:.1e})"
    return None


@torch.inference_mode(False)
def _two_chunks(mixer: nn.Module, parts: ModelParts, device: torch.device) -> dict[str, Tensor]:
    """Run a mixer on two chunks with random values.

    Returns:
        Outputs and gradients of the inputs, each `[1, C, D]`, and of the weights, by what they are;
        without what has no gradient.
    """
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int, like: Tensor) -> Tensor:
        values = torch.randn(shape, device=device, generator=generator)
        return values.to(like.dtype)

    # Drawn, and not the model's own: those may be sharded, or wait on the host.
    floats = {n: p for n, p in mixer.named_parameters() if p.is_floating_point()}
    weights = {
        n: drawn(*p.shape, like=p).mul_(p.shape[-1] ** -0.5).requires_grad_()
        for n, p in floats.items()
    }
    model = max(floats.values(), key=Tensor.numel)
    width = parts.text_config.hidden_size
    inputs = [drawn(1, _MIXER_TOKENS, width, like=model).requires_grad_() for _ in range(2)]
    grads = [drawn(1, _MIXER_TOKENS, width, like=model) for _ in range(2)]
    cache = StateCache(parts.text_config.num_hidden_layers)
    states, outputs = LayerStates({}), []
    devices = [] if device.type == "cpu" else [device]
    with torch.enable_grad(), torch.random.fork_rng(devices, device_type=device.type):
        torch.manual_seed(0)  # dropout of adapters
        for x_BCD in inputs:
            with ChunkContext(model=parts, states=states).entered():
                outputs.append(functional_call(mixer, weights, (x_BCD, cache)))
            states = LayerStates(states.after)
        wanted = [*inputs, *weights.values()]
        gradients = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
    labels = [f"the gradient of its inputs in chunk {chunk}" for chunk in (1, 2)]
    labels += [f"the gradient of {n}" for n in weights]
    return {
        **{f"its output in chunk {i}": output.detach() for i, output in enumerate(outputs, 1)},
        **{what: g for what, g in zip(labels, gradients, strict=True) if g is not None},
    }
