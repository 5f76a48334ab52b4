"""Tensors to fewer bytes and back. Knows tensors and bytes; must not know ranks or networks.

`formats` names what there is. A `codec` works element by element (`cast`, `int8` with its `kernels`
in C); `powersgd` sends factors of matrices. `feedback` keeps what was not sent for the next time,
and `choose` says which format a link deserves.
"""
