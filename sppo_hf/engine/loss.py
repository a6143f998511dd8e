"""Head and loss of hidden states that were computed chunk by chunk.

`ModelHead` runs the causal language model's own `forward`, for whose duration the base model gives
the hidden states that it is handed. So soft-capping, scaling, biases, adapters on the head and
whatever else a family does after its last norm are the model's own code, not a copy of it.

`ChunkedLoss` is the model's own next-token loss without logits of the whole sequence. Hidden states
of a chunk go through the head in tiles; each tile's cross-entropy and its gradient are computed on
the spot and the tile's logits are dropped. Forward thus leaves behind one gradient of the size of
the hidden states and one of the size of the head's trainable weights, nothing runs twice, and
backward only multiplies by the scale that arrives. A tile's gradient of the logits overwrites its
log-probabilities, and a matmul with a trained weight adds its gradient to the sum over tiles (where
they have one dtype), so that no tile has a gradient of the size of the head beside it. The sum over
chunks is then divided as Transformers divides: by `num_items_in_batch`, or by the number of labels
that count; with none that count the loss is NaN and every gradient zero, as in PyTorch. Losses that
are not a sum over tokens are not covered; the engine gives such a model whole-sequence logits.

Liger's fused linear + cross-entropy kernel replaces both (`liger_tile`) on CUDA, where liger-kernel
is installed and the head was seen to be one plain matmul: one that scales, caps or adapts its
logits keeps its own code. That is found out by trying both on a few random hidden states, not by a
list of families, and remembered, since the answer makes the host wait.
`torch.nn.functional.linear_cross_entropy` (PyTorch 2.13) is not used: asked for little memory, it
rounds the summed loss to the hidden states' dtype, three digits in bfloat16.

`RouterLoss` is the load-balancing loss of routers (Switch Transformer, arXiv 2101.03961, equations
4 to 6). For E experts it is `E * sum_e f_e * P_e`: f_e the share of tokens that chose expert e, P_e
the mean probability that routers give it, both over all layers and all tokens that are no padding.
Both are made of sums over tokens, which are carried over the chunks (those of probabilities with
their graph) and put together after the last one. It keeps the probabilities until backward, a
number per token, layer with a router, and expert, which plans count (`LayerProfile.router_bytes`).

[Note: gradient of the router loss by chunks] The gradient by a chunk's sums of probabilities is
`E * chosen_e / tokens^2`: chunks need nothing of each other but how often each expert was chosen,
and by how many tokens. So the stages of a pipeline add up their numbers once, after their last
forward and before their first backward, and each chunk's backward begins at its own sums as well.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    MoeCausalLMOutputWithPast,
)

from sppo_hf.engine.family_guard import WITHOUT_ROUTER_LOSS
from sppo_hf.engine.forward_calls import ForwardCall
from sppo_hf.engine.model_parts import (
    ROUTER_SWITCH,
    ModelParts,
    patched_attribute,
    without_cached_weights,
    without_parameter_hooks,
)
from sppo_hf.engine.read_tensors import ReadTensors
from sppo_hf.engine.recompute import checkpoint
from sppo_hf.engine.unit_graph import GraphNode
from sppo_hf.errors import SPPOError, UnsupportedModelError

# B batch rows, C tokens of a chunk, M tokens of a tile, T tokens of the sequence, D model width,
# V vocabulary, E experts.


_HEAD_OPTIONS = {"use_cache": False, "return_dict": True}
"""Arguments with which a model's forward runs on hidden states, if it takes them."""


