"""Try modules of the user's own that were put into a model after it was built.

What is known of a family, or was found on a tiny copy of a user's model class, holds for the
modules that the class builds. A user may replace any of them afterwards: an MLP, a norm, attention.
Only attention through `AttentionInterface` may let tokens meet; what any other module gives a token
must not depend on the tokens beside it, or chunks change the result. So conversion looks for
modules that neither a known library has written nor the model class has built, and runs the decoder
layers that contain them on a few random tokens, at once and in two parts. In models without such
modules it only looks at classes.

[Note: attention that mixes no tokens] While a layer is tried, `AttentionInterface` gives it a
function of each token's own query, key and value, and mixers of the model's own class pass their
input on. All the rest of the layer, the user's attention included, must then be token-wise.

[Note: weights of a trial] A convolution that starts as the identity mixes no tokens until its first
step. So parameters are random, and in float32 rather than 16 bits, which makes small differences
visible. The model's own are neither changed nor needed: they may be sharded. What does
not run so (a kernel for bfloat16 alone) runs in the model's dtype, with its weights, or on the
accelerator. A layer with quantised weights keeps them.

[Note: what a trial leaves behind] Nothing: random numbers, training flags, attributes and hooks are
as before, and buffers are copies. The module's code has run, though, and messages say so.

Not covered: hooks that users have registered, which do not run in a trial, as many only collect
what they see (a warning names them); a class or `forward` that is exchanged in a module after the
conversion (new modules are tried before the next step); what depends on tokens more than `_TOKENS`
apart, or on the values of global variables.
"""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import AttentionInterface, AttentionMaskInterface

from sppo_hf.attention.backends.select import relative_error
from sppo_hf.engine.attention_interface import attention_implementation, mask_meaning
from sppo_hf.engine.family_guard import built_classes, is_checking
from sppo_hf.engine.model_parts import (
    ModelParts,
    all_modules,
    depends_on_length,
    is_mixer,
    mixers_of,
    own_class,
    patched_attribute,
)
from sppo_hf.engine.sliced_calls import (
    NORM,
    Call,
    CannotRunByLayer,
    LengthHook,
    PrefixLength,
    WithoutDropout,
    input_width,
    layer_calls,
    may_narrow_float32,
)
from sppo_hf.engine.stages import AbsentEmbedding
from sppo_hf.errors import UnsupportedModelError, first_line

# B batch rows, T tokens of a trial, N query heads, K KV heads, H head size, D model width.

_LIBRARIES = frozenset(
    (
        "torch transformers peft accelerate trl sppo_hf kernels liger_kernel flash_attn fla "
        "mamba_ssm causal_conv1d bitsandbytes torchao optimum hqq gptqmodel auto_gptq awq aqlm "
        "auto_round compressed_tensors eetq fbgemm_gpu quark spqr_quant vptq transformer_engine"
    ).split()
)
"""Packages whose modules are no user's own: their adapters and quantised layers are token-wise."""

_TOKEN_WISE_KINDS = frozenset(
    "activation container dropout linear module normalization sparse".split()
)
"""Files of `torch.nn.modules` whose modules work on features; others run along other dims too."""

_OTHER_DIMS = frozenset(
    "GroupNorm LocalResponseNorm MultiheadAttention Softmax Softmax2d LogSoftmax Softmin".split()
)
"""Modules in these files that may run along the tokens nevertheless."""

_TOKENS = 16
_EQUAL_TOKENS = 8
"""The last tokens are equal, so that experts with a limited capacity overflow."""
_SPLIT = 5
"""Tokens of the first of the two parts; odd, as modules may treat tokens in groups."""

_TOLERANCE, _TOLERANCE_16_BITS = 1e-4, 3e-2
"""Largest relative difference between the parts and the whole, in float32 and in less.

TF32 counts as less."""

_MOST_PARAMETERS = 2**31
"""Parameters (8 GiB in float32) above which a layer is not run whole, but the user's own modules in
it each by itself."""

_BLOCK = 65_537
"""Random numbers that are drawn at once for a parameter; a prime, so that no two rows are equal."""

_TRIAL = "sppo_trial"
"""Name of the attention that mixes no tokens, and of its masks."""

