"""The one order in which n things are summed, whoever sums them: a binary tree over their numbers.

    n = 6        ((0 + 1) + (2 + 3)) + (4 + 5)

A node covers the numbers [lo, hi) and splits where the left part is the largest power of two that
leaves something for the right. So [0, 4) is the same node in every tree that is large enough, and
partial sums of siblings can be combined by anybody with the same bits.

Pure: knows numbers only. kernels.c and twin.py follow it for buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def split(lo: int, hi: int) -> int:
    """Where the node over [lo, hi), which is not a leaf, splits."""
    assert hi - lo >= 2, "a leaf does not split"
    half = 1 << (hi - lo - 1).bit_length() - 1
    return lo + half


def fold(values: Sequence[T], add: Callable[[T, T], T]) -> T:
    """The sum of the values in the order of the tree."""

    def node(lo: int, hi: int) -> T:
        if hi - lo == 1:
            return values[lo]
        middle = split(lo, hi)
        return add(node(lo, middle), node(middle, hi))

    return node(0, len(values))