class UnknownOutput(BaseModelOutputWithPast):
    """Stands for a base model's output of a class that is not known: what it lacks is None.

    Heads pass on what their own base model returns beside the hidden states (of experts or images).
    """

    def __getattr__(self, name: str) -> Any:
        """Return None, but for what Python itself looks for."""
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class ModelHead:
    """Logits, or the model's own loss, from hidden states."""

    def __init__(self, parts: ModelParts, original_forward: Callable[..., Any]) -> None:
        self._parts = parts
        self._forward = original_forward
        taken = inspect.signature(original_forward).parameters.values()
        takes_any = any(one.kind is one.VAR_KEYWORD for one in taken)
        names = {one.name for one in taken}
        # A classifier of the user's own may take neither.
        self._options = {n: v for n, v in _HEAD_OPTIONS.items() if takes_any or n in names}
        self.output_class: type = UnknownOutput
        """Class of what the base model returns; set after its forward."""
        self.plain: tuple[Hashable, bool] | None = None
        """Cache of `liger_tile`: the model's state when it last checked, and whether logits were
        one plain matmul then."""

    def logits(self, hidden_BMD: Tensor) -> Tensor:
        """Return logits `[B, M, V]` of hidden states `[B, M, D]`."""
        return self.run(hidden_BMD).logits

    def run(self, hidden_BMD: Tensor, **kwargs: Any) -> Any:
        """Run the original forward on hidden states; `kwargs` are labels and loss arguments.

        With the tokens among them the forward is called as the caller did: classifiers look for
        padding there.
        """
        output = self.output_class(last_hidden_state=hidden_BMD)
        if not kwargs.keys() & {"input_ids", "inputs_embeds"}:
            kwargs["inputs_embeds"] = hidden_BMD
        kwargs |= self._options
        if self._parts.has_router_loss():
            # What routers gave is not here: `RouterLoss` adds their loss.
            kwargs[ROUTER_SWITCH] = False
        # A call of the base model returns `output`. Its hooks have seen the call that computed the
        # hidden states, so they are not called once more (which `_call_impl` would do).
        replaced = {self._parts.base: lambda *_, **__: output}
        with patched_attribute("forward", replaced), patched_attribute("_call_impl", replaced):
            return self._forward(**kwargs)


def liger_tile(parts: ModelParts, head: ModelHead, device: torch.device) -> LigerTile | None:
    """Return Liger's kernel for head and loss; None where the model's own head must run."""
    if device.type != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        return None
    linear = parts.causal_lm.get_output_embeddings()
    # The kernel knows no scale for float16, and no wider type than float32.
    if type(linear) is not nn.Linear or linear.weight.dtype not in (torch.bfloat16, torch.float32):
        return None
    # Another parameter could be neutral now (a scale of one) and not later.
    own = {id(linear.weight), id(linear.bias)}
    if any(id(parameter) not in own for parameter in parts.head_parameters()):
        return None
    state = _state(parts, linear)
    tile = LigerTile(linear)
    if linear.weight.requires_grad and not tile.sums_wide:
        return None
    if head.plain is None or head.plain[0] != state:
        head.plain = (state, is_plain_head(linear, head) and tile.needs_no_wait())
    return tile if head.plain[1] else None


def _state(parts: ModelParts, linear: nn.Linear) -> Hashable:
    """What the check depends on: the module and its hooks, not the weights' values."""
    return (
        weakref.ref(linear),
        weakref.ref(linear.weight),
        linear.weight.requires_grad,
        parts.causal_lm.training,
        "forward" in linear.__dict__,
        (*linear._forward_hooks, *linear._forward_pre_hooks),
    )


@torch.no_grad()
def is_plain_head(linear: nn.Linear, head: ModelHead) -> bool:
    """Whether the model's logits are exactly `hidden @ weight.T + bias`; waits for the device."""
    weight = linear.weight
    # With a generator of its own: the global one must stay as it is.
    generator = torch.Generator(weight.device).manual_seed(0)
    shape = (1, 4, linear.in_features)
    probe_1MD = torch.randn(shape, device=weight.device, dtype=weight.dtype, generator=generator)
    probe_1MD = probe_1MD * 100  # large enough that a soft cap would show
    return torch.equal(head.logits(probe_1MD), F.linear(probe_1MD, weight, linear.bias))


