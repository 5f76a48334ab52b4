"""torch's own DDP tests, run against any DistributedDataParallel class. See README.md."""
