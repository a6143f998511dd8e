"""Causal attention kernels behind one interface."""