_passed: weakref.WeakKeyDictionary[nn.Module, tuple[object, ...]] = weakref.WeakKeyDictionary()
"""Modules that were tried, with what they contained then."""

_warned_of: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules whose hooks a warning has named."""


class _CannotTry(Exception):
    """A trial gave no result; the message is the reason, as a part of a sentence."""


def check_foreign_code(parts: ModelParts, *, one_chunk: bool = False) -> None:
    """Refuse a model with modules of the user's own that mix tokens, or that cannot be tried.

    Args:
        parts: The model.
        one_chunk: Whether every layer is called for all tokens at once. Decoder layers may then mix
            tokens, and what runs in tiles is tried before (see `sliced_calls.LayerTiles`).

    Raises:
        UnsupportedModelError: Names the module, what was seen and a remedy.
    """
    if is_checking():
        return
    if not one_chunk:
        _warn_of_hooks(parts)
    _check_weights_of_calls(parts)
    built = built_classes(parts)
    if built is None:
        return  # a warning has said that nothing is known of this model
    for module in {parts.base, parts.decoder}:
        if _is_foreign(module, built):
            raise _refusal(
                parts,
                f"{_label(parts, module)} was put in place after {parts.name} was built, so that "
                "what surrounds the decoder layers is unknown",
            )
    found = {
        root: modules
        for root, modules in _find_foreign(parts, built).items()
        if _passed.get(root) != _state(root)
        and not _is_absent(root)
        and not (one_chunk and root in parts.layers)
    }
    if not found:
        return
    calls = _record_calls(parts, found)
    for root, modules in found.items():
        if root in calls:  # else the base model did not call it: part of an encoder, for one
            mixers = [m for m in mixers_of(root) if not _is_foreign(m, built)]
            _Trial(parts, root, modules, mixers, calls[root]).run()
            _passed[root] = _state(root)


def foreign_head_module(parts: ModelParts) -> str:
    """Name of a module in a classifier's head that a user put there; "" where there is none.

    It may read all tokens, which are its own there, but is unknown to a trial of the model's class.
    """
    built = built_classes(parts)
    if is_checking() or built is None:
        return ""
    return next((_label(parts, m) for m in parts.head_modules() if _is_foreign(m, built)), "")


def _check_weights_of_calls(parts: ModelParts) -> None:
    """Refuse modules that compute other weights at every call, so that every chunk has its own."""
    modules = all_modules(parts.causal_lm)
    check_spectral_norm(parts, modules)
    for module in modules:
        lists: dict[str, nn.Module] = dict(getattr(module, "parametrizations", {}))
        for name, weights in lists.items():
            if not _is_absent(weights) and _changes_by_itself(weights):
                kinds = ", ".join(type(one).__name__ for one in weights.children())
                reason = f"has a parametrization of its {name} ({kinds}) that gives another one"
                raise _other_weights(parts, module, reason)


def check_spectral_norm(parts: ModelParts, modules: Iterable[nn.Module]) -> None:
    """Refuse torch's older `spectral_norm` in any of `modules`, before every step.

    It is a hook, which may come at any time; parametrizations come with modules.

    Raises:
        UnsupportedModelError: Names the module and a remedy.
    """
    for module in modules:
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                reason = "has torch's spectral_norm, whose estimate changes"
                raise _other_weights(parts, module, reason)


def _other_weights(parts: ModelParts, module: nn.Module, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{parts.name} cannot be trained chunk by chunk: {_label(parts, module)} {reason} at every "
        "call in training, so every chunk would have weights of its own. Allowed: weights that "
        "depend on parameters alone. Remedy: remove it, or train without sppo_hf."
    )


def _changes_by_itself(weights: nn.Module) -> bool:
    """Whether a list of parametrizations, called twice in training, returns two results."""
    buffers = {name: buffer.clone() for name, buffer in weights.named_buffers()}
    modes = [(module, module.training) for module in weights.modules()]
    try:
        weights.train()
        with torch.no_grad(), _random_numbers_kept(next(weights.parameters()).device):
            first, second = (functional_call(weights, buffers, ()) for _ in range(2))
        return not torch.equal(first, second)
    finally:
        for module, training in modes:
            module.training = training


def check_forward(parts: ModelParts) -> None:
    """Refuse a model object whose `forward` was replaced by code of the user's own.

    Its parts are called by the engine, so what it does with a loss or an output would be lost.

    Raises:
        UnsupportedModelError: Names what was seen and a remedy.
    """
    forward = vars(parts.causal_lm).get("forward")
    if forward is not None and _package(_code_module(forward)) not in _LIBRARIES:
        raise UnsupportedModelError(
            f"{parts.name}.forward was replaced in this model by a function of "
            f"{_code_module(forward) or 'unknown code'}, which would not see whole sequences. "
            "Allowed: the forward of the model's class, and functions around it that are put in "
            "place after the conversion. Remedy: call plugin.convert(model) before the forward is "
            f"replaced; or override it in a subclass of {parts.model_class.__name__}."
        )


def check_rotary_hooks(parts: ModelParts) -> None:
    """Refuse rotary tables that depend on the sequence's length and that the engine cannot tell it.

    Raises:
        UnsupportedModelError: Such a module was put in place after the conversion.
    """
    for module in parts.base.modules():
        hooks = module._forward_pre_hooks.values()
        if depends_on_length(module) and not any(isinstance(hook, LengthHook) for hook in hooks):
            raise UnsupportedModelError(
                f"{_label(parts, module)} was put in place after SPPO converted {parts.name}, and "
                "its table depends on the length of the sequence, which it would not be told. "
                "Remedy: plugin.revert(model) and plugin.convert(model) once more."
            )


# -- what is the user's own ---------------------------------------------------------------------


def _find_foreign(parts: ModelParts, built: frozenset[type]) -> dict[nn.Module, list[nn.Module]]:
    """Return the outermost modules of the user's own, by what is tried.

    Tried are decoder layers, embedding, head and final norm, as a whole, and other modules of the
    decoder each by itself.
    """
    wholes = [*parts.layers, *_ends(parts)]
    found = {whole: list(dict.fromkeys(_outermost(whole, built))) for whole in wholes}
    others = _outermost(parts.decoder, built, set(wholes))
    found |= {module: [module] for module in others}
    return {root: modules for root, modules in found.items() if modules}


def _ends(parts: ModelParts) -> list[nn.Module]:
    model: Any = parts.causal_lm
    ends = (model.get_input_embeddings(), model.get_output_embeddings(), parts.final_norm())
    return [end for end in ends if end is not None]


def _outermost(
    module: nn.Module, built: frozenset[type], skipped: Collection[nn.Module] = ()
) -> Iterator[nn.Module]:
    if module in skipped:
        return
    if _is_foreign(module, built):
        yield module
        return
    if is_mixer(module):
        # Its convolution is the model's own.
        built |= {kind for kind in map(own_class, module.modules()) if _is_torchs(kind)}
    for child in module.children():
        yield from _outermost(child, built, skipped)


def _is_foreign(module: nn.Module, built: frozenset[type]) -> bool:
    """Whether a module runs code that no library has, and that the model class did not build."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    kind = own_class(module)
    forward = module.__dict__.get("forward")
    if forward is not None and _package(_code_module(forward)) not in _LIBRARIES:
        return True
    if kind in built:
        return False
    if _package(kind.__module__) not in _LIBRARIES:
        return True
    if _is_torchs(kind):
        *_, file = kind.__module__.split(".")
        return file not in _TOKEN_WISE_KINDS or kind.__name__ in _OTHER_DIMS
    return _package(_code_module(kind.forward)) not in _LIBRARIES


