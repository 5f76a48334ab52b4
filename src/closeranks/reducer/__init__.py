"""Gradients to buckets to averaged gradients, at the right moments of the backward pass.

Read in this order: `plan` (which gradients travel together), `bucket` (their memory), `reducer`
(when what happens), `tail` (what ranks tell each other at the end), `extra` (what came late),
`increments` (what was exchanged before). `naive` does all of it with one all-reduce a gradient.
"""
