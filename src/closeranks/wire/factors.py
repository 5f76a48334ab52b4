"""Arithmetic on thin matrices that gives the same bits on every machine.

Every rank computes an orthonormal basis from the same numbers, and must end with the same bits,
though its neighbour has another processor or more threads. So nothing here asks a library for a sum
over many elements: sums are halved, element by element, and products run over their few terms in
order. Only multiplications, additions, divisions and square roots of single elements are left,
which round alike everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from closeranks.wire import kernels

# What is left of a column, after those before it are taken out, counts from this fraction on.
_LEFT_MIN = 1e-6
_ROWS_BYTES = 256 * 1024  # of a product made at a time, so that it stays in the cache


def orthonormal(matrices: Sequence[Tensor]) -> None:
    """Make the columns of each thin matrix an orthonormal basis of what they span, in place.

    Gram-Schmidt in float64, for all matrices of about one size at once. A column that is zero, or
    depends on those before it, becomes zero.
    """
    groups: dict[tuple[int, int], list[Tensor]] = {}
    for matrix in matrices:
        rows, rank = matrix.shape
        groups.setdefault((1 << max(rows - 1, 0).bit_length(), rank), []).append(matrix)
    for (length, rank), members in groups.items():
        columns = members[0].new_zeros(len(members), rank, length, dtype=torch.float64)
        for at, matrix in enumerate(members):
            columns[at, :, : matrix.shape[0]] = matrix.t()
        _gram_schmidt(columns)
        for at, matrix in enumerate(members):
            matrix.copy_(columns[at, :, : matrix.shape[0]].t())


def _gram_schmidt(columns: Tensor) -> None:
    lengths = halved_sum(columns * columns).sqrt_()
    for k in range(columns.shape[1]):
        column = columns[:, k]
        norm = halved_sum(column * column).sqrt_()
        counts = norm > _LEFT_MIN * lengths[:, k]
        column.copy_(torch.where(counts.unsqueeze(1), column / norm.unsqueeze(1), 0.0))
        if k + 1 < columns.shape[1]:
            later, one = columns[:, k + 1 :], column.unsqueeze(1)
            later.sub_(halved_sum(later * one).unsqueeze(2) * one)


def halved_sum(values: Tensor) -> Tensor:
    """The sum over the last dimension, whose length is a power of two."""
    while values.shape[-1] > 1:
        left, right = values.chunk(2, -1)
        values = left + right
    return values.squeeze(-1)


def product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write left @ right into `out`; the terms of each element are added in order.

    Args:
        left: rows x rank, contiguous float32.
        right: rank x cols, contiguous float32.
    """
    library = kernels.wanted() if out.device.type == "cpu" else None
    (rows, rank), cols = left.shape, right.shape[1]
    if library is not None:
        library.cw_product(left.data_ptr(), right.data_ptr(), rows, cols, rank, out.data_ptr())
        return
    step = max(1, _ROWS_BYTES // (4 * cols))
    for at in range(0, rows, step):
        part, target = left[at : at + step], out[at : at + step]
        torch.mul(part[:, :1], right[0], out=target)
        for k in range(1, rank):
            target.add_(part[:, k : k + 1] * right[k])
