"""Ranks: stages, executor, transport, gradients, checkpoints, watchdog; no Accelerate."""
