"""Numbers only (model shape, FLOPs, chunk bounds, memory, the plan); must not know torch."""
