"""Memory that the ranks of one host share, and how they wait for each other in it.

Read in this order: `memory` (a piece of it, and how another process finds it), `page` (the words by
which ranks tell where they are), `peers` (whether the others live), `team` (all of it together),
`kernels` (sums over buffers of several ranks: in C, `kernels.c`, or with torch, `twin`).

Knows ranks, words, bytes and flat tensors; must not know gradients, groups or models.
"""