class _WithoutWaiting(TorchFunctionMode):
    """Answers what Liger reads from the device, for which the host would wait.

    `Tensor.item` gives 1, for the number of labels: Liger divides means by it, and here it computes
    sums. `torch.equal` gives True: its backward asks whether the loss's gradient is 1, as it is.
    That 1 is made by `torch.tensor`, which copies it from the host and waits for the copy, and so
    for all work before it: on the device it is filled in instead.
    """

    _ANSWERS: ClassVar[dict[Any, Any]] = {Tensor.item: 1, torch.equal: True}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace these alone."""
        if func in self._ANSWERS:
            return self._ANSWERS[func]
        if func is torch.tensor and isinstance(args[0], int | float):
            return torch.full((), *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class LigerTile:
    """Head and loss of a tile by Liger's kernel, which computes gradients in its forward too."""

    def __init__(self, linear: nn.Linear) -> None:
        from liger_kernel.ops.fused_linear_cross_entropy import (  # type: ignore[import-not-found]
            LigerFusedLinearCrossEntropyFunction,
        )

        self._linear = linear
        self._function: Any = LigerFusedLinearCrossEntropyFunction
        named = inspect.signature(self._function.forward).parameters
        self._defaults = {name: p.default for name, p in named.items() if name != "ctx"}

    @property
    def sums_wide(self) -> bool:
        """Whether the kernel can sum the weight's gradient over its parts in float32."""
        return "accum_dtype" in self._defaults

    def needs_no_wait(self) -> bool:
        """Whether results are the same where `_WithoutWaiting` answers the kernel."""
        weight = self._linear.weight
        generator = torch.Generator(weight.device).manual_seed(0)
        hidden_MD = torch.randn(
            5, weight.shape[1], device=weight.device, dtype=weight.dtype, generator=generator
        )
        labels_M = torch.tensor([1, -100, 0, -100, 2], device=weight.device) % weight.shape[0]
        labels_M[1::2] = -100
        expected = self._run(hidden_MD, labels_M, weight.detach(), None, -100)
        with _WithoutWaiting():
            found = self._run(hidden_MD, labels_M, weight.detach(), None, -100)
        return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))

    def max_tokens(self, tile_tokens: int) -> int:
        """Return how many tokens a call may have to take no more memory than a tile.

        The kernel itself cuts a call into parts whose logits have about as many elements as the
        hidden states of all; it rounds the tokens of a part up to a power of two.
        """
        vocab, width = self._linear.weight.shape
        power_of_two = 1 << (tile_tokens.bit_length() - 1)
        return power_of_two * -(-vocab // width)

    def __call__(
        self,
        hidden_MD: Tensor,
        labels_M: Tensor,
        trainable: Sequence[nn.Parameter],
        ignore_index: int,
    ) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """Return loss sum, gradient of the hidden states, gradients of `trainable`."""
        weight, bias = self._linear.weight, self._linear.bias
        leaf = weight.detach().requires_grad_(weight.requires_grad)
        bias_leaf = None if bias is None else bias.detach().requires_grad_(bias.requires_grad)
        with _WithoutWaiting():
            loss, dhidden_MD, *dweights = self._run(
                hidden_MD, labels_M, leaf, bias_leaf, ignore_index
            )
        trained = [x for x in (weight, bias) if x is not None and x.requires_grad]
        by_parameter = dict(zip(map(id, trained), dweights, strict=True))
        return loss, dhidden_MD, [by_parameter.get(id(parameter)) for parameter in trainable]

    def _run(
        self,
        hidden_MD: Tensor,
        labels_M: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ignore_index: int,
    ) -> list[Tensor]:
        """Return loss sum, gradient of the hidden states, gradients of the leaves that need one."""
        hidden_leaf = hidden_MD.detach().requires_grad_()
        given = {
            "ignore_index": ignore_index,
            "reduction": "sum",
            # By default the sum over parts has the weight's dtype.
            "accum_dtype": torch.float32,
        }
        others = list(self._defaults.items())[4:]
        arguments = [given.get(name, default) for name, default in others]
        with torch.enable_grad():
            result: Any = self._function.apply(hidden_leaf, weight, labels_M, bias, *arguments)
        loss, *others = result if isinstance(result, tuple) else (result,)
        # Not by `torch.autograd.grad`, in which `_WithoutWaiting` would be off.
        with torch.no_grad():
            gradients: Any = self._function.backward(
                loss.grad_fn, torch.ones_like(loss), *[None for _ in others]
            )
        dhidden_MD, dweight, _, dbias, *_ = gradients
        wanted = ((hidden_leaf, dhidden_MD), (weight, dweight), (bias, dbias))
        found = [dx for x, dx in wanted if x is not None and x.requires_grad]
        return [loss.detach().float(), *found]


_HALF_SCALE = 1024.0
"""Scale at which gradients of float16 logits are computed, so that small ones do not underflow."""

Head = Callable[[Tensor], Tensor]
"""The model's own code from hidden states `[1, M, D]` to logits `[1, M, V]`."""


@dataclass(eq=False)
class ChunkedLoss:
    """Next-token loss of one forward call, summed over its chunks."""

    head: Head
    """The model's head."""
    parameters: Sequence[nn.Parameter]
    """All parameters that `head` reads; those that require gradients get them."""
    _: KW_ONLY
    tile_tokens: int
    """Tokens per tile; bounds the bytes of logits that exist at once."""
    ignore_index: int = -100
    """The label that is not counted."""
    on_logits: Callable[[Tensor, slice], None] | None = None
    """Called with the logits `[M, V]` of each tile and the slice of the chunk's tokens, flattened
    over rows, that they belong to."""
    liger: LigerTile | None = None
    """Computes head and loss of a tile at once; None: `head` runs."""
    head_in_backward: bool = False
    """Whether gradients of the head are computed by autograd in backward, as FSDP2 and hooks on the
    head's modules require; each tile's logits are then recomputed there."""
    reads: ReadTensors | None = None
    """What the head reads, restored for that recomputation."""
    sharded: Sequence[Any] = ()
    """Modules of the head that FSDP2 shards. In backward they free their weights after one tile of
    a chunk, not after each: all ranks would have to gather them anew for the next one, and may have
    other numbers of tiles."""
    min_tiles: int = 1
    """Tiles that a chunk is cut into at least, of which the last ones may be empty."""

    def __post_init__(self) -> None:
        self._trainable = [p for p in self.parameters if p.requires_grad]
        self._head_grads: list[Tensor | None] = [None] * len(self._trainable)
        self._reads = ReadTensors.of_named(("a weight of the head", p) for p in self.parameters)
        self._versions = self._reads.versions()
        self.scale = 1.0

    def add(
        self, hidden_BCD: Tensor, labels_BC: Tensor, *, last: bool, frees: bool = True
    ) -> Tensor:
        """Return the summed loss of one chunk, float32 (float64 for float64 models), shape `[]`.

        Labels are shifted: those of the following tokens. The node of the `last` chunk, the first
        to run in backward, returns the gradients of the head's parameters for all chunks. With
        `frees` the backward of its first tile frees `sharded` weights; the layers' comes next.
        """
        grad = torch.is_grad_enabled() and (hidden_BCD.requires_grad or bool(self._trainable))
        if grad and self.head_in_backward:
            return self._checkpointed(hidden_BCD, labels_BC, frees=frees)
        with torch.no_grad():
            total, dhidden_BCD = self.tiles(hidden_BCD, labels_BC, grad)
        if dhidden_BCD is None:
            return total
        # Parameters that no tile used are not in the graph, so that their hooks do not run.
        indices = [i for i, grad in enumerate(self._head_grads) if last and grad is not None]
        parameters = [self._trainable[index] for index in indices]
        backward = functools.partial(self._backward, [dhidden_BCD], last, indices)
        return GraphNode.apply(total.clone, backward, hidden_BCD, *parameters)

    def _backward(
        self, held: list[Tensor], last: bool, indices: list[int], dtotal: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return gradients of hidden states and parameters, by what forward computed and `held`."""
        if not held:
            raise SPPOError(
                "backward ran twice through a chunked loss. Chunked sequences allow one backward "
                "per forward (retain_graph=True is not supported); run the forward again."
            )
        if last:  # runs first; afterwards a hook may have stepped an optimizer
            self.check_unchanged()
        assert dtotal is not None, "the loss is this node's one output"
        # In the wide dtype: a bfloat16 factor biases all gradients, a float16 one may underflow.
        factor = dtotal / self.scale
        grads: list[Tensor | None] = [_scaled(held.pop(), factor)]
        for index in indices:
            grad, self._head_grads[index] = self._head_grads[index], None
            dtype = self._trainable[index].dtype
            grads.append(None if grad is None else grad.mul_(factor.to(grad.dtype)).to(dtype))
        return tuple(grads)

    def _checkpointed(self, hidden_BCD: Tensor, labels_BC: Tensor, *, frees: bool) -> Tensor:
        """Return the summed loss by plain autograd, whose backward reruns the head tile by tile.

        FSDP2 gathers the head's weights when a gradient reaches what the head returned, and frees
        them when a backward ends; a backward inside forward would free them too early. Hooks on the
        head's modules would see gradients there that are not yet divided by the number of labels.
        """
        hidden_MD = hidden_BCD.reshape(-1, hidden_BCD.shape[-1])
        labels_M = labels_BC.reshape(-1)
        losses = []
        reads = ReadTensors(()) if self.reads is None else self.reads
        versions = reads.versions()

        def run(hidden_MD: Tensor, labels_M: Tensor, last: bool) -> tuple[Tensor, Tensor]:
            for module in self.sharded:
                module.set_reshard_after_backward(last, recurse=False)
            with reads.as_in_forward(), without_cached_weights():
                return self._tile_loss(hidden_MD, labels_M)

        for start in self._starts(hidden_MD, self.tile_tokens):
            tile = slice(start, start + self.tile_tokens)
            last = frees and start == 0  # tiles run backward in reverse
            loss, logits_MV = checkpoint(run, hidden_MD[tile], labels_M[tile], last)
            reads.ignore_own_writes(versions)
            losses.append(loss)
            if self.on_logits is not None:
                self.on_logits(logits_MV.detach(), tile)
        return torch.stack(losses).sum()

    def _starts(self, hidden_MD: Tensor, tile_tokens: int) -> range:
        return range(0, max(len(hidden_MD), self.min_tiles * tile_tokens), tile_tokens)

    def check_unchanged(self) -> None:
        """Raise `SPPOError` if weights of the head were changed in place since forward."""
        self._reads.check_unchanged(self._versions, "the loss's backward")

    def _tile_loss(self, hidden_MD: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
        self.check_unchanged()  # this may be backward, see `_checkpointed`
        # Not by index 0, whose backward would allocate zeros of the logits' size.
        logits_MV = self.head(hidden_MD[None]).squeeze(0)
        labels_M = labels_M.to(logits_MV.device)
        return _SummedCrossEntropy.apply(logits_MV, labels_M, self.ignore_index), logits_MV

    def tiles(
        self, hidden_BCD: Tensor, labels_BC: Tensor, grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return loss sum and gradient of the hidden states; adds to the head's gradients."""
        hidden_MD = hidden_BCD.reshape(-1, hidden_BCD.shape[-1])
        labels_M = labels_BC.reshape(-1)
        total: Tensor | None = None
        dhidden_MD = torch.empty_like(hidden_MD) if grad else None
        liger = self.liger if grad and self.on_logits is None else None
        tile_tokens = self.tile_tokens if liger is None else liger.max_tokens(self.tile_tokens)
        for start in self._starts(hidden_MD, tile_tokens):
            tile = slice(start, start + tile_tokens)
            loss, dtile, logits_MV = self._tile(hidden_MD[tile], labels_M[tile], grad, liger)
            total = loss if total is None else total + loss
            if dhidden_MD is not None and dtile is not None:
                dhidden_MD[tile] = dtile
            if self.on_logits is not None:
                self.on_logits(logits_MV.detach(), tile)
            del logits_MV, dtile  # before the next tile's are allocated
        assert total is not None, "a chunk has at least one token"
        return total, None if dhidden_MD is None else dhidden_MD.view_as(hidden_BCD)

    def _tile(
        self, hidden_MD: Tensor, labels_M: Tensor, grad: bool, liger: LigerTile | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        if liger is not None:
            labels_M = labels_M.to(hidden_MD.device)
            args = (hidden_MD, labels_M, self._trainable, self.ignore_index)
            loss, dhidden_MD, dweights = liger(*args)
            self._add_head_grads(dweights)
            return loss, dhidden_MD, hidden_MD
        if not grad:
            loss, logits_MV = self._tile_loss(hidden_MD, labels_M)
            return loss, None, logits_MV
        with torch.enable_grad():
            leaf_MD = hidden_MD.detach().requires_grad_()
            with _SummedGradients(self._trainable, self._head_grads):
                loss, logits_MV = self._tile_loss(leaf_MD, labels_M)
            self.scale = _HALF_SCALE if logits_MV.dtype == torch.float16 else 1.0
            if self.on_logits is None:
                logits_MV = logits_MV.new_empty(0)  # frees them
            # As the ordinary backward, outside of autocast. Hooks on parameters see the sum, when
            # `_backward` returns it.
            with (
                torch.autocast(hidden_MD.device.type, enabled=False),
                without_parameter_hooks(self._trainable),
            ):
                dhidden_MD, *dweights = torch.autograd.grad(
                    loss * self.scale, [leaf_MD, *self._trainable], allow_unused=True
                )
        self._add_head_grads(dweights)
        return loss.detach(), dhidden_MD, logits_MV

    def _add_head_grads(self, grads: Sequence[Tensor | None]) -> None:
        for index, grad in enumerate(grads):
            if grad is None:
                continue
            held = self._head_grads[index]
            if held is None:
                self._head_grads[index] = grad.to(torch.promote_types(grad.dtype, torch.float32))
            else:
                held += grad


class _SummedCrossEntropy(torch.autograd.Function):
    """`F.cross_entropy(..., reduction="sum")` in float32 (float64), with one tensor `[M, V]`.

    Transformers computes the loss in float32; float64 models keep float64.
    """

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, labels_M: Tensor, ignore_index: int) -> Tensor:  # type: ignore[override]
        wide = torch.promote_types(logits_MV.dtype, torch.float32)
        logs_MV = F.log_softmax(logits_MV, -1, dtype=wide)
        counts_M1 = (labels_M != ignore_index)[:, None]
        labels_M1 = torch.where(counts_M1, labels_M[:, None], 0).long()
        ctx.logits_dtype = logits_MV.dtype
        ctx.save_for_backward(logs_MV, labels_M1, counts_M1)
        # Skips ignored labels, whose logits may be infinite, and raises for labels out of range.
        return F.nll_loss(logs_MV, labels_M, ignore_index=ignore_index, reduction="sum")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        logs_MV, labels_M1, counts_M1 = ctx.saved_tensors
        # In place; a second backward then finds another version, which autograd refuses.
        dlogits_MV = logs_MV.exp_()
        dlogits_MV.scatter_(-1, labels_M1, dlogits_MV.gather(-1, labels_M1) - 1.0)
        dlogits_MV.mul_(torch.where(counts_M1, dloss, 0.0))
        return dlogits_MV.to(ctx.logits_dtype), None, None


class _SummedGradients(TorchFunctionMode):
    """Makes matmuls with some weights add the weights' gradients to sums in backward."""

    def __init__(self, parameters: Sequence[nn.Parameter], sums: list[Tensor | None]) -> None:
        super().__init__()
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._sums = sums

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `F.linear` as `_SummedLinear` where that gives the same."""
        number = None
        if func is F.linear and len(args) > 1 and not kwargs and not torch.compiler.is_compiling():
            number = self._numbers.get(id(args[1]))
        if number is None or not _can_sum_gradient(*args[:2]):
            return func(*args, **(kwargs or {}))
        x, weight, bias = args[0], args[1], args[2] if len(args) > 2 else None
        x_MD = x.reshape(-1, x.shape[-1])
        y_MV = _SummedLinear.apply(x_MD, weight, bias, self._sums, number)
        # A view made outside of the function, so that the head may write into its logits.
        return y_MV.view(*x.shape[:-1], weight.shape[0])


def _can_sum_gradient(x: Tensor, weight: nn.Parameter) -> bool:
    """Whether the weight's gradient is one matmul, in the dtype in which it is summed."""
    if type(weight) is not nn.Parameter or type(x) is not Tensor or weight.ndim != 2:
        return False
    wide = weight.dtype in (torch.float32, torch.float64) and x.dtype == weight.dtype
    return wide and not torch.is_autocast_enabled(x.device.type)


class _SummedLinear(torch.autograd.Function):
    """`F.linear`, whose backward adds the weight's gradient to a sum."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x_MD: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sums: list[Tensor | None],
        number: int,
    ) -> Tensor:
        ctx.sums, ctx.number = sums, number
        ctx.save_for_backward(x_MD, weight)
        return F.linear(x_MD, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MV: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x_MD, weight = ctx.saved_tensors
        held = ctx.sums[ctx.number]
        if held is None:
            ctx.sums[ctx.number] = dy_MV.t().mm(x_MD)
        else:
            held.addmm_(dy_MV.t(), x_MD)
        needs_x, _, needs_bias, *_ = ctx.needs_input_grad
        dx_MD = dy_MV.mm(weight) if needs_x else None
        return dx_MD, None, dy_MV.sum(0) if needs_bias else None, None, None


def divide_loss(total: Tensor, count: Tensor, divisor: Tensor) -> Tensor:
    """Return `total / divisor`, as Transformers divides the loss; all of shape `[]`.

    `count` is the number of labels that are not ignored, `divisor` is `num_items_in_batch` or
    `count`. Where `count` is zero the gradient is zero, as in PyTorch, though the value may be NaN.
    """
    return _Divide.apply(total, count, divisor)


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, divisor: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(count, divisor)
        return total / divisor

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise SPPOError(
                "backward was asked for a graph of its own (create_graph=True), as gradient "
                "penalties and second-order optimizers do. Chunked sequences allow first "
                "derivatives alone: leave create_graph out, or train without sppo_hf."
            )
        count, divisor = ctx.saved_tensors
        return torch.where(count > 0, dloss / divisor, torch.zeros_like(dloss)), None, None


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.mul_(factor) if x.dtype == wide else x.to(wide).mul_(factor.to(wide)).to(x.dtype)


@dataclass(eq=False)
class RouterLoss:
    """Load-balancing loss of routers over one forward call."""

    num_experts: int
    """E."""
    top_k: int
    """Experts chosen by each token."""
    coefficient: float
    """Weight of this loss in the model's loss."""
    _: KW_ONLY
    backward_by_chunk: bool = False
    """Whether backward starts at each chunk's sums, which `add` returns, instead of at `value`; see
    [Note: gradient of the router loss by chunks]."""

    def __post_init__(self) -> None:
        self._chosen_E: Tensor | None = None
        self._probability_E: Tensor | None = None
        self._tokens: Tensor | int = 0

    @classmethod
    def of_call(cls, call: ForwardCall, *, backward_by_chunk: bool = False) -> RouterLoss | None:
        """Return the router loss that a call asks for; None where it is switched off.

        A model's forward reads coefficients from the model; TRL's heads from its config, where its
        trainers write their own.

        Raises:
            UnsupportedModelError: It is switched on, and its factors are not found.
        """
        if not call.router_loss:
            return None
        parts = call.parts
        owners: tuple[Any, ...] = (parts.causal_lm, parts.text_config)
        if call.head_arguments:
            owners = owners[::-1]
        values = [
            next((getattr(o, n) for o in owners for n in names if hasattr(o, n)), None)
            for names in (
                ("num_experts", "num_local_experts"),
                ("num_experts_per_tok",),
                ("router_aux_loss_coef", "aux_loss_coef"),
            )
        ]
        if any(value is None for value in values):
            raise UnsupportedModelError(
                f"{parts.name}: output_router_logits=True adds an auxiliary loss whose experts, "
                "choices and coefficient are not where Transformers' models have them. Remedy: "
                f"{WITHOUT_ROUTER_LOSS}."
            )
        return cls(*values, backward_by_chunk=backward_by_chunk)  # type: ignore[arg-type]

    def add(
        self,
        router_logits: tuple[Tensor, ...] | None,
        mask_BT: Tensor | None,
        rows: tuple[int, int],
        tokens: tuple[int, int],
    ) -> Tensor | None:
        """Add a chunk.

        Args:
            router_logits: `[B * C, E]` for every layer with a router, as the base model gives them.
            mask_BT: Nonzero for real tokens of the batch; None where no token is padding.
            rows: `(start, end)` of the chunk's rows in the batch.
            tokens: `(start, end)` of the chunk's tokens; empty where a token ran that does not
                count (see [Note: a rank without tokens] in `sequence_group`).

        Returns:
            The chunk's sums of probabilities `[E]` with their graph; None without a router.
        """
        weight = None
        if mask_BT is not None:
            mask_BC = mask_BT[slice(*rows), slice(*tokens)]
            weight = mask_BC.reshape(-1).to(dtype=torch.float32)
        whole_E: Tensor | None = None
        for logits in router_logits or ():
            weights = torch.softmax(logits, dim=-1)
            _, chosen = torch.topk(weights.detach(), self.top_k, dim=-1)
            if tokens[0] == tokens[1]:
                weight = weights.new_zeros(len(weights), dtype=torch.float32)
            counts = torch.ones_like(chosen, dtype=torch.float32)
            if weight is None:
                probability_E = weights.float().sum(dim=0)
                self._tokens = self._tokens + weights.shape[0]
            else:
                probability_E = (weights.float() * weight[:, None]).sum(dim=0)
                counts = counts * weight[:, None]
                self._tokens = self._tokens + weight.sum()
            whole_E = probability_E if whole_E is None else whole_E + probability_E
            ones_E = torch.zeros_like(probability_E, requires_grad=False)
            ones_E.scatter_add_(0, chosen.reshape(-1), counts.reshape(-1))
            # Not in place: a graph may have saved the old sum.
            self._chosen_E = ones_E if self._chosen_E is None else self._chosen_E + ones_E
        if whole_E is not None:
            kept_E = whole_E.detach() if self.backward_by_chunk else whole_E
            before_E = self._probability_E
            self._probability_E = kept_E if before_E is None else before_E + kept_E
        return whole_E

    def sum_over_ranks(
        self, total: Callable[[Tensor], Tensor], device: torch.device | None = None
    ) -> None:
        """Replace the sums by their `total` over ranks; after the last chunk.

        A rank without a router contributes zeros on `device`; None where all ranks have one, or
        none has.
        """
        if self._chosen_E is None or self._probability_E is None:
            if device is None:
                return
            zeros_E = torch.zeros(self.num_experts, dtype=torch.float32, device=device)
            self._chosen_E, self._probability_E = zeros_E, zeros_E
        tokens = torch.as_tensor(
            self._tokens, dtype=self._chosen_E.dtype, device=self._chosen_E.device
        )
        sums = total(torch.cat([self._chosen_E, self._probability_E, tokens.view(1)]))
        self._chosen_E, self._probability_E, (self._tokens,) = sums.split(
            [self.num_experts, self.num_experts, 1]
        )

    def gradient(self) -> Tensor:
        """Return the gradient `[E]` of `value` by what `add` returned, for any chunk."""
        assert self._chosen_E is not None, "a chunk was added, or sums of other ranks were"
        return self.num_experts * self._chosen_E / self._tokens**2

    def value(self) -> Tensor | None:
        """Return the loss without its coefficient, shape `[]`; None where no layer has a router."""
        if self._chosen_E is None or self._probability_E is None:
            return None
        share_E, mean_E = self._chosen_E / self._tokens, self._probability_E / self._tokens
        return torch.sum(share_E * mean_E) * self.num_experts

    def add_to_output(self, output: Any, value: Tensor | None) -> Any:
        """Return a model's `output` with `value`, `[]`, in it, and added to its loss if it has one.

        That is what models with routers return, but for the routers' logits themselves.
        """
        loss = output.get("loss")
        if value is not None and loss is not None:
            loss = loss + self.coefficient * value.to(loss.device)
        if not hasattr(output, "aux_loss"):
            output = MoeCausalLMOutputWithPast(logits=output.get("logits"))
        return dataclasses.replace(output, loss=loss, aux_loss=value)
