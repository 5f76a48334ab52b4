"""A fraction of the bytes: each gradient matrix as the product of two thin ones (PowerSGD).

For a matrix M (rows x cols) of every rank, and a thin Q (cols x rank) that all ranks have alike:

    Phase 1  left     P = M Q;               the sum of all ranks' P is what travels first
    Phase 2  right    P is made orthonormal; Q = M' P; the sum of all ranks' Q travels second
    Phase 3  product  the result is P Q', and Q is where the next exchange begins

M is the gradient plus what was not sent before, and M - P Q' (with this rank's own Q) is what is
not sent now. One step of power iteration per exchange, each beginning with the last one's Q, finds
the directions in which gradients are large. It compresses from the first exchange on.

What is no matrix, or would hardly become smaller, travels as it is, behind the P. This file knows
tensors and phases; who sums between the phases is not its business.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from closeranks.wire.factors import orthonormal, product

_SAVES_MIN = 2  # times fewer elements, or a matrix is not worth two products

Matrix = tuple[str, int, int, int]  # name, start, rows, cols


@dataclass(frozen=True)
class Shape:
    """How a flat tensor is divided: into matrices, and into stretches that travel as they are."""

    rank: int
    matrices: tuple[Matrix, ...]
    rest: tuple[tuple[int, int], ...]  # from, to

    @property
    def left_numel(self) -> int:
        rest = sum(stop - start for start, stop in self.rest)
        return self.rank * sum(rows for _, _, rows, _ in self.matrices) + rest

    @property
    def right_numel(self) -> int:
        return self.rank * sum(cols for _, _, _, cols in self.matrices)


def shape_of(pieces: Sequence[Matrix], numel: int, rank: int) -> Shape:
    """Which pieces of a flat tensor are worth two factors."""
    matrices = tuple(
        (name, start, rows, cols)
        for name, start, rows, cols in pieces
        if _SAVES_MIN * rank * (rows + cols) <= rows * cols
    )
    rest, at = [], 0
    for _, start, rows, cols in matrices:
        rest.append((at, start))
        at = start + rows * cols
    rest.append((at, numel))
    return Shape(rank, matrices, tuple((a, b) for a, b in rest if a < b))


class PowerSgd:
    """The Qs of all matrices of a model, and the three phases."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.qs: dict[str, Tensor] = {}  # cols x rank, the same on every rank

    # Phase 1

    def left(self, shape: Shape, given: Tensor) -> Tensor:
        """All P = M Q, then the rest; to be summed over ranks."""
        out = given.new_empty(shape.left_numel)
        for matrix, target in zip(shape.matrices, _lefts(shape, out), strict=True):
            torch.mm(_matrix(given, matrix), self._q(matrix, given.device), out=target)
        _copy_rest(shape, given, _tail(shape, out))
        return out

    # Phase 2

    def right(self, shape: Shape, left: Tensor, given: Tensor) -> Tensor:
        """All Q = M' P, to be summed over ranks; P becomes orthonormal in place."""
        lefts = _lefts(shape, left)
        orthonormal(lefts)
        out = given.new_empty(shape.right_numel)
        for matrix, p, target in zip(shape.matrices, lefts, _rights(shape, out), strict=True):
            torch.mm(p.t(), _matrix(given, matrix), out=target)
        return out

    def keep_rest(self, shape: Shape, left: Tensor, right: Tensor, given: Tensor) -> None:
        """Leave in `given` what this rank's own factors do not say."""
        lefts, rights = _lefts(shape, left), _rights(shape, right)
        for matrix, p, q in zip(shape.matrices, lefts, rights, strict=True):
            _matrix(given, matrix).addmm_(p, q, alpha=-1.0)
        for start, stop in shape.rest:
            given[start:stop] = 0.0

    # Phase 3

    def product(self, shape: Shape, left: Tensor, right: Tensor, out: Tensor, scale: float) -> None:
        """Write the result times scale into `out`, and remember the Qs."""
        scaled = right * scale
        factors = zip(_lefts(shape, left), _rights(shape, scaled), strict=True)
        for matrix, (p, q) in zip(shape.matrices, factors, strict=True):
            product(p, q, _matrix(out, matrix))
        tail, at = _tail(shape, left), 0
        for start, stop in shape.rest:
            torch.mul(tail[at : at + stop - start], scale, out=out[start:stop])
            at += stop - start
        self._remember(shape, right)

    def _remember(self, shape: Shape, right: Tensor) -> None:
        """Qs of the next exchange: a column that is zero, and would stay so, begins anew."""
        empty: list[Tensor] = []
        for (name, _, _, _), q in zip(shape.matrices, _rights(shape, right), strict=True):
            self.qs[name] = q.t().contiguous()
            empty.append((q == 0).all(1))
        if empty and bool(torch.stack(empty).any()):
            for (name, _, _, cols), columns in zip(shape.matrices, empty, strict=True):
                fresh = _random(name, cols, self.rank).to(right.device)
                self.qs[name] = torch.where(columns, fresh, self.qs[name])

    def _q(self, matrix: Matrix, device: torch.device) -> Tensor:
        name, _, _, cols = matrix
        q = self.qs.get(name)
        if q is None or q.shape != (cols, self.rank):
            q = self.qs[name] = _random(name, cols, self.rank).to(device)
        return q


def _random(name: str, cols: int, rank: int) -> Tensor:
    """The same numbers on every rank."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(cols, rank, generator=generator)


def _matrix(flat: Tensor, matrix: Matrix) -> Tensor:
    _, start, rows, cols = matrix
    return flat[start : start + rows * cols].view(rows, cols)


def _lefts(shape: Shape, flat: Tensor) -> list[Tensor]:
    found, at = [], 0
    for _, _, rows, _ in shape.matrices:
        found.append(flat[at : at + rows * shape.rank].view(rows, shape.rank))
        at += rows * shape.rank
    return found


def _rights(shape: Shape, flat: Tensor) -> list[Tensor]:
    """Transposed, so that a row is what a column of P is multiplied with."""
    found, at = [], 0
    for _, _, _, cols in shape.matrices:
        found.append(flat[at : at + cols * shape.rank].view(shape.rank, cols))
        at += cols * shape.rank
    return found


def _tail(shape: Shape, left: Tensor) -> Tensor:
    return left[shape.rank * sum(rows for _, _, rows, _ in shape.matrices) :]


def _copy_rest(shape: Shape, given: Tensor, tail: Tensor) -> None:
    at = 0
    for start, stop in shape.rest:
        tail[at : at + stop - start] = given[start:stop]
        at += stop - start
