"""Attention run chunk by chunk: of one layer, and of a small stack of layers with any K/V store."""

import torch

from sppo_hf.attention.backends.aten import CPUFlash
from sppo_hf.attention.backends.reference import Reference
from sppo_hf.attention.chunk_attention import AttentionCall, chunk_attention
from sppo_hf.attention.kv_cache import LayerKV
from sppo_hf.attention.segments import chunk_segments

B, N, K, H, HV = 2, 4, 2, 8, 6
KV_BYTES_PER_TOKEN = B * K * (H + HV) * 8


def attend_in_chunks(q, k, v, *, sinks, rows, window, scale, bounds, backend, counters=None):
    """Attention of one layer, [B, T, N, H], and its K/V store."""
    kv, link, outs = LayerKV(bounds), None, []
    for chunk, (start, end) in enumerate(bounds):
        call = AttentionCall(
            kv=kv,
            chunk=chunk,
            chunk_start=start,
            segments=chunk_segments(start, end, rows, window=window),
            backend=backend,
            scale=scale,
            window=window,
            counters={} if counters is None else counters,
        )
        part = [x[:, :, start:end] for x in (q, k, v)]
        out, link = chunk_attention(*part, sinks_N=sinks, link=link, call=call)
        outs.append(out)
    return torch.cat(outs, 1), kv


class Layers:
    """Attention of every (layer, chunk), in the order in which the engine runs them."""

    def __init__(
        self, bounds, stores, *, rows=None, windows=(None,), softcap=None, sinks=False, backend=None
    ):
        self.bounds, self.stores, self.rows, self.windows = bounds, stores, rows, windows
        self.softcap = softcap
        self.backend = backend or (Reference() if softcap else CPUFlash())
        self.counters: dict[str, int] = {}
        torch.manual_seed(3)
        tokens = bounds[-1][1]
        self.inputs = [
            tuple(
                torch.randn(B, heads, tokens, size, dtype=torch.float64, requires_grad=True)
                for heads, size in ((N, H), (K, H), (K, HV))
            )
            for _ in stores
        ]
        self.sinks = torch.randn(N, dtype=torch.float64, requires_grad=True) if sinks else None

    def forward(self, chunks=None, after_layer=lambda: None):
        """Outputs `[chunk][layer]`, each layer fed a little of the one before it."""
        links = [None] * len(self.stores)
        outs = []
        for chunk, (start, end) in enumerate(self.bounds[:chunks]):
            before = 0.0
            outs.append([])
            for layer, kv in enumerate(self.stores):
                window = self.windows[layer % len(self.windows)]
                q, k, v = (x[:, :, start:end] for x in self.inputs[layer])
                call = AttentionCall(
                    kv=kv,
                    chunk=chunk,
                    chunk_start=start,
                    segments=chunk_segments(start, end, self.rows, window=window),
                    backend=self.backend,
                    scale=0.3,
                    window=window,
                    softcap=self.softcap,
                    counters=self.counters,
                )
                out, links[layer] = chunk_attention(
                    q + before, k + before, v, sinks_N=self.sinks, link=links[layer], call=call
                )
                before = out.mean()
                outs[-1].append(out)
                after_layer()
        return outs

    def gradients(self, outs):
        """Gradients of a weighted sum of all outputs with respect to inputs and sinks."""
        torch.manual_seed(4)
        loss = sum(
            (out * torch.randn(out.shape, dtype=out.dtype)).sum() for chunk in outs for out in chunk
        )
        leaves = [x for layer in self.inputs for x in layer if x.requires_grad]
        leaves += [] if self.sinks is None else [self.sinks]
        return torch.autograd.grad(loss, leaves, allow_unused=True)
