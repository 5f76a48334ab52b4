"""closeranks: DistributedDataParallel for PyTorch.

The names below are the whole public surface. They are loaded on first use, so that starting the
launcher imports no torch.
"""
