"""Conversion, the chunk loop, layer hooks, recomputation, loss; one rank, no Accelerate."""
