"""The model's own next-token loss, without logits of the whole sequence.

Hidden states of a chunk go through the model's own head in tiles; each tile's cross-entropy and its
gradient are computed on the spot and the tile's logits are dropped. Forward thus leaves behind one
gradient of the size of the hidden states and one of the size of the head's trainable weights,
nothing runs twice, and backward only multiplies by the scale that arrives.

What is large is made once: a tile's gradient of the logits lies where its logarithms of
probabilities were, and a product with a trained weight adds its gradient to the sum over tiles
(where they are of one dtype), so that no tile has a gradient of the size of the head beside it.

The sum over chunks is then divided as Transformers divides: by `num_items_in_batch`, or by the
number of labels that count; with none that count the loss is NaN and every gradient zero, as in
PyTorch.

Not covered: losses that are not a sum over tokens; the engine gives such a model whole-sequence
logits instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from sppo_hf.engine.structure import without_parameter_hooks
from sppo_hf.engine.versions import ReadTensors
from sppo_hf.errors import SPPOError

if TYPE_CHECKING:
    from sppo_hf.engine.loss import LigerTile

# B batch rows, C tokens of a chunk, M tokens of a tile, D model width, V vocabulary.

_HALF_SCALE = 1024.0
"""Gradients of float16 logits are computed at this scale, or small ones would underflow."""

Head = Callable[[Tensor], Tensor]
"""Maps hidden states `[1, M, D]` to logits `[1, M, V]`; the model's own code."""


