"""What formats that work element by element have in common: encode, bytes_for, sum.

A codec is without state, and every call gives the same bits for the same values, whoever calls it.
So ranks that decode the same bytes end with the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Codec:
    """float32 values to bytes, and the sum of several such encodings back to values."""

    name = ""
    block = 1  # elements that share something; a flat tensor is cut between blocks only

    def bytes_for(self, numel: int) -> int:
        """How long the encoding of so many elements is."""
        raise NotImplementedError

    def encode(self, values: Tensor, residual: Tensor | None, out: Tensor) -> None:
        """Write values + residual into the bytes of `out`; what they do not hold stays in residual.

        Args:
            values: flat, float32; not changed.
            residual: of the same length, or None where nothing is to be kept. Where the sum is not
                finite the residual becomes zero.
            out: bytes_for(values.numel()) bytes.
        """
        given = values if residual is None else residual.add_(values)
        self.write(given, out)
        if residual is not None:
            residual.sub_(self.read(out, residual.numel()))
            torch.nan_to_num_(residual, 0.0, 0.0, 0.0)

    def sum(self, encoded: Sequence[Tensor], out: Tensor, scale: float) -> None:
        """The sum of what several encodings hold, in the order of a binary tree, times scale."""
        total = tree([functools.partial(self.read, each, out.numel()) for each in encoded])
        torch.mul(total, scale, out=out)

    # What a format has to say itself.

    def write(self, values: Tensor, out: Tensor) -> None:
        """The encoding of the values."""
        raise NotImplementedError

    def read(self, encoded: Tensor, numel: int) -> Tensor:
        """New float32 values from an encoding."""
        raise NotImplementedError


def tree(leaves: Sequence[Callable[[], Tensor]]) -> Tensor:
    """The sum of the leaves, new tensors, over halves that begin with the largest power of two."""
    if len(leaves) == 1:
        return leaves[0]()
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return tree(leaves[:half]).add_(tree(leaves[half:]))
