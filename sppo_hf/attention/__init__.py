"""Chunked causal attention: K/V stores, kernels, merging of partial results."""
