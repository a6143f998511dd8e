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

import contextlib
import functools
import importlib.util
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sppo_hf.attention.backends.verify import TOLERANCE, relative_error
from sppo_hf.engine.chunk_context import ChunkContext, LayerStates, current
from sppo_hf.engine.recurrent_state import StateCache
from sppo_hf.engine.structure import ModelParts, mixers_of, names_used
from sppo_hf.errors import first_line

logger = logging.getLogger(__name__)

# B batch rows, C tokens of a chunk, D model width.

PACKAGES = ("fla", "mamba_ssm", "causal_conv1d", "kernels")
"""Whose kernels Transformers may take."""

_PROBE_TOKENS = 300
"""Of each of the two chunks: more than a block of a scan's kernel (64 to 256), and no multiple."""

_CHOOSES = "_sppo_chooses"

_rejected: weakref.WeakKeyDictionary[nn.Module, set[tuple[str, str]]] = weakref.WeakKeyDictionary()
"""By causal language model: file and name of the functions of which it takes the torch code."""


def check_mixer_kernels(parts: ModelParts, device: torch.device) -> tuple[str, ...]:
    """Let mixers take torch code where an installed kernel does not agree with it; again is fine.

    Args:
        parts: The model.
        device: Where it will run.

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
    for name in sorted(names_used(type(mixer)) & names.keys()):
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
