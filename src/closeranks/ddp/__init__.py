"""Door 1: one training step as the wrapped module sees it.

Read in this order: `wrapper` (the class), `upkeep` (its other half, between steps), `options` (what
the constructor accepts), `parameters`, `replicate` (equal replicas at the start), `outputs` (where
a backward comes in), `comm_hook`, `uneven` (join), `delayed`, `optimizers`, `mixed_precision`,
`copying`, `logging_data`, `torch_names`, `sync_batchnorm`.
"""
