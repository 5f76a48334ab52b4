"""What lies where in a flat tensor, and what lies in a part of it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from closeranks.exchange.layout import Layout, Piece
from closeranks.reducer.bucket import as_matrix

shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5)


def _layout(sizes: list[tuple[int, int]]) -> Layout:
    pieces, start = [], 0
    for number, (rows, cols) in enumerate(sizes):
        pieces.append(Piece(f"p{number}", start, rows, cols))
        start = pieces[-1].stop
    return Layout(tuple(pieces))


@given(shapes, st.data())
def test_parts_cover_what_was_cut_out_once(
    sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    layout = _layout(sizes)
    start = data.draw(st.integers(0, layout.numel))
    stop = data.draw(st.integers(start, layout.numel))
    at = 0
    for piece in layout.cut(start, stop).pieces:
        assert piece.start == at
        at = piece.stop
    assert at == stop - start


@given(shapes, st.data())
def test_whole_rows_stay_together(sizes: list[tuple[int, int]], data: st.DataObject) -> None:
    layout = _layout(sizes)
    start = data.draw(st.integers(0, layout.numel))
    stop = data.draw(st.integers(start, layout.numel))
    cols = {piece.name: piece.cols for piece in layout.pieces}
    found = layout.cut(start, stop).pieces
    assert len({piece.name for piece in found}) == len(found), "names are unique"
    for piece in found:
        whole = cols[piece.name.partition("[")[0]]
        assert piece.cols == whole or (piece.rows == 1 and piece.cols < 2 * whole)


def test_an_uncut_piece_keeps_its_name() -> None:
    layout = _layout([(2, 3), (4, 5)])
    assert layout.cut(6, 26).pieces == (Piece("p1", 0, 4, 5),)
    assert [p.name for p in layout.cut(0, 10).pieces] == ["p0", "p1[0:4]"]


def test_a_matrix_is_what_its_memory_is() -> None:
    assert as_matrix(torch.zeros(3, 4, 5)) == (3, 20)
    assert as_matrix(torch.zeros(7)) == (7, 1)
    assert as_matrix(torch.zeros(())) == (1, 1)
    assert as_matrix(torch.zeros(0, 4)) == (0, 1)
    assert as_matrix(torch.zeros(6, 4).t()) == (6, 4)
    convolution = torch.zeros(8, 3, 5, 5).to(memory_format=torch.channels_last)
    assert as_matrix(convolution) == (8, 75)
    assert as_matrix(torch.zeros(1, 8, 4)) == (8, 4)
