"""What lies where in a flat tensor that is exchanged again and again: named matrices, in a row.

An exchange that keeps something between two exchanges (what a wire format could not send yet) needs
to know which elements are the same as last time, also after they were put together differently.
Pure: names, places and sizes.
"""

from __future__ import annotations

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

    def cut(self, start: int, stop: int) -> Layout:
        """The layout of a part of the flat tensor. A piece is cut between rows where it can be."""
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
