"""Optional kernels of recurrent and convolutional layers: used where they agree with torch code.

Transformers takes the scan and the convolution of a mixer from flash-linear-attention, mamba-ssm or
causal-conv1d where they are installed, and from torch code of its own elsewhere. Chunks ask more of
a kernel than training without chunks: it begins with a state from before and hands one on, and
gradients flow through both. So each is tried beside the torch code before the first step, on two
chunks of random values, forward and backward, on the device where the model runs. One that fails or
differs is named in a warning, and mixers take the torch code in its place.

The choice is made where the mixer looks the function up, among the globals of its file. It holds in
chunks alone: a model that is not converted runs as it did before.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sppo_hf.attention.backends.verify import TOLERANCE, relative_error
from sppo_hf.engine.chunk_context import ChunkContext, LayerStates, current
from sppo_hf.engine.loaders import first_line
from sppo_hf.engine.recurrent_state import StateCache
from sppo_hf.engine.structure import ModelParts, mixers_of, names_used

logger = logging.getLogger(__name__)

# B batch rows, C tokens of a chunk, D model width.

PACKAGES = ("fla", "mamba_ssm", "causal_conv1d", "kernels")
"""Whose kernels Transformers may take."""

_PROBE_TOKENS = 96
"""Of each of the two chunks: more than one block of any scan's kernel, and no multiple of one."""

_MARK = "_sppo_takes_torch"


def check_mixer_kernels(parts: ModelParts, device: torch.device) -> tuple[str, ...]:
    """Let mixers take torch code where an installed kernel does not agree with it; again is fine.

    Args:
        parts: The model.
        device: Where it will run.

    Returns:
        The functions, by name, for which chunks take the torch code because of this call.
    """
    rejected: list[str] = []
    if not any(importlib.util.find_spec(name) for name in PACKAGES):
        return ()
    seen: set[tuple[Any, ...]] = set()
    for mixer in (mixer for layer in parts.layers for mixer in mixers_of(layer)):
        # Mixers of a class with parameters alike run the same code: tried once.
        shapes = tuple((name, p.shape, p.dtype) for name, p in mixer.named_parameters())
        if (type(mixer), shapes) in seen:
            continue
        seen.add((type(mixer), shapes))
        for name in _kernels(mixer):
            why = _disagreement(mixer, name, parts, device)
            if why is not None:
                _globals(mixer)[name] = _torch_in_chunks(_globals(mixer)[name])
                rejected.append(name)
                logger.warning(
                    "%s takes torch code for %s, which is slower: the installed kernel %s. "
                    "Remedy: install another release of it, or none.",
                    type(mixer).__name__,
                    name,
                    why,
                )
    return tuple(rejected)


def _globals(mixer: nn.Module) -> dict[str, Any]:
    return vars(sys.modules[type(mixer).__module__])


def _kernels(mixer: nn.Module) -> Iterator[str]:
    """Yield the functions of a mixer that Transformers may have a kernel for."""
    names = _globals(mixer)
    for name in sorted(names_used(type(mixer)) & names.keys()):
        function = names[name]
        # Transformers' decorator leaves the torch code in `__wrapped__`.
        if (
            callable(function)
            and inspect.isfunction(inspect.unwrap(function))
            and inspect.unwrap(function) is not function
            and not hasattr(function, _MARK)
        ):
            yield name


def _torch_in_chunks(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, but its torch code in a chunk of a converted model."""
    torch_code = inspect.unwrap(function)
    known = inspect.signature(torch_code).parameters

    @functools.wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        if current() is None:
            return function(*args, **kwargs)
        return torch_code(*args, **{name: v for name, v in kwargs.items() if name in known})

    setattr(chosen, _MARK, True)
    return chosen


def _disagreement(
    mixer: nn.Module, name: str, parts: ModelParts, device: torch.device
) -> str | None:
    """What is wrong with the kernel behind `name`; None if it agrees with the torch code."""
    names = _globals(mixer)
    kernels = {other: names[other] for other in _kernels(mixer)}
    torch_codes = {other: _torch_in_chunks(kernel) for other, kernel in kernels.items()}
    try:
        names.update(torch_codes)
        expected = _two_chunks(mixer, parts, device)
        # One at a time, so that the one that differs is known.
        names[name] = kernels[name]
        found = _two_chunks(mixer, parts, device)
    except Exception as error:  # noqa: BLE001 - no such device, no compiler, another release, ...
        return f"failed when tried: {first_line(error).rstrip('.')}"
    finally:
        names.update(kernels)
    # The coarsest of all: under autocast, gradients of float32 weights are no better than the rest.
    most = max(TOLERANCE[truth.dtype] for truth in expected.values())
    for what, truth in expected.items():
        error = relative_error(found[what].double(), truth.double())
        if not error <= most:
            return f"differs in {what} (relative error {error:.1e})"
    return None


def _two_chunks(mixer: nn.Module, parts: ModelParts, device: torch.device) -> dict[str, Tensor]:
    """Run a mixer on two chunks with random values; outputs and gradients by what they are."""
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
    inputs = [drawn(1, _PROBE_TOKENS, width, like=model).requires_grad_() for _ in range(2)]
    grads = [drawn(1, _PROBE_TOKENS, width, like=model) for _ in range(2)]
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
