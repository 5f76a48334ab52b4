"""What resilient training costs when nothing happens, and what it gains when a worker is slow.

    python bench/lanes.py                 step times against door 1, then a slow worker: minutes
    python bench/lanes.py --quick         a look
    python bench/lanes.py --part steps --keep

`steps`: lanes = workers, nobody in trouble, against DistributedDataParallel on the same ranks, in
turns. `slow`: 16 lanes, 2 workers, one at a quarter of its speed.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

import keeping
import lanes_rounds
import lanes_slow
import machine
import seats
from rich.console import Console, RenderableType

import ranks
from closeranks.bench.findings import Rounds, best, compare, median, slowest
from closeranks.bench.tables import WIDTH, as_text
from closeranks.bench.tables import table as table_of
from closeranks.bench.where import load
from closeranks.measure.cases import CASES

_CASES = {"mlp16": 1.12, "mlp128": 1.05}  # and what the ratio should be at most
_SLOW_SHARE = 0.85  # of the sum of speeds, that should at least be reached
_DEADLINE_S = 600.0
_LEGEND = """\
ms: best/median of a step, slowest rank. x door 1: above 1 is slower; first of the best, then the
median of the ratios within each round. cpu: ms of processor time of a step, best block of the
busiest rank. load: the average before and after.
"""


@dataclass
class Found:
    """All that one run has measured."""

    steps: dict[str, dict[str, Rounds]] = field(default_factory=dict)  # by case and variant
    cpu: dict[str, dict[str, Rounds]] = field(default_factory=dict)
    loads: dict[str, tuple[float, float]] = field(default_factory=dict)
    steps_per_s: dict[str, list[float]] = field(default_factory=dict)  # by way, for each turn


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", choices=("steps", "slow"), action="append")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="turns of every variant (30; --quick: 8)")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--keep", action="store_true", help="write a folder in bench/results")
    given = parser.parse_args()
    given.part = given.part or ["steps", "slow"]
    given.rounds = given.rounds or (8 if given.quick else 30)
    if min(given.rounds, given.ranks) < 1:
        parser.error("--rounds and --ranks want positive numbers")
    return given


def measure_steps(found: Found, given: argparse.Namespace) -> None:
    for case in _CASES:
        before = load()
        with seats.job(given.ranks) as job:
            brought = ranks.run(
                given.ranks, _DEADLINE_S, lanes_rounds.measure, case, given.rounds, 2, job
            )
        found.loads[case] = (before, load())
        names = list(brought[0].ms)
        found.steps[case] = {n: slowest([rank.ms[n] for rank in brought]) for n in names}
        found.cpu[case] = {n: slowest([rank.cpu_ms[n] for rank in brought]) for n in names}


def measure_slow(found: Found, given: argparse.Namespace) -> None:
    turns, steps = (2, 16) if given.quick else (4, 48)
    before = load()
    for _ in range(turns):
        for way, workers, is_slowed, by_torch in (
            ("1 worker, Ranks", 1, False, False),
            ("2 workers, Ranks", 2, False, False),
            ("2, one slow, Ranks", 2, True, False),
            ("2 workers, torch", 2, False, True),
            ("2, one slow, torch", 2, True, True),
        ):
            if by_torch:
                ends = ranks.run(workers, _DEADLINE_S, lanes_slow.train_by_torch, steps, is_slowed)
            else:
                with seats.job(workers) as job:
                    ends = ranks.run(
                        workers, _DEADLINE_S, lanes_slow.train_by_ranks, steps, is_slowed, job
                    )
            # The first steps find everything cold; the worker that is not slowed sees all steps.
            last = len(ends[0]) - 1
            rate = (last - 3) / (ends[0][last] - ends[0][3])
            found.steps_per_s.setdefault(way, []).append(rate)
    found.loads["slow"] = (before, load())


def steps_table(found: Found) -> RenderableType:
    table = table_of(
        "A step with lanes = workers",
        ("case", "way", "ms", "x door 1", "cpu", "load"),
        ("case", "way"),
    )
    for case, by_name in found.steps.items():
        for name, rounds in by_name.items():
            against = compare(rounds, by_name[lanes_rounds.OURS])
            load = "load {:.1f} -> {:.1f}".format(*found.loads[case])
            table.add_row(
                CASES[case].title,
                name,
                f"{best(rounds):.1f}/{median(rounds):.1f}",
                f"{against.ratio_best:.2f} {against.ratio_median:.2f}",
                f"{best(found.cpu[case][name]):.1f}",
                load,
            )
    return table


def slow_table(found: Found) -> RenderableType:
    alone = statistics.median(found.steps_per_s["1 worker, Ranks"])
    table = table_of(
        "16 lanes; the slow worker has a quarter of its speed",
        ("way", "steps/s", "of the sum of speeds"),
        ("way",),
    )
    for way, rates in found.steps_per_s.items():
        workers = 1.0 if way.startswith("1") else 1.0 + lanes_slow.SHARE if "slow" in way else 2.0
        rate = statistics.median(rates)
        table.add_row(way, f"{rate:.2f}", f"{rate / (workers * alone):.0%}")
    return table


def main() -> int:
    given, found = arguments(), Found()
    environment = machine.describe()
    parts: list[Any] = []
    if "steps" in given.part:
        measure_steps(found, given)
        parts += [steps_table(found), _LEGEND]
    if "slow" in given.part:
        measure_slow(found, given)
        parts += [slow_table(found), ""]
    screen = Console(width=WIDTH)
    for part in parts:
        screen.print(part, highlight=False)
    if given.keep:
        command = shlex.join(["python", "bench/lanes.py", *sys.argv[1:]])
        text = as_text(parts)
        screen.print(f"kept in {keeping.keep('lanes', command, environment, text, asdict(found))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
