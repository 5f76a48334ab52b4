"""What follows from raw times, spans and sizes: plain values in, plain values out.

The step time of several ranks is that of the slowest: the others wait for it in the next exchange.
Two numbers compare ours with torch's: the ratio of the best steps, which noise hardly touches, and
the median over rounds of the ratio of both medians within one round, which sees what usually
happens and cancels what is slow for minutes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from closeranks.bench.raw import PAIRS, RankResult

Rounds = list[list[float]]  # milliseconds: for each round, for each step
Span = tuple[str, int, int]  # name, start_ns, end_ns


@dataclass
class Comparison:
    """Ours against torch's in one case, world size and mode."""

    ratio_best: float
    ratio_median: float
    ratio_quartiles: tuple[float, float]  # of the ratios per round: half of them lie between

    @property
    def verdict(self) -> str:
        if max(self.ratio_best, self.ratio_median) <= 1.0:
            return "yes"
        return "no" if min(self.ratio_best, self.ratio_median) > 1.0 else "undecided"


@dataclass
class Overlap:
    """Where exchanges lay in time: medians over the steps of all ranks."""

    buckets: int
    ended_inside: float  # buckets whose exchange ended before the last gradient was there
    exchange_ms: float  # for how long any exchange was going on
    share_inside: float  # of that, while gradients were still being computed


@dataclass
class Result:
    """All that was found in one case at one world size."""

    case: str
    ranks: int
    pinned: bool
    load_before: float
    load_after: float
    difference: float  # between weights of ours and torch's at the end, relative to the largest
    step_ms: dict[str, Rounds]
    backward_ms: dict[str, Rounds]  # forward and backward alone
    cpu_ms: dict[str, Rounds]  # of all threads of the busiest rank; one mean for a block
    comparisons: dict[str, Comparison] = field(default_factory=dict)  # by name of our variant
    backward_comparisons: dict[str, Comparison] = field(default_factory=dict)
    cpu_comparisons: dict[str, Comparison] = field(default_factory=dict)
    overlaps: dict[str, Overlap] = field(default_factory=dict)


def slowest(of_ranks: Sequence[Rounds]) -> Rounds:
    """For each step the time of the rank that took longest."""
    return [
        [max(step) for step in zip(*rounds, strict=True)] for rounds in zip(*of_ranks, strict=True)
    ]


def best(rounds: Rounds) -> float:
    return min(min(steps) for steps in rounds)


def median(rounds: Rounds) -> float:
    return statistics.median(step for steps in rounds for step in steps)


def compare(ours: Rounds, theirs: Rounds) -> Comparison:
    pairs = zip(ours, theirs, strict=True)
    ratios = [statistics.median(a) / statistics.median(b) for a, b in pairs]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return Comparison(
        best(ours) / best(theirs), statistics.median(ratios), (quartiles[0], quartiles[2])
    )


def overlap(of_ranks: Iterable[Sequence[Span]]) -> Overlap:
    """What the spans of traced steps say, a step being the exchanges up to a backward's span."""
    steps: list[tuple[int, int, float, float]] = []
    for spans in of_ranks:
        exchanges: list[tuple[int, int]] = []
        for name, start_ns, end_ns in spans:
            if name != "backward":
                exchanges.append((start_ns, end_ns))
                continue
            ended_inside = sum(end <= end_ns for _, end in exchanges)
            total_ns = _covered_ns(exchanges)
            inside_ns = _covered_ns([(s, min(e, end_ns)) for s, e in exchanges if s < end_ns])
            share = inside_ns / total_ns if total_ns else 0.0
            steps.append((len(exchanges), ended_inside, total_ns / 1e6, share))
            exchanges = []
    counts, ended, lengths, shares = zip(*steps, strict=True)
    return Overlap(
        int(statistics.median(counts)),
        statistics.median(ended),
        statistics.median(lengths),
        statistics.median(shares),
    )


def verdict(results: Sequence[Result], titles: dict[str, str]) -> str:
    """One sentence: where a step takes at most as long as with torch's class, and where not."""
    named: dict[str, list[str]] = {"yes": [], "no": [], "undecided": []}
    for result in results:
        for name, comparison in result.comparisons.items():
            mode = ", view" if name.endswith("view") else ""
            where = f"{titles[result.case]} x{result.ranks}{mode}"
            named[comparison.verdict].append(where)
    total = sum(map(len, named.values()))
    if len(named["yes"]) == total:
        return f"Step time is at most torch's in all {total} comparisons."
    text = f"Step time is at most torch's in {len(named['yes'])} of {total} comparisons"
    if named["no"]:
        text += f"; it is more in: {'; '.join(named['no'])}"
    if named["undecided"]:
        text += f"; best and median disagree in: {'; '.join(named['undecided'])}"
    return text + "."


def _covered_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """The length of what any of the intervals covers."""
    covered, reached = 0, 0
    for start, end in sorted(intervals):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def collect(
    case: str, loads: tuple[float, float], pinned: bool, of_ranks: Sequence[RankResult]
) -> Result:
    """Join what the ranks of one case brought home."""
    names = list(of_ranks[0].times)
    step = {name: slowest([r.times[name].step for r in of_ranks]) for name in names}
    backward = {name: slowest([r.times[name].backward for r in of_ranks]) for name in names}
    cpu = {name: slowest([r.times[name].cpu for r in of_ranks]) for name in names}
    difference = max(rank.difference for rank in of_ranks)
    result = Result(case, len(of_ranks), pinned, *loads, difference, step, backward, cpu)
    for _, theirs, ours in PAIRS:
        result.comparisons[ours] = compare(step[ours], step[theirs])
        result.backward_comparisons[ours] = compare(backward[ours], backward[theirs])
        result.cpu_comparisons[ours] = compare(cpu[ours], cpu[theirs])
        result.overlaps[ours] = overlap([rank.spans[ours] for rank in of_ranks])
    return result