def _warn_of_hooks(parts: ModelParts) -> None:
    """Warn of modules in which others have registered forward hooks, once of each."""
    head = parts.causal_lm.get_output_embeddings()  # type: ignore[operator]
    found = {
        module: None
        for module in (*parts.decoder.modules(), *([] if head is None else head.modules()))
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if module not in _warned_of and _package(_code_module(hook)) not in _LIBRARIES
    }
    if not found:
        return
    _warned_of.update(found)
    others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    warnings.warn(
        f"The forward hooks of {_label(parts, next(iter(found)))}{others} may be called with the "
        "tokens of one chunk at a time. One that only looks, or that changes every token by "
        "itself, does what it did without sppo_hf; one that lets tokens meet (a mean over the "
        "sequence, say) changes the loss, which nothing notices.",
        stacklevel=2,
    )


def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.modules.")


def _package(module_name: str) -> str:
    return module_name.partition(".")[0]


def _code_module(function: Any) -> str:
    """Return the name of the Python module in which a function's code was written.

    `__module__` would be that of the original where a wrapper copies its name. "" for generated
    code, such as the forward of a `torch.fx.GraphModule`, which may be anybody's.
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    names = getattr(function, "__globals__", None)
    return str(names.get("__name__", "") if names else type(function).__module__)


def _is_absent(root: nn.Module) -> bool:
    """Whether all parameters of a module are on the meta device.

    Accelerate loads weights on one rank and sends them to the others; that rank tries the module.
    """
    parameters = list(root.parameters())
    return bool(parameters) and all(parameter.is_meta for parameter in parameters)


def _state(root: nn.Module) -> tuple[object, ...]:
    return tuple((id(m), own_class(m), id(m.__dict__.get("forward"))) for m in root.modules())


# -- how it is called ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ExampleCalls:
    """Calls of a module for all `_TOKENS` tokens, and for `_SPLIT`: which dims these are."""

    whole: Call
    part: Call

    def cut(self, start: int, end: int, move: Callable[[Tensor], Tensor]) -> Call:
        """Return the arguments for the tokens `[start, end)`, each tensor as `move` returns it."""
        leaves, spec = tree_flatten(self.whole)
        examples = tree_flatten(self.part)[0]
        if len(leaves) != len(examples):
            raise _CannotTry("it is called with other arguments for fewer tokens")
        cuts = [
            move(_narrow(leaf, example, start, end))
            if isinstance(leaf, Tensor)
            else PrefixLength(start)
            if isinstance(leaf, PrefixLength)
            else leaf
            for leaf, example in zip(leaves, examples, strict=True)
        ]
        return tree_unflatten(cuts, spec)


def _narrow(whole: Tensor, part: Any, start: int, end: int) -> Tensor:
    """Return the tokens `[start, end)` of a tensor that is like `part` for `_SPLIT` tokens."""
    if not isinstance(part, Tensor) or part.ndim != whole.ndim:
        return whole
    for dim, (size, less) in enumerate(zip(whole.shape, part.shape, strict=True)):
        if (size, less) == (_TOKENS, _SPLIT):
            whole = whole.narrow(dim, start, end - start)
    return whole.contiguous()


def _record_calls(
    parts: ModelParts, found: dict[nn.Module, list[nn.Module]]
) -> dict[nn.Module, _ExampleCalls]:
    """Return example calls of what is tried; nothing for what the base model does not call."""
    model: Any = parts.causal_lm
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    norm = parts.final_norm()
    calls: list[dict[nn.Module, Call]] = []
    for tokens in (_TOKENS, _SPLIT):
        seen: dict[nn.Module, Call] = {}
        try:
            by_index = layer_calls(parts, functools.partial(_run_base, parts, tokens, found, seen))
        except CannotRunByLayer as error:
            (module, *_), *_ = found.values()
            raise _not_tried(parts, module, error) from error
        for index, call in by_index.items():
            seen[parts.layers[index] if index != NORM or norm is None else norm] = call
        hidden = _hidden(parts, tokens, parts.text_config.hidden_size)
        seen |= {embedding: ((_ids(parts, tokens),), {}), head: ((hidden,), {})}
        calls.append(seen)
    whole, part = calls
    return {root: _ExampleCalls(whole[root], part[root]) for root in found if root in whole}


def _run_base(
    parts: ModelParts, tokens: int, recorded: Collection[nn.Module], seen: dict[nn.Module, Call]
) -> None:
    """Run the base model on `tokens` tokens, and put calls around its layers in `seen`."""

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[module] = (args, kwargs)

    around = [module for module in recorded if module not in parts.layers]
    handles = [m.register_forward_pre_hook(note, with_kwargs=True) for m in around]
    embedding: Any = parts.causal_lm.get_input_embeddings()  # type: ignore[operator]
    drawn = {}
    if isinstance(embedding, AbsentEmbedding):  # its zeros would make all tokens equal
        drawn[embedding] = lambda _: _hidden(parts, tokens, embedding.embedding_dim)
    given: dict[str, Any] = {"use_cache": False, "return_dict": True}
    if parts.reads_ids or "inputs_embeds" not in parts.base_arguments():
        given["input_ids"] = _ids(parts, tokens)
    else:  # the embedding's weight may be sharded
        given["inputs_embeds"] = _hidden(parts, tokens, parts.text_config.hidden_size)
    if getattr(parts.text_config, "attn_temperature_tuning", False):
        given[parts.cache_argument()] = PrefixLength(0)
    try:
        with (
            attention_implementation(_TRIAL, parts.configs),
            patched_attribute("forward", drawn),
            torch.no_grad(),
        ):
            # Without hooks: those that shard a model must not see a forward without layers.
            parts.base.forward(**given)
    finally:
        for handle in handles:
            handle.remove()


def _device(parts: ModelParts) -> torch.device:
    devices = (p.device for p in parts.causal_lm.parameters() if not p.is_meta)
    return next(devices, torch.device("cpu"))


def _ids(parts: ModelParts, tokens: int) -> Tensor:
    return torch.arange(tokens, device=_device(parts))[None] % parts.text_config.vocab_size


def _hidden(parts: ModelParts, tokens: int, width: int) -> Tensor:
    """Random hidden states `[1, T, D]`, the last of which are equal."""
    generator = torch.Generator().manual_seed(0)
    drawn_1TD = torch.randn(1, _TOKENS, width, generator=generator, device="cpu")
    drawn_1TD[:, -_EQUAL_TOKENS:] = drawn_1TD[:, -1:]
    return drawn_1TD[:, :tokens].to(_device(parts), parts.causal_lm.dtype)


# -- the trial ----------------------------------------------------------------------------------


_Weights = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Parameters and buffers, by name."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """What is run on a few tokens."""

    parts: ModelParts
    root: nn.Module
    """The module that is called."""
    foreign: list[nn.Module]
    """The outermost modules of the user's own in it, perhaps itself."""
    mixers: list[nn.Module]
    """Mixers in it that are not the user's own, and do not run."""
    calls: _ExampleCalls

    def run(self, failure: Exception | None = None) -> None:
        """Refuse what differs between all tokens and parts of them, or cannot be tried.

        `failure` is why a trial of what contains it failed.

        Raises:
            UnsupportedModelError: It differs, or cannot be tried.
        """
        for module in self.foreign:
            if any(map(is_lazy, module.parameters())):
                reason = "its parameters have no shape before its first call"
                raise _not_tried(self.parts, module, _CannotTry(reason))
        unseen = {part for mixer in self.mixers for part in mixer.modules()}
        alone = [module for module in self.foreign if module in unseen]
        try:
            self._compare()
        except _CannotTry as error:
            # Without the error's frames, which would hold the model in a reference cycle.
            failure = failure or _CannotTry(str(error))
            if self.foreign == [self.root]:
                raise _not_tried(self.parts, self.root, failure) from error
            alone = self.foreign
        for module in alone:
            self._of_hidden_states(module).run(failure)

    def _of_hidden_states(self, module: nn.Module) -> _Trial:
        """Return a trial of `module` alone, called with hidden states."""
        width = input_width(module, self.parts.text_config.hidden_size)
        whole, part = (((_hidden(self.parts, n, width),), {}) for n in (_TOKENS, _SPLIT))
        mixers = [mixer for mixer in self.mixers if mixer in set(module.modules())]
        calls = _ExampleCalls(whole, part)
        return replace(self, root=module, foreign=[module], mixers=mixers, calls=calls)

    def _compare(self) -> None:
        modules = list(self.root.modules())
        parameters = [p for module in modules for p in module.parameters(recurse=False)]
        if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
            raise _CannotTry("TorchScript's modules cannot be run with other weights")
        if self.foreign != [self.root] and sum(p.numel() for p in parameters) > _MOST_PARAMETERS:
            raise _CannotTry("it is too large to be run with random weights")
        error = _CannotTry("it was not run")
        for setting in _settings(self.parts, self.root):
            try:
                with _random_numbers_kept(setting.device):
                    self._compare_with(setting)
                return
            except _CannotTry as this:
                # A copy: the frames of the error itself hold the weights of the trial.
                error = _CannotTry(str(this))
            except torch.OutOfMemoryError as this:
                error = _CannotTry(first_line(this))
        raise error

    def _compare_with(self, setting: _Setting) -> None:
        """Compare outputs for all tokens with those for parts, of the user's modules too."""
        weights = setting.weights(self.root, self.foreign)
        for training in (True, False):
            run = functools.partial(self._run, setting, weights, training)
            whole = run(0, _TOKENS)
            if not any(_TOKENS in x.shape for x in whole[self.root]):
                raise _CannotTry("it returns no tensor with as many tokens as it is given")
            again = run(0, _TOKENS, seed=1, calls=2)
            if any(_difference(whole[m], again[m]) > setting.tolerance for m in whole):
                continue
            cuts = [run(0, _SPLIT), run(_SPLIT, _TOKENS)]
            # The innermost first: a layer differs if one of its modules does.
            for module in sorted(whole, key=lambda one: one is self.root):
                found = _difference(whole[module], *(part.get(module, []) for part in cuts))
                if found > setting.tolerance:
                    raise _mixes_tokens(self.parts, module, found, setting)
            return
        raise _CannotTry("called once more, in eval mode, too, it gives another result")

    def _run(
        self,
        setting: _Setting,
        weights: _Weights,
        training: bool,
        start: int,
        end: int,
        *,
        seed: int = 0,
        calls: int = 1,
    ) -> dict[nn.Module, list[Tensor]]:
        """Return the tensors that `root` and the user's modules return for tokens `[start, end)`.

        Those of the last of several calls, between which the module may keep a state.
        """
        outputs: dict[nn.Module, list[Tensor]] = {}

        def note(module: nn.Module, _: Any, output: Any) -> None:
            leaves = tree_flatten(output)[0]
            outputs.setdefault(module, []).extend(x for x in leaves if isinstance(x, Tensor))

        parameters, buffers = weights
        tensors = parameters | {name: x.clone() for name, x in buffers.items()}
        args, kwargs = self.calls.cut(start, end, setting.move)
        _seed_torch(seed, setting.device)
        random.seed(seed)
        np.random.seed(seed)
        with _untouched(self.root):
            for module in self.root.modules():
                module.training = training
            for module in {self.root, *self.foreign}:
                module.register_forward_hook(note)
            try:
                with self._without_mixing(setting.device):
                    for _ in range(calls):
                        outputs.clear()
                        functional_call(self.root, tensors, args, kwargs)
            except torch.OutOfMemoryError:
                raise
            # The user's code, or a kernel that does not know the device or the dtype.
            except Exception as error:
                what = f"on {end - start} tokens it fails ({first_line(error)})"
                raise _CannotTry(what) from error
        return outputs

    @contextlib.contextmanager
    def _without_mixing(self, device: torch.device) -> Iterator[None]:
        """Context in which nothing mixes tokens but what the user has put there."""
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(device.type, enabled=False),
            torch.compiler.set_stance("force_eager"),
            attention_implementation(_TRIAL, self.parts.configs),
            patched_attribute("forward", dict.fromkeys(self.mixers, _first_argument)),
            _without_tf32_in_cudnn(),
            WithoutDropout(),
        ):
            yield