@dataclass(eq=False)
class ChunkedLoss:
    """Sum of the losses of one forward call's chunks."""

    head: Head
    """The model's head."""
    parameters: Sequence[nn.Parameter]
    """Parameters that `head` reads; those that require gradients get them."""
    _: KW_ONLY
    tile_tokens: int
    """Tokens per tile, bounds the bytes of logits alive at once."""
    ignore_index: int = -100
    """The label that does not count."""
    on_logits: Callable[[Tensor, slice], None] | None = None
    """Is given the logits `[M, V]` of each tile, and which tokens of the chunk, its rows laid one
    behind the other, they are of."""
    fused: LigerTile | None = None
    """A kernel that does head and loss of a tile at once, or None."""
    head_in_backward: bool = False
    """Whether the head's gradients must come out of the ordinary backward, as FSDP2 and hooks on
    the head's modules demand; each tile's logits are then computed a second time there."""
    reads: ReadTensors | None = None
    """What the head reads; as it is now it is there that second time, too."""

    def __post_init__(self) -> None:
        self._trainable = [p for p in self.parameters if p.requires_grad]
        self._head_grads: list[Tensor | None] = [None] * len(self._trainable)
        self._reads = ReadTensors.of_named(("a weight of the head", p) for p in self.parameters)
        self._versions = self._reads.versions()
        self.scale = 1.0

    def add(self, hidden_BCD: Tensor, labels_BC: Tensor, *, last: bool) -> Tensor:
        """Summed loss of one chunk, float32 (float64 for float64 models), shape `[]`.

        Labels are those of the tokens that follow. The `last` chunk's node hands out the gradients
        of the head's parameters, for all chunks; it is the first to run in backward.
        """
        grad = torch.is_grad_enabled() and (hidden_BCD.requires_grad or bool(self._trainable))
        if grad and self.head_in_backward:
            return self._checkpointed(hidden_BCD, labels_BC)
        with torch.no_grad():
            total, dhidden_BCD = self.tiles(hidden_BCD, labels_BC, grad)
        if dhidden_BCD is None:
            return total
        # Those that no tile used are no part of the graph, as without us: their hooks do not run.
        used = [
            (index, parameter)
            for index, parameter in enumerate(self._trainable)
            if last and self._head_grads[index] is not None
        ]
        indices, parameters = [index for index, _ in used], [parameter for _, parameter in used]
        return _TiledLoss.apply(hidden_BCD, total, dhidden_BCD, self, last, indices, *parameters)

    def _checkpointed(self, hidden_BCD: Tensor, labels_BC: Tensor) -> Tensor:
        """Summed loss by plain autograd, whose backward runs the head again tile by tile.

        FSDP2 gathers the head's weights when a gradient reaches what the head returned, and frees
        them when a backward ends; a backward of our own inside forward would free them too early.
        Hooks on the head's modules would see there what is not yet divided by the labels' number.
        """
        hidden_MD = hidden_BCD.reshape(-1, hidden_BCD.shape[-1])
        labels_M = labels_BC.reshape(-1)
        losses = []
        reads = ReadTensors(()) if self.reads is None else self.reads
        versions = reads.versions()

        def run(hidden_MD: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
            with reads.as_in_forward():
                return self._tile_loss(hidden_MD, labels_M)

        for start in range(0, hidden_MD.shape[0], self.tile_tokens):
            tile = slice(start, start + self.tile_tokens)
            loss, logits_MV = checkpoint(run, hidden_MD[tile], labels_M[tile], use_reentrant=False)
            reads.leave_out_own_writes(versions)
            losses.append(loss)
            if self.on_logits is not None:
                self.on_logits(logits_MV.detach(), tile)
        return torch.stack(losses).sum()

    def refuse_changes(self) -> None:
        """Refuse weights of the head that are not those of forward, as autograd would.

        Raises:
            SPPOError: They were changed in place.
        """
        self._reads.refuse_changes(self._versions, "the loss's backward")

    def _tile_loss(self, hidden_MD: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
        self.refuse_changes()  # this may be backward, see `_checkpointed`
        # Not indexed, or backward would make zeros for another tile of logits.
        logits_MV = self.head(hidden_MD[None]).squeeze(0)
        labels_M = labels_M.to(logits_MV.device)
        return _SummedCrossEntropy.apply(logits_MV, labels_M, self.ignore_index), logits_MV

    def tiles(
        self, hidden_BCD: Tensor, labels_BC: Tensor, grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Loss sum and gradient of the hidden states; adds up the head's gradients."""
        hidden_MD = hidden_BCD.reshape(-1, hidden_BCD.shape[-1])
        labels_M = labels_BC.reshape(-1)
        total: Tensor | None = None
        dhidden_MD = torch.empty_like(hidden_MD) if grad else None
        fused = self.fused if grad and self.on_logits is None else None
        tile_tokens = self.tile_tokens if fused is None else fused.most_tokens(self.tile_tokens)
        for start in range(0, hidden_MD.shape[0], tile_tokens):
            tile = slice(start, start + tile_tokens)
            loss, dtile, logits_MV = self._tile(hidden_MD[tile], labels_M[tile], grad, fused)
            total = loss if total is None else total + loss
            if dhidden_MD is not None and dtile is not None:
                dhidden_MD[tile] = dtile
            if self.on_logits is not None:
                self.on_logits(logits_MV.detach(), tile)
            del logits_MV, dtile  # or they would live on beside the next tile's
        assert total is not None, "a chunk has at least one token"
        return total, None if dhidden_MD is None else dhidden_MD.view_as(hidden_BCD)

    def _tile(
        self, hidden_MD: Tensor, labels_M: Tensor, grad: bool, fused: LigerTile | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        if fused is not None:
            args = (hidden_MD, labels_M, self._trainable, self.ignore_index)
            loss, dhidden_MD, dweights = fused(*args)
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
                logits_MV = logits_MV.new_empty(0)  # nobody needs them any more
            # The ordinary backward runs outside autocast; so must this one.
            # The head's own hooks see the sum, when `_TiledLoss` hands it out.
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

    def take_head_grads(self, indices: Sequence[int]) -> list[Tensor | None]:
        """Hand over (once) the summed gradients of some of the head's trainable parameters."""
        taken = [self._head_grads[index] for index in indices]
        for index in indices:
            self._head_grads[index] = None
        return taken


class _SummedCrossEntropy(torch.autograd.Function):
    """`F.cross_entropy(..., reduction="sum")` in float32 (float64), with one tensor of `[M, V]`.

    Transformers computes the loss in float32; wider models keep their width.
    """

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, labels_M: Tensor, ignore_index: int) -> Tensor:  # type: ignore[override]
        wide = torch.promote_types(logits_MV.dtype, torch.float32)
        logs_MV = F.log_softmax(logits_MV, -1, dtype=wide)
        counts_M1 = (labels_M != ignore_index)[:, None]
        labels_M1 = torch.where(counts_M1, labels_M[:, None], 0).long()
        ctx.logits_dtype = logits_MV.dtype
        ctx.save_for_backward(logs_MV, labels_M1, counts_M1)
        # Skips labels that do not count, which may stand at infinite logits, and names bad ones.
        return F.nll_loss(logs_MV, labels_M, ignore_index=ignore_index, reduction="sum")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        logs_MV, labels_M1, counts_M1 = ctx.saved_tensors
        # In place: a second backward finds another version of it, and autograd refuses.
        dlogits_MV = logs_MV.exp_()
        dlogits_MV.scatter_(-1, labels_M1, dlogits_MV.gather(-1, labels_M1) - 1.0)
        dlogits_MV.mul_(torch.where(counts_M1, dloss, 0.0))
        return dlogits_MV.to(ctx.logits_dtype), None, None


class _SummedGradients(TorchFunctionMode):
    """Has the products with some weights add their gradients to sums, instead of returning them."""

    def __init__(self, parameters: Sequence[nn.Parameter], sums: list[Tensor | None]) -> None:
        super().__init__()
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._sums = sums

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `F.linear` as `_SummedLinear` where that is the same; all else is as it is."""
        number = None
        if func is F.linear and len(args) > 1 and not kwargs and not torch.compiler.is_compiling():
            number = self._numbers.get(id(args[1]))
        if number is None or not _is_plain_product(*args[:2]):
            return func(*args, **(kwargs or {}))
        x, weight, bias = args[0], args[1], args[2] if len(args) > 2 else None
        x_MD = x.reshape(-1, x.shape[-1])
        y_MV = _SummedLinear.apply(x_MD, weight, bias, self._sums, number)
        # Here and not in there, or the head could not write into its logits.
        return y_MV.view(*x.shape[:-1], weight.shape[0])


def _is_plain_product(x: Tensor, weight: nn.Parameter) -> bool:
    """Whether the weight's gradient is one product of the dtype in which it is summed."""
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


class _TiledLoss(torch.autograd.Function):
    """The loss of a chunk whose gradients are there already."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden_BCD: Tensor,
        total: Tensor,
        dhidden_BCD: Tensor,
        loss: ChunkedLoss,
        last: bool,
        indices: list[int],
        *parameters: Tensor,
    ) -> Tensor:
        ctx.loss = loss
        ctx.last = last
        ctx.indices = indices
        ctx.spent = False
        ctx.parameter_dtypes = [p.dtype for p in parameters]
        ctx.save_for_backward(dhidden_BCD)
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        if ctx.spent:
            raise SPPOError(
                "backward ran twice through a chunked loss. Chunked sequences allow one backward "
                "per forward (retain_graph=True is not supported); run the forward again."
            )
        ctx.spent = True
        if ctx.last:  # later on a hook may have stepped an optimizer
            ctx.loss.refuse_changes()
        (dhidden_BCD,) = ctx.saved_tensors
        # In the wide type: a bfloat16 scale would bias every gradient, a float16 one could vanish.
        factor = dtotal / ctx.loss.scale
        grads = [
            None if g is None else g.mul_(factor.to(g.dtype)).to(dtype)
            for g, dtype in zip(
                ctx.loss.take_head_grads(ctx.indices), ctx.parameter_dtypes, strict=True
            )
        ]
        return _scaled(dhidden_BCD, factor), None, None, None, None, None, *grads


def divide_loss(total: Tensor, count: Tensor, divisor: Tensor) -> Tensor:
    """Divide the summed loss as Transformers does, with PyTorch's gradient for an empty mean.

    All are of shape `[]`; `count` labels count, `divisor` is `num_items_in_batch` or `count`.

    Returns:
        `total / divisor`; its gradient is zero where `count` is zero, although the value is NaN.
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
