"""Kernels of recurrent and convolutional mixers, each compared with torch code before use.

Transformers takes the scan and the convolution of a mixer from flash-linear-attention,
mamba-ssm or causal-conv1d if they are installed, and from torch code of its own otherwise. Chunks
require more of a kernel than training without chunks: it starts from the state of the chunk before
and passes one on, and gradients flow through both. So each is compared with the torch code before
the first step, on two chunks of random values, forward and backward, on the model's device. One
that fails or differs is named in a warning, and mixers run the torch code instead. The choice is
made where the mixer looks the function up, in the globals of its module. It applies in chunks
alone: a model that is not converted runs as before.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sppo_hf.attention.backends.select import TOLERANCE, relative_error
from sppo_hf.engine.chunk_context import ChunkContext, current
from sppo_hf.engine.layer_kernels import liger_in_torch, module_globals, replace_by_choice
from sppo_hf.engine.model_parts import ModelParts, mixers_of, referenced_names
from sppo_hf.engine.recurrent_state import LayerStates, StateCache
from sppo_hf.errors import first_line

logger = logging.getLogger(__name__)

# C tokens of a chunk, D model width.

PACKAGES = ("fla", "mamba_ssm", "causal_conv1d", "kernels")
"""Packages whose kernels Transformers may use."""

_MIXER_TOKENS = 300
"""Tokens of each of the two chunks: more than a block of a scan's kernel (64 to 256), and not a
multiple of one."""

_rejected: weakref.WeakKeyDictionary[nn.Module, set[tuple[str, str]]] = weakref.WeakKeyDictionary()
"""By causal language model: (module, name) of the functions for which it runs the torch code."""


def check_mixer_kernels(parts: ModelParts, device: torch.device) -> None:
    """Make mixers run the torch code for kernels that disagree with it; may be called again."""
    rejected = _rejected.setdefault(parts.causal_lm, set())
    for mixer in _distinct_mixers(parts):
        for name in _kernels(mixer):
            place = type(mixer).__module__, name
            reason = None if place in rejected else _disagreement(mixer, name, parts, device)
            if reason is not None:
                _choose_by_model(mixer, name)
                rejected.add(place)
                logger.warning(
                    "%s takes torch code for %s, which is slower: the installed kernel %s. "
                    "Remedy: install another release of it, or none.",
                    type(mixer).__name__,
                    name,
                    reason,
                )


@contextlib.contextmanager
def torch_code_alone(parts: ModelParts) -> Iterator[None]:
    """Context in which the model's family runs the torch code for kernels, in chunks or not.

    For tiny models, which run in float64 on the CPU, and traces, whose tensors have no memory: no
    kernel runs on either.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(liger_in_torch())
        for mixer in _distinct_mixers(parts):
            stack.enter_context(_in_torch_code(mixer))
        yield


@contextlib.contextmanager
def _in_torch_code(mixer: nn.Module, *, but: str = "") -> Iterator[None]:
    """Context in which a mixer's class runs the torch code for all kernels, or all `but` one."""
    names = module_globals(type(mixer))
    kernels = {name: names[name] for name in _kernels(mixer)}
    names.update({name: _torch_code(one) for name, one in kernels.items() if name != but})
    try:
        yield
    finally:
        names.update(kernels)


def _distinct_mixers(parts: ModelParts) -> Iterator[nn.Module]:
    """Yield one mixer for each class and set of parameters; none if no package is installed."""
    if not any(importlib.util.find_spec(name) for name in PACKAGES):
        return
    seen: set[tuple[Any, ...]] = set()
    for mixer in (mixer for layer in parts.layers for mixer in mixers_of(layer)):
        # Mixers of a class with parameters alike run the same code.
        shapes = tuple((name, p.shape, p.dtype) for name, p in mixer.named_parameters())
        if (type(mixer), shapes) not in seen:
            seen.add((type(mixer), shapes))
            yield mixer


def _kernels(mixer: nn.Module) -> Iterator[str]:
    """Yield the names of a mixer's functions that Transformers may have a kernel for."""
    names = module_globals(type(mixer))
    for name in sorted(referenced_names(type(mixer)) & names.keys()):
        function = names[name]
        # Transformers' decorator leaves the torch code in `__wrapped__`.
        if callable(function) and inspect.isfunction(code := inspect.unwrap(function)):
            if code is not function:
                yield name


def _torch_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The torch code behind a function, without the arguments that it does not know."""
    code = inspect.unwrap(function)
    known = inspect.signature(code).parameters

    def called(*args: Any, **kwargs: Any) -> Any:
        return code(*args, **{name: value for name, value in kwargs.items() if name in known})

    return called


def _choose_by_model(mixer: nn.Module, name: str) -> None:
    """Replace a function by one that runs the torch code for models that rejected the kernel."""
    names, place = module_globals(type(mixer)), (type(mixer).__module__, name)
    torch_code = _torch_code(names[name])

    def choose(*_: Any) -> Callable[..., Any] | None:
        context = current()
        model = None if context is None else context.model.causal_lm
        rejects = model is not None and place in _rejected.get(model, ())
        return torch_code if rejects else None

    replace_by_choice(names, name, choose)


def _disagreement(
    mixer: nn.Module, name: str, parts: ModelParts, device: torch.device
) -> str | None:
    """The reason to reject the kernel behind `name`; None if it agrees with the torch code."""
    try:
        with _in_torch_code(mixer):
            expected = _two_chunks(mixer, parts, device)
    except Exception as error:  # noqa: BLE001 - out of memory, ...: no verdict
        logger.warning("%s was not tried: its torch code failed (%s)", name, first_line(error))
        return None
    try:
        with _in_torch_code(mixer, but=name):  # one at a time, to know which one differs
            found = _two_chunks(mixer, parts, device)
    except Exception as error:  # noqa: BLE001 - no such device, no compiler, ...
        return f"failed when tried: {first_line(error).rstrip('.')}"
    missing = [what for what in expected if what not in found]
    if missing:
        return f"gives no {missing[0].removeprefix('the ')}"
    # The coarsest: under autocast, gradients of float32 weights are no more exact than the rest.
    tolerance = max(TOLERANCE[truth.dtype] for truth in expected.values())
    for what, truth in expected.items():
        error = relative_error(found[what].double(), truth.double())
        if not error <= tolerance:
            return f"differs in {what} (relative error {error:.1e})"
    return None


@torch.inference_mode(False)
def _two_chunks(mixer: nn.Module, parts: ModelParts, device: torch.device) -> dict[str, Tensor]:
    """Run a mixer on two chunks with random values.

    Returns:
        By name: the outputs and the gradients of the inputs, each [1, C, D], and the gradients of
        the weights that have one.
    """
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int, like: Tensor) -> Tensor:
        values = torch.randn(shape, device=device, generator=generator)
        return values.to(like.dtype)

    # Random, not the model's own, which may be sharded or host-resident.
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