@dataclass(frozen=True, slots=True)
class _Setting:
    """Where and in which dtypes a module is tried; see [Note: weights of a trial]."""

    device: torch.device
    widens: bool
    """Whether 16-bit tensors become float32."""
    draws: bool
    """Whether parameters are random."""
    quantised: bool
    """Whether only parameters of the user's own modules are."""

    @property
    def tolerance(self) -> float:
        """Largest relative difference of what is equal up to rounding."""
        precise = self.widens and not may_narrow_float32(self.device)
        return _TOLERANCE if precise else _TOLERANCE_16_BITS

    def move(self, x: Tensor) -> Tensor:
        """Return an argument or a buffer on the device and in the dtype of the trial."""
        widened = self.widens and x.is_floating_point() and x.element_size() < 4
        return x.to(self.device, torch.float32 if widened else x.dtype)

    def weights(self, root: nn.Module, foreign: list[nn.Module]) -> _Weights:
        """Return what replaces parameters and buffers of `root`."""
        buffers = {name: self.move(x) for name, x in root.named_buffers() if not x.is_meta}
        own = {p for module in foreign for p in module.parameters()} if self.quantised else None
        generator = torch.Generator(self.device).manual_seed(0)
        parameters: dict[str, Tensor] = {}
        for name, parameter in root.named_parameters():
            if parameter.is_floating_point() and self.draws and (own is None or parameter in own):
                like = self.move(torch.empty(0, dtype=parameter.dtype, device="cpu"))
                parameters[name] = _draw(parameter.shape, like, generator)
        return parameters, buffers


