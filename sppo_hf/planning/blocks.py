"""A decoder layer's forward, operation by operation, as Transformers' modelling code computes it.

`work_of` walks a `LayerShape` through a `Ledger`: norms, attention and its projections, MLP or
experts. What differs between families is in their traits, so this file names none of them but in
comments.

Experts run as `grouped_mm`, which Transformers 5 takes on the CPU and on CUDA unless told
otherwise: per token and active expert its input row, both halves of the first product, the
activated half, their product and the unweighted output are saved, whatever the routing.

Knows nothing of configs, chunks, or torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from sppo_hf.planning.families import ACTIVATIONS, Activation, Norm
from sppo_hf.planning.layer import ExpertShape, LatentShape, LayerShape, MixerShape
from sppo_hf.planning.ledger import LayerWork, Ledger, Training, Value

_PLAIN = Activation()


@functools.lru_cache(maxsize=4096)
def work_of(layer: LayerShape, training: Training) -> LayerWork:
    """Returns one token's work in `layer`; remembered, for a plan asks often."""
    ledger = Ledger(training, layer.hidden_size)
    x = ledger.input
    placement = layer.traits.placement
    if placement in ("shared", "parallel"):
        first = _norm(ledger, layer, x)
        second = _norm(ledger, layer, x) if placement == "parallel" else first
        x = ledger.add(ledger.add(x, _attention(ledger, layer, first)), _mlp(ledger, layer, second))
    else:
        for block in _blocks(layer):
            inner = x if placement == "after" else _norm(ledger, layer, x)
            inner = block(ledger, layer, inner)
            x = ledger.add(x, inner if placement == "before" else _norm(ledger, layer, inner))
    if layer.per_layer_input:
        _per_layer_input(ledger, layer, x)
    return ledger.close()


def _blocks(layer: LayerShape) -> Iterator[Callable[[Ledger, LayerShape, Value], Value]]:
    """The layer's blocks, each with its norm and its residual connection."""
    if layer.num_heads or layer.mixer is not None:
        yield _mix
    if layer.mlp_width:
        yield _mlp


def _mix(ledger: Ledger, layer: LayerShape, x: Value) -> Value:
    """Attention, a recurrent or convolutional mixer, or both side by side."""
    if layer.mixer is None:
        return _attention(ledger, layer, x)
    mixed = _mixer(ledger, layer, layer.mixer, x)
    return ledger.add(_attention(ledger, layer, x), mixed) if layer.num_heads else mixed


def _mixer(ledger: Ledger, layer: LayerShape, mixer: MixerShape, x: Value) -> Value:
    """Projection, causal convolution, scan, gate and projection; the scan is estimated."""
    inner = ledger.linear(x, mixer.in_elements, "in_proj")
    ledger.scale_weights(mixer.conv_elements * mixer.conv_kernel + mixer.out_elements)
    conv = ledger.view(inner, mixer.conv_elements)
    if conv.grad:
        ledger.save(conv)
    conv = _activate(ledger, "silu", ledger.new(mixer.conv_elements, conv))
    if mixer.scan_elements:
        conv = ledger.scan(conv, mixer.scan_flops, mixer.scan_elements)
    out = ledger.new(mixer.out_elements, conv, element_bytes=x.element_bytes)
    gate = _activate(ledger, "silu", ledger.view(inner, mixer.out_elements))
    return ledger.linear(ledger.multiply(out, gate), layer.hidden_size, "out_proj")


