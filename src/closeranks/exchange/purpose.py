"""What a rank came to a collective for, in one word that the other ranks can read and compare.

    bits 0-39  number of elements    40-47  type    48-59  fold or source    60-63  collective

Pure: knows names and numbers. What ranks do when words differ is decided where they are compared.
"""

from __future__ import annotations

import functools

import torch

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier")
FOLDS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
_TYPES = sorted(
    (value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str
)
_TYPES = list(dict.fromkeys(_TYPES))  # some have two names


class Purpose:
    """A collective, as far as all ranks have to agree on it."""

    __slots__ = ("dtype", "kind", "word")

    def __init__(self, kind: str, dtype: torch.dtype, numel: int, detail: int = 0) -> None:
        """`detail` is the fold's number among FOLDS, or the rank that broadcasts."""
        self.kind = kind
        self.dtype = dtype
        self.word = _prefix(kind, dtype, detail) | numel & (1 << 40) - 1


@functools.cache
def _prefix(kind: str, dtype: torch.dtype, detail: int) -> int:
    return KINDS.index(kind) << 60 | (detail & 0xFFF) << 48 | _TYPES.index(dtype) << 40


def describe(word: int) -> str:
    """In words for a message."""
    if word >> 60 >= len(KINDS) or word >> 40 & 0xFF >= len(_TYPES):
        return "something unknown"
    kind, detail = KINDS[word >> 60], word >> 48 & 0xFFF
    if kind == "barrier":
        return kind
    name = f"{kind} from rank {detail}" if kind == "broadcast" else kind
    if kind in ("all_reduce", "reduce_scatter"):
        name = f"{kind} ({FOLDS[detail] if detail < len(FOLDS) else '?'})"
    return f"{name} of {word & (1 << 40) - 1} x {_TYPES[word >> 40 & 0xFF]}"