def _settings(parts: ModelParts, root: nn.Module) -> Iterator[_Setting]:
    tensors = [*root.parameters(), *root.buffers()]
    is_quantised = any(
        x.ndim > 1 and x.dtype != torch.bool and (x.element_size() < 2 or not x.is_floating_point())
        for x in tensors
    )
    narrow = any(x.is_floating_point() and x.element_size() < 4 for x in tensors) or (
        parts.causal_lm.dtype.itemsize < 4
    )
    device = next((x.device for x in tensors if not x.is_meta), _device(parts))
    make = functools.partial(_Setting, quantised=is_quantised)
    if device.type == "cpu" and torch.accelerator.is_available() and not is_quantised:
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:  # on the CPU a large layer takes seconds
            yield make(accelerator, widens=True, draws=True)
            yield make(accelerator, widens=False, draws=True)
    if not is_quantised:
        yield make(device, widens=True, draws=True)
    if narrow or is_quantised:
        yield make(device, widens=False, draws=True)
    if not any(hasattr(x, "to_local") or x.is_meta for x in tensors):  # sharded, or elsewhere
        yield make(device, widens=not narrow, draws=False)


def _draw(shape: torch.Size, like: Tensor, generator: torch.Generator) -> Tensor:
    """Return random values of a shape: a block of them, repeated, for speed."""
    block = torch.rand(_BLOCK, device=like.device, generator=generator)
    # Vectors are often of scales, decays or logarithms.
    block = 2 * (block - 0.5) * shape[-1] ** -0.5 if len(shape) > 1 else 0.1 + 0.8 * block
    block = block.to(like.dtype)
    values = torch.empty(shape.numel(), device=like.device, dtype=like.dtype)
    blocks = shape.numel() // _BLOCK
    values[: blocks * _BLOCK].view(blocks, _BLOCK).copy_(block)
    values[blocks * _BLOCK :].copy_(block[: shape.numel() % _BLOCK])
    return values.view(shape)