def _norm(
    ledger: Ledger, layer: LayerShape, x: Value, *, groups: int = 1, kind: Norm | None = None
) -> Value:
    """A norm over `x`, or over `groups` equal parts of it."""
    kind = layer.traits.norm if kind is None else kind
    scaled = kind not in ("rms_unit", "layer_unit")
    if scaled:
        ledger.scale_weights(x.elements // groups)
    if kind in ("layer", "layer_unit"):
        return _layer_norm(ledger, x, groups, wide=kind == "layer_unit", scaled=scaled)
    wide = ledger.cast(x, ledger.wide_bytes)
    root = ledger.new(groups, wide)
    if x.grad:
        if kind == "centred":
            # The mean is subtracted once for the variance and once for the result.
            ledger.save(ledger.new(x.elements, wide), ledger.new(x.elements, wide), root)
        else:
            ledger.save(wide, root)
        if kind == "rms_power":
            ledger.save(ledger.new(groups, wide))
    result = ledger.new(x.elements, wide)
    if kind == "rms":
        result = ledger.cast(result, x.element_bytes)
        if ledger.trained:
            ledger.save(result)
        # Under autocast the scale is wider than a product's result, and so is what it scales.
        size = max(x.element_bytes, ledger.training.parameter_bytes)
        return ledger.new(x.elements, result, element_bytes=size, grad=ledger.trained)
    if scaled:
        if ledger.trained:
            ledger.save(result)
        result = ledger.new(x.elements, result, grad=ledger.trained)
    return ledger.cast(result, x.element_bytes)


def _layer_norm(ledger: Ledger, x: Value, groups: int, *, wide: bool, scaled: bool) -> Value:
    """LayerNorm as one operation, which saves its input, its mean and its deviation."""
    autocast = ledger.training.parameter_bytes != ledger.training.dtype_bytes
    inner = ledger.cast(x, ledger.wide_bytes) if wide or autocast else x
    trained = scaled and ledger.trained
    if x.grad or trained:
        ledger.save(inner, ledger.new(2 * groups, inner))
    result = ledger.new(x.elements, inner, grad=trained)
    return result if autocast else ledger.cast(result, x.element_bytes)


def _attention(ledger: Ledger, layer: LayerShape, x: Value) -> Value:
    traits = layer.traits
    if traits.attention_experts:
        return _attention_experts(ledger, layer, x)
    if layer.latent is not None:
        q, k, v = _latent_heads(ledger, layer, layer.latent, x)
    else:
        q, k, v = _heads(ledger, layer, x)
    out = ledger.attention(q, k, v, layer.attention_output_elements, layer.num_heads)
    if traits.heads_first:
        out = ledger.new(out.elements, out)
    if traits.attention_gate:
        out = _gated_output(ledger, layer, x, out)
    if traits.inner_norms:
        out = _norm(ledger, layer, out)
    return ledger.linear(out, layer.hidden_size, traits.names.out)


def _heads(ledger: Ledger, layer: LayerShape, x: Value) -> tuple[Value, Value, Value]:
    """Queries, keys and values as they reach attention."""
    traits, names = layer.traits, layer.traits.names
    q_width = layer.q_elements
    k_width = layer.num_kv_heads * layer.qk_head_size
    v_width = layer.num_kv_heads * layer.v_head_size
    if layer.borrows_keys:
        q = ledger.linear(x, q_width, names.q)
        if layer.head_norm:
            q = _norm(ledger, layer, q, groups=layer.num_heads)
        k = v = ledger.new(k_width, q)
        return ledger.new(q.elements, q), k, v
    if traits.fused_qkv:
        fused = ledger.linear(x, q_width + k_width + v_width, names.qkv)
        q, k, v = (ledger.view(fused, width) for width in (q_width, k_width, v_width))
    else:
        q = ledger.linear(x, q_width, names.q)
        k = ledger.linear(x, k_width, names.k)
        v = k if layer.shared_keys else ledger.linear(x, v_width, names.v)
    if layer.clipped:
        q, k, v = (_clipped(ledger, value) for value in (q, k, v))
    if layer.head_norm:
        by_head = traits.head_norm == "head"
        q = _norm(ledger, layer, q, groups=layer.num_heads if by_head else 1)
        k = _norm(ledger, layer, k, groups=layer.num_kv_heads if by_head else 1)
    if traits.value_norm:
        v = _norm(ledger, layer, v, groups=layer.num_kv_heads, kind="rms_unit")
    if traits.own_tables and (q.grad or k.grad):
        wide = ledger.wide_bytes if traits.own_tables_wide else ledger.training.parameter_bytes
        size = int(traits.own_tables * layer.qk_head_size)
        ledger.save(ledger.new(size, element_bytes=wide))
    if traits.rotary:
        q, k = ledger.new(q.elements, q), ledger.new(k.elements, k)
    return q, k, v


def _clipped(ledger: Ledger, value: Value) -> Value:
    result = ledger.new(value.elements, value)
    if value.grad:
        ledger.save(value)
    return result


def _latent_heads(
    ledger: Ledger, layer: LayerShape, latent: LatentShape, x: Value
) -> tuple[Value, Value, Value]:
    """Multi-head latent attention, expanded to all heads as it reaches attention."""
    q = x
    if latent.q_rank is not None:
        q = _norm(ledger, layer, ledger.linear(x, latent.q_rank, "q_a_proj"))
    q = ledger.linear(q, layer.q_elements, "q_proj" if latent.q_rank is None else "q_b_proj")
    low = ledger.linear(x, latent.kv_rank + latent.rope_size, "kv_a_proj_with_mqa")
    low = _norm(ledger, layer, ledger.view(low, latent.kv_rank))
    kept = layer.qk_head_size - latent.rope_size
    expanded = ledger.linear(low, layer.num_heads * (kept + layer.v_head_size), "kv_b_proj")
    q, k = ledger.new(q.elements, q), ledger.new(layer.q_elements, expanded)
    return q, k, ledger.view(expanded, layer.attention_output_elements)


def _gated_output(ledger: Ledger, layer: LayerShape, x: Value, out: Value) -> Value:
    """Attention's output times a gate: its sigmoid per element, its softplus per head."""
    if layer.traits.attention_gate == "element":
        gate = ledger.linear(x, out.elements, "gate_proj")
        gate = _activate(ledger, "sigmoid", gate)
    else:
        gate = ledger.cast(ledger.linear(x, layer.num_heads, "g_proj"), ledger.wide_bytes)
        gate = ledger.cast(_activate(ledger, "softplus", gate), out.element_bytes)
    return ledger.multiply(out, gate)


def _mlp(ledger: Ledger, layer: LayerShape, x: Value) -> Value:
    """The dense MLP, or routed experts with shared ones beside them."""
    if layer.experts is None:
        return _dense(ledger, layer, x)
    first = layer.traits.shared_first
    shared = _shared(ledger, layer, x) if first and layer.dense_width else None
    routed = _routed(ledger, layer, layer.experts, x)
    if layer.dense_width and not first:
        shared = _shared(ledger, layer, x)
    if shared is None:
        return routed
    if layer.traits.shared_gate:
        gate = _activate(ledger, "sigmoid", ledger.linear(x, 1, layer.traits.shared_gate))
        shared = ledger.multiply(gate, shared)
    return ledger.add(routed, shared)


def _dense(ledger: Ledger, layer: LayerShape, x: Value) -> Value:
    traits, names, width = layer.traits, layer.traits.names, layer.dense_width
    if not traits.gated:
        inner = _activate(ledger, layer.activation, ledger.linear(x, width, names.up))
    elif traits.fused_gate:
        fused = ledger.linear(x, 2 * width, names.gate_up)
        gate = _activate(ledger, layer.activation, ledger.view(fused, width))
        inner = ledger.multiply(gate, ledger.view(fused, width))
    else:
        gate = _activate(ledger, layer.activation, ledger.linear(x, width, names.gate))
        inner = ledger.multiply(gate, ledger.linear(x, width, names.up))
    if traits.inner_norms:
        inner = _norm(ledger, layer, inner)
    return ledger.linear(inner, layer.hidden_size, names.down)


_shared = _dense


def _routed(ledger: Ledger, layer: LayerShape, experts: ExpertShape, x: Value) -> Value:
    weights = _route(ledger, layer, experts, x)
    active, count, looped = experts.active, experts.count, layer.traits.looped_experts
    # Where each row comes from; its place among the sorted; its expert, for a bias.
    if x.grad or weights.grad:
        ledger.save_index((2 + experts.biased) * active)
    rows = ledger.cast(x, ledger.training.parameter_bytes)
    rows = ledger.new(active * x.elements, rows)
    fused = ledger.product(rows, 2 * experts.width, rows=active, matrices=count, autocast=looped)
    half = ledger.view(fused, active * experts.width)
    if layer.traits.clamped_experts:
        inner = _clamped_swiglu(ledger, half)
    else:
        inner = ledger.multiply(_activate(ledger, layer.activation, half), half)
    out = ledger.product(inner, layer.hidden_size, rows=active, matrices=count, autocast=looped)
    out = ledger.multiply(out, weights)
    if looped:
        ledger.save(out)  # as what is added at given indices
    ledger.save_fresh_index(0 if looped else active)
    return ledger.new(layer.hidden_size, out, element_bytes=x.element_bytes)


def _route(ledger: Ledger, layer: LayerShape, experts: ExpertShape, x: Value) -> Value:
    """Routing weights of the active experts."""
    traits = layer.traits
    inner = ledger.cast(x, ledger.wide_bytes) if traits.router_wide else x
    if traits.router_name:
        scores = ledger.linear(inner, experts.count, traits.router_name)
    else:
        scores = ledger.product(inner, experts.count)
    if scores.grad:
        ledger.save_index(experts.active)
    if traits.router == "softmax_of_chosen":
        chosen = ledger.new(experts.active, scores)
        chosen = _activate(ledger, "sigmoid", chosen)  # a softmax saves its result likewise
    else:
        scores = _activate(ledger, "sigmoid", ledger.cast(scores, ledger.wide_bytes))
        chosen = ledger.new(experts.active, scores)
        if chosen.grad:
            ledger.save(chosen, ledger.new(1, chosen))  # normalised to a sum of one
    size = ledger.wide_bytes if traits.routing_wide else ledger.training.parameter_bytes
    return ledger.new(experts.active, chosen, element_bytes=size)


def _clamped_swiglu(ledger: Ledger, half: Value) -> Value:
    """GPT-OSS: clamps, a sigmoid of the scaled gate, and the shifted other half."""
    if half.grad:
        ledger.save(half)  # both clamps look at the product of the fused matrix
    gate = ledger.new(half.elements, half)
    glu = ledger.multiply(gate, _activate(ledger, "sigmoid", gate))
    return ledger.multiply(ledger.new(half.elements, half), glu)


def _attention_experts(ledger: Ledger, layer: LayerShape, x: Value) -> Value:
    """JetMoE: each active expert has its own query and output projection; keys are repeated."""
    experts = layer.experts
    assert experts is not None, "experts in attention come with experts in the MLP"
    active, width = experts.active, layer.q_elements // experts.active
    weights = _route(ledger, layer, experts, x)
    if x.grad or weights.grad:
        ledger.save_index(2 * active)
    rows = ledger.new(active * x.elements, x)
    q = ledger.product(rows, width, rows=active, matrices=experts.count)
    kv = ledger.linear(x, 2 * width, "kv_proj")
    k, v = ledger.new(layer.q_elements, kv), ledger.new(layer.q_elements, kv)
    if q.grad:
        ledger.save(q)  # as what is added at given indices
        ledger.save_fresh_index(0)
    q = ledger.new(q.elements, q)
    out = ledger.attention(q, k, v, layer.attention_output_elements, layer.num_heads)
    rows = ledger.new(out.elements, out)
    out = ledger.product(rows, layer.hidden_size, rows=active, matrices=experts.count)
    out = ledger.multiply(out, weights)
    ledger.save(out)
    return ledger.new(layer.hidden_size, out)


def _per_layer_input(ledger: Ledger, layer: LayerShape, x: Value) -> Value:
    """Gemma 4: the layer's own embedding of the token, gated by the residual stream."""
    width = layer.per_layer_input
    gate = ledger.linear(x, width, "per_layer_input_gate")
    gate = _activate(ledger, layer.activation, gate)
    embedding = ledger.new(width, x, grad=ledger.trained)
    out = ledger.linear(ledger.multiply(gate, embedding), layer.hidden_size, "per_layer_projection")
    return ledger.add(x, _norm(ledger, layer, out))


def _activate(ledger: Ledger, name: str, x: Value) -> Value:
    """An activation, which saves its input unless `ACTIVATIONS` says otherwise."""
    result = ledger.new(x.elements, x)
    if not x.grad:
        return result
    rule = ACTIVATIONS.get(name, _PLAIN)
    if rule.saves_input:
        ledger.save(x)
    for _ in range(rule.own + (rule.own_trained if ledger.trained else 0)):
        ledger.save(ledger.new(x.elements, x))
    for _ in range(rule.masks):
        ledger.save(ledger.new(x.elements, x, element_bytes=1))
    if rule.saves_result:
        ledger.save(result)
    return result
