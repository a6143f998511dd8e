"""How fast a device, its copies, its disk and its attention kernels are, by measuring."""