def _difference(whole: list[Tensor], *parts: list[Tensor]) -> float:
    """Return the largest relative difference between outputs and the joined outputs for parts."""
    if any(len(part) != len(whole) for part in parts):
        return float("inf")
    worst = 0.0
    for expected, *given in zip(whole, *parts, strict=True):
        if len(given) == 1:
            joined = given[0]
        else:
            dims = [
                dim
                for dim, size in enumerate(expected.shape)
                if size == _TOKENS and given[0].ndim > dim and given[0].shape[dim] == _SPLIT
            ]
            if len(dims) != 1 or any(x.ndim != expected.ndim for x in given):
                continue  # no tokens, such as a sum for statistics, or pairs of tokens
            joined = torch.cat(given, dims[0])
        if joined.shape != expected.shape:
            return float("inf")
        if not torch.equal(joined, expected):
            if not (expected.isfinite().all() and joined.isfinite().all()):
                raise _CannotTry("it gives NaN or infinity")
            worst = max(worst, relative_error(joined.double(), expected.double()))
    return worst


def _first_argument(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else kwargs["hidden_states"]


@contextlib.contextmanager
def _without_tf32_in_cudnn() -> Iterator[None]:
    """Context in which cuDNN does not round float32 to TF32.

    By default its convolutions may, unlike matmuls, and which kernels do so depends on the number
    of tokens, so that a pointwise convolution would seem to mix them.
    """
    cudnn: Any = torch.backends.cudnn
    parts = cudnn.conv, cudnn.rnn
    before = [part.fp32_precision for part in parts]
    older_flag = None
    with contextlib.suppress(RuntimeError):  # PyTorch reads it only where the parts are alike
        older_flag = cudnn.allow_tf32
    try:
        cudnn.allow_tf32 = False
        for part in parts:
            part.fp32_precision = "ieee"
        yield
    finally:
        if older_flag is not None:
            cudnn.allow_tf32 = older_flag
        for part, precision in zip(parts, before, strict=True):
            part.fp32_precision = precision


def _attend_to_own_token(
    _: nn.Module, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any
) -> tuple[Tensor, None]:
    """Attention that mixes no tokens and depends on query, key and value, BNTH, BKTH and BKTH.

    See [Note: attention that mixes no tokens].
    """
    group = query.shape[1] // key.shape[1]
    key_BNTH, value_BNTH = (x.repeat_interleave(group, dim=1) for x in (key, value))
    norms = query.norm(dim=-1, keepdim=True) * key_BNTH.norm(dim=-1, keepdim=True)
    angle_BNT1 = (query * key_BNTH).sum(-1, keepdim=True) / (1 + norms)
    return (value_BNTH * (2 + angle_BNT1)).transpose(1, 2).contiguous(), None


AttentionInterface.register(_TRIAL, _attend_to_own_token)
AttentionMaskInterface.register(_TRIAL, mask_meaning)


# -- what it leaves behind ----------------------------------------------------------------------


@contextlib.contextmanager
def _untouched(root: nn.Module) -> Iterator[None]:
    """Context without most hooks in `root`; at exit, all attributes of its modules are as before.

    Parameters and buffers are not looked at, as a trial has its own.
    """
    before = [(module, dict(vars(module)), _contents(module)) for module in root.modules()]
    for module in root.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(hooks.items()):
                # Torch's own compute a weight out of several parameters.
                if not _code_module(hook).startswith("torch.nn.utils"):
                    del hooks[key]
        if "gradient_checkpointing" in vars(module):
            module.__dict__["gradient_checkpointing"] = False
    try:
        yield
    finally:
        for module, attributes, contents in before:
            vars(module).clear()
            vars(module).update(attributes)
            for container, content in contents:
                if isinstance(container, list):
                    container[:] = content
                else:
                    container.clear()
                    container.update(content)


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    """Return the containers among a module's attributes, each with a copy of what is in it."""
    kinds = (dict, OrderedDict, list, set)
    return [(x, type(x)(x)) for x in vars(module).values() if type(x) in kinds]


def _seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of one device.

    `torch.manual_seed` would seed all devices, which nobody restores.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        module = torch.get_device_module(device)
        with module.device(device):
            module.manual_seed(seed)


@contextlib.contextmanager
def _random_numbers_kept(device: torch.device) -> Iterator[None]:
    devices = [] if device.type == "cpu" else [device]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices, device_type=device.type):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


