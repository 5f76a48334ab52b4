"""All-reduces as a picture: time against size, with what memory allows as lines of their own.

Needs matplotlib, which is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from closeranks.bench import raw
from closeranks.bench.allreduce import Result
from closeranks.bench.findings import best
from closeranks.bench.raw import MIB


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
            style: dict[str, Any] = {
                "linestyle": "--",
                "color": "black",
                "marker": None,
                "linewidth": 1,
            }
            if name not in raw.LIMITS:
                width = 2.2 if name in raw.OURS.values() else 1.2
                style = {"marker": "o", "markersize": 3, "linewidth": width}
            elif name == raw.COPY:
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
