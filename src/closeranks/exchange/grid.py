"""Which ranks share a host, and which meet across hosts: rows and columns. Pure.

    host a    0  2  5          A row is a host, its ranks in their order. Column k holds the k-th
    host b    1  3             rank of every host, for as many k as the smallest host has ranks;
              |  |             they meet across hosts. Rank 5 meets nobody outside of its host.
    column    0  1

A flat tensor is cut into as many slices as there are columns. Inside a host the ranks of a column
sum their slice of all ranks' tensors, then they sum it across hosts, then they hand it to all. So
every host sends and receives every slice once, whatever the number of its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """The ranks of a group by host."""

    rows: tuple[tuple[int, ...], ...]  # hosts in the order of their first ranks

    @property
    def columns(self) -> int:
        return min(len(row) for row in self.rows)

    def row_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that share a rank's host."""
        return next(row for row in self.rows if rank in row)

    def column(self, number: int) -> tuple[int, ...]:
        """The ranks that exchange one slice across hosts, one of each host."""
        return tuple(row[number] for row in self.rows)

    @property
    def shares(self) -> bool:
        """Whether any two ranks share a host."""
        return any(len(row) > 1 for row in self.rows)

    @property
    def shape(self) -> str:
        """ "2 x 4 ranks" for equal hosts, "4 + 2 ranks" for others."""
        sizes = [len(row) for row in self.rows]
        if len(set(sizes)) == 1:
            return f"{len(sizes)} x {sizes[0]} rank{'s' if sizes[0] > 1 else ''}"
        return f"{' + '.join(map(str, sizes))} ranks"


def arrange(hosts: Sequence[str]) -> Grid:
    """From the host of every rank, by rank."""
    rows: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        rows.setdefault(host, []).append(rank)
    return Grid(tuple(tuple(row) for row in rows.values()))
