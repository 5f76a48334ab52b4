"""Door 1: one training step as the wrapped module sees it.

Read in this order: `wrapper` (the class), `options` (what its constructor accepts), `replicate`
(equal replicas at the start), `outputs` (where a backward comes in), `comm_hook`, `uneven`
(join), `delayed`, `optimizers`, `copying`, `logging_data`, `sync_batchnorm`.
"""
