"""Door 2: the c10d backend "closeranks", for what is built on torch.distributed.

Read in this order: `registration` (how torch learns the name, without importing torch), `group`
(a process group: what goes through shared memory, and what to gloo), `line` (a group's collectives,
one after the other, in the caller's thread or in one of its own), `work` (what the caller holds).
`untraced` keeps torch.compile out of them.

Knows c10d's groups, options and works; the sums and the memory are exchange's.
"""
