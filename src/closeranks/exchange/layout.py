"""What lies where in a flat tensor that is exchanged again and again: named matrices, in a row.

An exchange that keeps something between two exchanges (what a wire format could not send yet) needs
to know which elements are the same as last time, also after they were put together differently.
Pure: names, places and sizes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """One tensor inside the flat one, as the matrix that its memory is."""

    name: str  # the same in every exchange, unique in the whole model
    start: int  # in elements
    rows: int
    cols: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.cols


@dataclass(frozen=True)
class Layout:
    """The pieces of a flat tensor, in the order of its memory; what is behind them has no name."""

    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return self.pieces[-1].stop if self.pieces else 0

    @functools.cached_property
    def places(self) -> tuple[tuple[str, int, int], ...]:
        """Name, start and length of every piece."""
        return tuple((p.name, p.start, p.rows * p.cols) for p in self.pieces)

    @functools.cached_property
    def matrices(self) -> tuple[tuple[str, int, int, int], ...]:
        """Name, start, rows and columns of every piece."""
        return tuple((p.name, p.start, p.rows, p.cols) for p in self.pieces)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Layouts are compared in every exchange, and have hundreds of pieces."""
        return hash(self.matrices)

    def cut(self, start: int, stop: int) -> Layout:
        """The layout of a part of the flat tensor. A piece is cut between rows where it can be."""
        known = self._cuts.get((start, stop))
        if known is None:
            known = self._cuts[start, stop] = self._cut(start, stop)
        return known

    @functools.cached_property
    def _cuts(self) -> dict[tuple[int, int], Layout]:
        return {}

    def _cut(self, start: int, stop: int) -> Layout:
        found: list[Piece] = []
        for piece in self.pieces:
            lo, hi = max(piece.start, start), min(piece.stop, stop)
            if lo >= hi:
                continue
            if (lo, hi) == (piece.start, piece.stop):
                found.append(Piece(piece.name, lo - start, piece.rows, piece.cols))
            else:
                found.extend(_parts(piece, lo, hi, start))
        return Layout(tuple(found))


def _parts(piece: Piece, lo: int, hi: int, origin: int) -> Iterator[Piece]:
    """A piece's elements [lo, hi): the rest of a row, whole rows, the beginning of a row."""
    cols = piece.cols
    first = piece.start + -(-(lo - piece.start) // cols) * cols
    last = piece.start + (hi - piece.start) // cols * cols
    bounds = [lo, hi] if first >= last else sorted({lo, first, last, hi})
    for a, b in itertools.pairwise(bounds):
        whole = a >= first and b <= last and first < last
        rows = (b - a) // cols if whole else 1
        name = f"{piece.name}[{a - piece.start}:{b - piece.start}]"
        yield Piece(name, a - origin, rows, (b - a) // rows)
