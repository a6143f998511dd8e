"""Conversion, chunk loop, loss, recompute; must not know torch.distributed or accelerate."""
