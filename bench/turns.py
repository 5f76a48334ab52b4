"""All ways to all-reduce take turns on the same ranks; what follows from the times; how it looks.

One round gives each way one block of repetitions, in an order that changes from round to round. A
repetition takes as long as it takes the slowest rank.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import keeping
import ways
from findings import best, median, slowest
from rich.console import RenderableType

MIB = 1 << 20
_BLOCK_BYTES = 128 * MIB  # about so much is reduced in one block, in 1 to 20 repetitions
_LEGEND = """\
ms: best/median over all rounds, slowest rank. x gloo: first of the best, then the median of the
ratios within each round; above 1 is faster. of limit: the in-place limit over the best time. cpu:
ms of processor time for one all-reduce, all threads of the busiest rank (MPI's own not known).
*: ranks share cores; otherwise each is pinned to its own.
"""


@dataclass
class Blocks:
    """What one rank brings home for one size: by way, for each round a list of milliseconds."""

    numel: int
    ms: dict[str, list[list[float]]] = field(default_factory=dict)
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)  # a mean for each round


@dataclass
class Result:
    """One world size and one size, all ways."""

    ranks: int
    pinned: bool
    loads: tuple[float, float]
    size_bytes: int
    ms: dict[str, list[list[float]]]
    cpu_ms: dict[str, float]  # of the busiest rank, best round

    def ratio_best(self, name: str) -> float:
        return best(self.ms[ways.GLOO]) / best(self.ms[name])

    def ratio_median(self, name: str) -> float:
        pairs = zip(self.ms[ways.GLOO], self.ms[name], strict=True)
        return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)

    def of_limit(self, name: str) -> float:
        return best(self.ms[ways.IN_PLACE]) / best(self.ms[name])


def measure(rank: int, numels: Sequence[int], rounds: int, mpi_folder: str) -> list[Blocks]:
    """Inside a rank: time all ways for all sizes."""
    from torch import distributed as dist

    found = []
    with ways.all_ways(rank, dist.get_world_size(), mpi_folder) as by_name:
        for numel in numels:
            blocks = Blocks(numel)
            repetitions = max(1, min(20, _BLOCK_BYTES // (4 * numel)))
            for way in by_name.values():
                way.prepare(numel)
                way.block(2)
            for number in range(rounds):
                order = list(by_name)
                random.Random(number).shuffle(order)
                for name in order:
                    cpu_began = time.process_time()
                    times = by_name[name].block(repetitions)
                    cpu_ms = (time.process_time() - cpu_began) * 1e3 / repetitions
                    blocks.ms.setdefault(name, []).append(times)
                    blocks.cpu_ms.setdefault(name, []).append(cpu_ms)
            for way in by_name.values():
                way.release()
            found.append(blocks)
    return found


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


def tables(found: Sequence[Result], rounds: int) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for result in found:
        ranks = f"{result.ranks}{'' if result.pinned else '*'} ranks"
        load = f"load {result.loads[0]:.1f} -> {result.loads[1]:.1f}"
        table = keeping.table(
            f"{size_name(result.size_bytes)}, {ranks}, {rounds} rounds, {load}",
            ("way", "ms", "x gloo", "of limit", "cpu"),
            left=("way",),
        )
        for name in sorted(result.ms, key=lambda n: best(result.ms[n])):
            times = f"{_short(best(result.ms[name]))}/{_short(median(result.ms[name]))}"
            ratios = f"{result.ratio_best(name):.1f} {result.ratio_median(name):.1f}"
            is_limit = name in ways.LIMITS
            table.add_row(
                name,
                times,
                "" if is_limit else ratios,
                "" if is_limit else f"{result.of_limit(name):.0%}",
                "" if name == ways.MPI else _short(result.cpu_ms[name]),
            )
        parts += [table, ""]
    return [*parts, _LEGEND]


def draw(found: Sequence[Result], path: Path) -> None:
    """Time against size for each world size, all ways, the limits as lines of their own."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = sorted({result.ranks for result in found})
    figure, axes = pyplot.subplots(
        1, len(sizes), figsize=(6.2 * len(sizes), 5.4), sharey=True, squeeze=False
    )
    for axis, size in zip(axes[0], sizes, strict=True):
        of_size = [result for result in found if result.ranks == size]
        for name in sorted({name for result in of_size for name in result.ms}):
            points = [(r.size_bytes / MIB, best(r.ms[name])) for r in of_size]
            style = {"linestyle": "--", "color": "black", "marker": None, "linewidth": 1}
            if name not in ways.LIMITS:
                width = 2.2 if name in ways.OURS.values() else 1.2
                style = {"marker": "o", "markersize": 3, "linewidth": width}
            elif name == ways.COPY:
                style |= {"linestyle": ":"}
            axis.plot(*zip(*points, strict=True), label=name, **style)
        axis.set(
            xscale="log", yscale="log", xlabel="MiB, float32", title=f"all-reduce, {size} ranks"
        )
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("best time, ms")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def size_name(size_bytes: int) -> str:
    return f"{size_bytes // 1024} KiB" if size_bytes < MIB else f"{size_bytes / MIB:g} MiB"


def _short(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.2f}" if ms >= 1 else f"{ms:.4f}"
