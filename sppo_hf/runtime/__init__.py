"""The one room for torch.distributed: transport, execution; must not know accelerate or Trainer."""
