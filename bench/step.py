"""Step times of closeranks' class and torch's over gloo, taken in turns on the same ranks.

    python bench/step.py                     all cases on 2 and 4 ranks: some minutes
    python bench/step.py --quick             a look: seconds a case, and noisy
    python bench/step.py --case tiny --ranks 2 --rounds 50

Shows the best and the median of both, where exchanges lay in time, and the memory that gradients
take. What is measured is never a failure; only what could not be measured is.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

import machine
import memory
from report import Report
from rich.console import Console

import ranks
from closeranks.bench import findings
from closeranks.bench.tables import WIDTH
from closeranks.measure import rounds
from closeranks.measure.cases import CASES
from closeranks.measure.variants import VARIANTS

_NAMES = {"auto": "step", "group": "step-group"}
_MEMORY = "memory"
_MEMORY_RANKS = 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--case",
        action="append",
        choices=[*CASES, _MEMORY],
        metavar="NAME",
        help=f"one of {', '.join([*CASES, _MEMORY])}; may be repeated; all by default",
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="world sizes")
    parser.add_argument("--rounds", type=int, help="turns of every variant (20, or 4 with --quick)")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--keep", action="store_true", help="write a folder in bench/results")
    parser.add_argument(
        "--exchange",
        choices=("auto", "group"),
        default="auto",
        help="how ours exchanges: auto is shared memory where it can be had, group is gloo",
    )
    parser.add_argument("--deadline-s", type=float, default=900.0, help="for each case")
    given = parser.parse_args()
    given.case = given.case or [*CASES, _MEMORY]
    given.rounds = given.rounds or (4 if given.quick else 20)
    if min(given.rounds, *given.ranks) < 1:
        parser.error("--rounds and --ranks want positive numbers")
    return given


def measure_steps(case: str, size: int, given: argparse.Namespace) -> findings.Result:
    load_before = machine.load()
    of_ranks = ranks.run(size, given.deadline_s, rounds.measure, case, given.rounds)
    loads = (load_before, machine.load())
    return findings.collect(case, loads, ranks.pins(size) is not None, of_ranks)


def measure_memory(given: argparse.Namespace) -> dict[str, list[memory.Memory]]:
    return {
        variant: ranks.run(_MEMORY_RANKS, given.deadline_s, memory.measure, variant)
        for variant in VARIANTS
    }


def main() -> int:
    given = arguments()
    os.environ["CLOSERANKS_EXCHANGE"] = given.exchange  # the ranks inherit it
    console = Console(stderr=True)
    command = shlex.join(["python", "bench/step.py", *sys.argv[1:]])
    report = Report(
        command, machine.describe(), machine.cores(), machine.load(), given.rounds, [], {}
    )
    failed = False
    for size in given.ranks:
        for case in (name for name in given.case if name in CASES):
            with console.status(f"{CASES[case].title}, {size} ranks"):
                try:
                    report.results.append(measure_steps(case, size, given))
                except ranks.RankFailed as error:
                    failed = True
                    console.print(f"{case} on {size} ranks was not measured: {error}", markup=False)
    if _MEMORY in given.case:
        with console.status("memory"):
            try:
                report.memory = measure_memory(given)
            except ranks.RankFailed as error:
                failed = True
                console.print(f"memory was not measured: {error}", markup=False)
    show(report, given)
    return 1 if failed else 0


def show(report: Report, given: argparse.Namespace) -> None:
    """On the screen, and wherever else it was asked for."""
    screen = Console(width=max(WIDTH, Console().width))
    for key, value in report.environment.items():
        screen.print(f"{key}: {value}", highlight=False)
    for part in report.parts():
        screen.print(part, highlight=False)
    if given.json:
        report.write_json(given.json)
    if given.keep:
        screen.print(f"kept in {report.keep(_NAMES[given.exchange]).relative_to(machine.ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
