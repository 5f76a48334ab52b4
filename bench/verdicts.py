"""What curves of several formats and seeds say: does a format learn as well, and how much sooner?

    spread   from the best to the worst final metric of the exact runs
    holds    the mean of a format's final metrics is no worse than the worst exact one
    target   the worst final metric of the exact runs, which each of them has reached
    time     until a curve reaches the target, interpolated between looks; the median over seeds
    missing  more than half of the seeds never reach it

Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from learning import Curve

EXACT = "exact"


@dataclass(frozen=True)
class Verdict:
    """One format on one task."""

    finals: tuple[float, ...]  # by seed
    holds: bool
    seconds: float  # to the target; infinite if it is missing
    total_s: float  # of a whole run, the median


def spread(curves: Mapping[str, Sequence[Curve]]) -> tuple[float, float]:
    finals = [curve.metrics[-1] for curve in curves[EXACT]]
    return min(finals), max(finals)


def judge(curves: Mapping[str, Sequence[Curve]]) -> dict[str, Verdict]:
    """By format; among them the exact one, which is what the others are held against."""
    target = spread(curves)[1]
    found = {}
    for name, runs in curves.items():
        finals = tuple(run.metrics[-1] for run in runs)
        found[name] = Verdict(
            finals,
            statistics.fmean(finals) <= target,
            statistics.median(reached(run, target) for run in runs),
            statistics.median(run.seconds[-1] for run in runs),
        )
    return found


def reached(curve: Curve, target: float) -> float:
    """After how many seconds a curve is at the target; infinite if it never is."""
    before: tuple[float, float] | None = None
    for seconds, metric in zip(curve.seconds, curve.metrics, strict=True):
        if metric <= target:
            if before is None or before[1] == metric:
                return seconds
            share = (before[1] - target) / (before[1] - metric)
            return before[0] + share * (seconds - before[0])
        before = seconds, metric
    return math.inf
