"""All-reduces: what follows from the times of all ranks. Values in, values out.

A repetition takes as long as it takes the slowest rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from closeranks.bench.findings import best, slowest
from closeranks.bench.raw import GLOO, IN_PLACE, MIB, Blocks


@dataclass
class Result:
    """One world size and one size, all"""

    ranks: int
    pinned: bool
    loads: tuple[float, float]
    size_bytes: int
    ms: dict[str, list[list[float]]]
    cpu_ms: dict[str, float]  # of the busiest rank, best round

    def ratio_best(self, name: str) -> float:
        return best(self.ms[GLOO]) / best(self.ms[name])

    def ratio_median(self, name: str) -> float:
        pairs = zip(self.ms[GLOO], self.ms[name], strict=True)
        return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)

    def of_limit(self, name: str) -> float:
        return best(self.ms[IN_PLACE]) / best(self.ms[name])


def collect(
    size: int, pinned: bool, loads: tuple[float, float], of_ranks: Sequence[Sequence[Blocks]]
) -> list[Result]:
    """Join what the ranks brought home."""
    found = []
    for blocks in zip(*of_ranks, strict=True):
        names = list(blocks[0].ms)
        ms = {name: slowest([b.ms[name] for b in blocks]) for name in names}
        cpu_ms = {name: max(min(b.cpu_ms[name]) for b in blocks) for name in names}
        found.append(Result(size, pinned, loads, 4 * blocks[0].numel, ms, cpu_ms))
    return found


def size_name(size_bytes: int) -> str:
    return f"{size_bytes // 1024} KiB" if size_bytes < MIB else f"{size_bytes / MIB:g} MiB"
