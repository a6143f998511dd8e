"""What one token costs in one decoder layer, entered operation by operation.

A `Ledger` plays autograd for numbers: a `Value` has a width and a dtype but no elements; each
operation enters its FLOPs, and the values it would save for backward, by the rules of torch's own
derivatives (a product saves its factors if the other needs a gradient, SiLU its input, ReLU its
result ...). Values that share memory share a storage, and a storage counts once, as it does for
`saved_tensors_hooks`. So one description of a layer (`blocks`) gives the bytes of its frame, whole,
reduced to matrix products or to a skeleton, with and without LoRA, and the FLOPs of forward,
backward and recomputation.

All numbers are per token. Knows nothing of model families or configs.
"""

from __future__ import annotations

from dataclasses import dataclass

from sppo_hf.planning.lora import LoraShape

FLOAT32_BYTES = 4
INDEX_BYTES = 8

# The engine computes a product again rather than keep it if it sums over at most an eighth of the
# layer's width: `model/products.py`.
_THIN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a layer is trained, as far as saved bytes and FLOPs depend on it."""

    dtype_bytes: int
    """Bytes of one element in matrix products: 2 for bf16."""

    parameter_bytes: int
    """Bytes of one weight. More than `dtype_bytes` under autocast: the residual stream and norms
    then keep the weights' dtype, and each matrix product casts its input."""

    lora: LoraShape | None = None
    """With adapters all other weights are frozen; without, all are trained."""

    input_requires_grad: bool = True
    """Whether the layer's input needs a gradient. Under LoRA the first layer's does not."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor's part for one token."""

    elements: int
    element_bytes: int
    grad: bool
    """Whether it needs a gradient."""

    storage: int
    """Its memory; views share it."""

    products: frozenset[int]
    """Matrix products it depends on, otherwise than through other ones or through attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """One token's work in one layer. Attention between tokens is not in it: it grows with them."""

    forward_flops: int
    """Matrix products of the forward, adapters included."""

    input_gradient_flops: int
    """Matrix products of backward that give the gradient of a product's input."""

    weight_gradient_flops: int
    """Matrix products of backward that give the gradient of a trained weight."""

    skeleton_recompute_flops: int
    """Matrix products that run again in backward if only the skeleton was kept: the thin ones, and
    those that a saved value depends on (`model/products.py`, "needless products")."""

    products_recompute_flops: int
    """Those that run again if the thick products were kept: the thin ones."""

    skeleton_bytes: int
    """Layer input, attention output, log-sum-exp."""

    products_bytes: int
    """The skeleton and the outputs of thick products that backward needs."""

    whole_bytes: int
    """All that autograd saves, without keys, values and what is the same in all layers."""

    total_weights: int
    """Parameters of the layer, all experts and norms counted; biases and adapters left out."""

    adapter_weights: int
    """Parameters of the layer's adapters."""


