"""Chunked causal attention (KV store, kernels, merging); must not know schedules or offload."""