# -- messages -----------------------------------------------------------------------------------


def _label(parts: ModelParts, module: nn.Module) -> str:
    names = (name for name, one in parts.causal_lm.named_modules() if one is module)
    kind = own_class(module).__name__
    own = " with a forward of its own" if "forward" in vars(module) else ""
    return f"{next(names, 'a module')} ({kind}{own})"


def _refusal(parts: ModelParts, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{parts.name} cannot be trained chunk by chunk: {reason}. Remedy: build it in a model "
        f"class of your own, a subclass of {parts.model_class.__name__}, which is tried whole on a "
        "small copy; or train without sppo_hf."
    )


def _not_tried(parts: ModelParts, module: nn.Module, error: Exception) -> UnsupportedModelError:
    return _refusal(
        parts,
        f"{_label(parts, module)} is your own code, and whether it treats each token by itself "
        f"could not be tried on {_TOKENS} random tokens: {str(error).rstrip('.')}",
    )


def _mixes_tokens(
    parts: ModelParts, module: nn.Module, found: float, setting: _Setting
) -> UnsupportedModelError:
    reason = (
        f"what {_label(parts, module)} gives a token depends on other tokens, or on where the "
        f"chunk begins (it was just run on {_TOKENS} random tokens, and on the first {_SPLIT} and "
        f"the last {_TOKENS - _SPLIT} of them: relative difference {found:.1e}, at most "
        f"{setting.tolerance:.0e} is allowed)"
    )
    if mixers_of(module):
        return _refusal(parts, reason)
    return UnsupportedModelError(
        f"{parts.name} cannot be trained chunk by chunk: {reason}. Allowed: tokens that meet in "
        "attention, through Transformers' AttentionInterface, and nowhere else. Remedy: replace "
        "this module, or train without sppo_hf."
    )
