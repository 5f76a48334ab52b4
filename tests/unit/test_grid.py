"""Which ranks share a host, and which meet across hosts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from closeranks.exchange.grid import arrange
from closeranks.segment.twin import share


def test_the_picture_of_its_page() -> None:
    grid = arrange("ababa")
    assert grid.rows == ((0, 2, 4), (1, 3))
    assert grid.columns == 2
    assert [grid.column(k) for k in range(grid.columns)] == [(0, 1), (2, 3)]
    assert grid.row_of(4) == (0, 2, 4)
    assert grid.shape == "3 + 2 ranks" and grid.shares


def test_shapes() -> None:
    assert arrange("aabb").shape == "2 x 2 ranks"
    assert arrange("ab").shape == "2 x 1 rank" and not arrange("ab").shares
    assert arrange("a").rows == ((0,),)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=24), st.integers(0, 5000))
def test_every_slice_is_exchanged_by_one_rank_of_every_host(hosts: list[str], numel: int) -> None:
    grid = arrange(hosts)
    assert sorted(rank for row in grid.rows for rank in row) == list(range(len(hosts)))
    met = [rank for k in range(grid.columns) for rank in grid.column(k)]
    assert len(met) == len(set(met))
    for k in range(grid.columns):
        assert sorted(hosts[rank] for rank in grid.column(k)) == sorted(set(hosts))
    slices = [share(numel, grid.columns, k) for k in range(grid.columns)]
    assert [i for start, stop in slices for i in (start, stop)] == sorted(
        i for start, stop in slices for i in (start, stop)
    )
    assert sum(stop - start for start, stop in slices) == numel