class Ledger:
    """Enters the operations of one layer's forward, in order."""

    def __init__(self, training: Training, width: int) -> None:
        self.training = training
        self.wide_bytes = max(FLOAT32_BYTES, training.parameter_bytes)
        """Bytes of what is computed in float32 whatever the model's dtype (float64 stays)."""
        self._width = width
        self._storage_bytes: list[int] = []
        self._saved: set[int] = set()
        self._forward = self._input_gradient = self._weight_gradient = 0
        self._thin_before_last_save = self._thin = 0
        self._product_bytes: list[int] = []
        self._thick: list[tuple[int, frozenset[int]]] = []
        """Of each product its FLOPs (0 if it is thin) and what its input depends on."""
        self._thin_products: frozenset[int] = frozenset()
        self._needed: frozenset[int] = frozenset()
        self._attention_bytes = 0
        self._weights = self._adapters = 0
        self.input = self._new(
            width, training.parameter_bytes, training.input_requires_grad, frozenset()
        )

    @property
    def trained(self) -> bool:
        """Whether the layer's own weights get gradients."""
        return self.training.lora is None

    # -- values ------------------------------------------------------------------------------

    def new(
        self, elements: int, *sources: Value, element_bytes: int | None = None, grad: bool = False
    ) -> Value:
        """A value in fresh memory, computed elementwise from `sources`.

        Args:
            elements: its width.
            *sources: what it is computed from; it needs a gradient if one of them does.
            element_bytes: those of the widest source when None.
            grad: it needs a gradient anyway.
        """
        if element_bytes is None:
            element_bytes = max(source.element_bytes for source in sources)
        needs = grad or any(source.grad for source in sources)
        products = frozenset[int]().union(*(source.products for source in sources))
        return self._new(elements, element_bytes, needs, products)

    def view(self, value: Value, elements: int) -> Value:
        """A part of `value` in the same memory."""
        return Value(elements, value.element_bytes, value.grad, value.storage, value.products)

    def cast(self, value: Value, element_bytes: int) -> Value:
        """`value` itself if it has that dtype, else a copy."""
        if value.element_bytes == element_bytes:
            return value
        return self.new(value.elements, value, element_bytes=element_bytes)

    def save(self, *values: Value) -> None:
        """Enter that autograd saves `values`."""
        for value in values:
            self._saved.add(value.storage)
            self._needed |= value.products
            self._thin_before_last_save = self._thin

    def save_index(self, elements: int) -> None:
        """Enter that autograd saves that many 64-bit indices."""
        self.save(self._new(elements, INDEX_BYTES, False, frozenset()))

    def save_fresh_index(self, elements: int) -> None:
        """Enter that autograd saves indices that were written into blank memory.

        The engine cannot follow what reaches such memory, and keeps all products made so far.
        """
        self.save_index(elements)
        self._needed |= frozenset(range(len(self._product_bytes))) - self._thin_products

    # -- operations --------------------------------------------------------------------------

    def linear(self, x: Value, out: int, name: str = "") -> Value:
        """A linear module: a matrix product, and an adapter's two if LoRA adapts `name`."""
        lora = self.training.lora
        base = self.product(x, out)
        if lora is None or not lora.adapts(name):
            return base
        inner = self.cast(x, lora.dtype_bytes)
        if lora.dropout > 0:
            mask = self._new(x.elements, 1, False, frozenset())
            if inner.grad:
                self.save(mask)
            inner = self.new(x.elements, inner)
        if lora.autocast and lora.dtype_bytes > self.training.dtype_bytes:
            inner = self.new(x.elements, inner, element_bytes=self.training.dtype_bytes)
        low = self.product(inner, lora.rank, adapter=True)
        high = self.product(low, out, adapter=True)
        return self.new(out, base, high, element_bytes=base.element_bytes)

    def product(
        self,
        x: Value,
        out: int,
        *,
        rows: int = 1,
        matrices: int = 1,
        autocast: bool = True,
        adapter: bool = False,
    ) -> Value:
        """A matrix product with a weight.

        Args:
            x: input, `rows` of them side by side.
            out: width of one row's output.
            rows: rows per token: the experts it meets.
            matrices: weights there are, for counting parameters: all experts.
            autocast: whether autocast reaches it.
            adapter: it belongs to LoRA, so its weight is trained.
        """
        training = self.training
        trained = adapter or training.lora is None
        flops = 2 * x.elements * out
        if autocast and training.parameter_bytes != training.dtype_bytes:
            x = self.cast(x, training.dtype_bytes)
        if trained:
            self.save(x)
            self._weight_gradient += flops
        self._input_gradient += flops if x.grad else 0
        self._forward += flops
        weights = x.elements // rows * out * matrices
        self._adapters += weights if adapter else 0
        self._weights += 0 if adapter else weights
        thin = _THIN * (x.elements // rows) <= self._width
        self._thin += flops if thin else 0
        index = len(self._product_bytes)
        self._thin_products |= frozenset((index,)) if thin else frozenset()
        self._product_bytes.append(rows * out * x.element_bytes)
        self._thick.append((0 if thin else flops, x.products))
        products = x.products if thin else frozenset((index,))
        return self._new(rows * out, x.element_bytes, x.grad or trained, products)

    def scan(self, x: Value, flops: int, saved: int) -> Value:
        """A recurrence over the tokens in float32: no weights, and no product that is kept.

        Args:
            x: what goes in.
            flops: of the forward; gradients of both factors of its products take twice as many.
            saved: float32 elements that autograd saves.
        """
        self._forward += flops
        self._input_gradient += 2 * flops if x.grad else 0
        self._thin += flops
        inner = self.new(saved, x, element_bytes=self.wide_bytes)
        if x.grad:
            self.save(inner)
        return inner

    def multiply(self, a: Value, b: Value) -> Value:
        """Elementwise product; `b` may have fewer elements, which are broadcast."""
        if b.grad:
            self.save(a)
        if a.grad:
            self.save(b)
        return self.new(max(a.elements, b.elements), a, b)

    def add(self, a: Value, b: Value) -> Value:
        """Elementwise sum, which saves nothing."""
        return self.new(a.elements, a, b)

    def scale_weights(self, count: int) -> None:
        """Count the parameters of a norm's scale."""
        self._weights += count

    def attention(self, q: Value, k: Value, v: Value, out: int, heads: int) -> Value:
        """The engine's attention node: it saves q, its output and its log-sum-exp.

        Keys and values are in a store of their own.
        """
        size = self.training.dtype_bytes
        q, k, v = (self.cast(x, size) for x in (q, k, v))
        grad = q.grad or k.grad or v.grad
        result = self._new(out, size, grad, frozenset())
        sums = self._new(heads, max(FLOAT32_BYTES, size), False, frozenset())
        if grad:
            self.save(q, result, sums)
        self._attention_bytes = out * size + heads * sums.element_bytes
        return result

    def close(self) -> LayerWork:
        """The sums."""
        skeleton = self._storage_bytes[self.input.storage] + self._attention_bytes
        return LayerWork(
            forward_flops=self._forward,
            input_gradient_flops=self._input_gradient,
            weight_gradient_flops=self._weight_gradient,
            skeleton_recompute_flops=self._needed_flops() + self._thin_before_last_save,
            products_recompute_flops=self._thin_before_last_save,
            skeleton_bytes=skeleton,
            products_bytes=skeleton + sum(self._product_bytes[i] for i in self._needed),
            whole_bytes=sum(self._storage_bytes[i] for i in self._saved),
            total_weights=self._weights,
            adapter_weights=self._adapters,
        )

    def _needed_flops(self) -> int:
        """Of the thick products that a saved value depends on, through others too."""
        needed: set[int] = set()
        ahead = list(self._needed)
        while ahead:
            index = ahead.pop()
            if index not in needed:
                needed.add(index)
                ahead += self._thick[index][1]
        return sum(self._thick[index][0] for index in needed)

    def _new(
        self, elements: int, element_bytes: int, grad: bool, products: frozenset[int]
    ) -> Value:
        self._storage_bytes.append(elements * element_bytes)
        return Value(elements, element_bytes, grad, len(self._storage_bytes) - 1, products)
