"""All-reduce of one float32 tensor by every way that can be had here, taken in turns.

    python bench/allreduce.py                     2, 4 and 8 ranks, 4 KiB to 400 MiB: some minutes
    python bench/allreduce.py --quick             a look: noisy
    python bench/allreduce.py --ranks 2 --sizes 25 --rounds 30
    python bench/allreduce.py --keep              and write bench/results/<date>-allreduce/

gloo is what torch uses on a CPU. "ours" sums tensors that lie in shared memory, as door 1's buckets
do; "door 2" takes any tensor through the backend. OpenMPI (mpi4py and mpirun) and DeepSpeed (with
ninja and a C++ compiler) are shown where they are installed. The limits are what memory allows:
one pass that reads and writes every element in place, and one copy, by all ranks at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import keeping
import machine
import mpi_ranks
import peers
from rich.console import Console

import ranks
from closeranks.bench import allreduce, picture, tables
from closeranks.bench.raw import MIB

SIZES_MIB = (4 / 1024, 64 / 1024, 1.0, 25.0, 100.0, 400.0)
_LARGE_RANKS = 2  # more ranks than these are measured up to this size only
_LARGE_MIB = 25.0


@dataclass
class Report:
    """Everything that one run has to say."""

    command: str
    environment: dict[str, str]
    rounds: int
    results: list[allreduce.Result]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="world sizes")
    parser.add_argument("--sizes", type=float, nargs="+", default=SIZES_MIB, help="in MiB")
    parser.add_argument("--rounds", type=int, help="turns of every way (12, or 3 with --quick)")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--keep", action="store_true", help="write a folder in bench/results")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw time against size, as PNG")
    parser.add_argument("--deadline-s", type=float, default=900.0, help="for each world size")
    given = parser.parse_args()
    given.rounds = given.rounds or (3 if given.quick else 12)
    if min(given.rounds, *given.ranks) < 1 or min(given.sizes) <= 0:
        parser.error("--rounds, --ranks and --sizes want positive numbers")
    return given


def main() -> int:
    given = arguments()
    console = Console(stderr=True)
    command = shlex.join(["python", "bench/allreduce.py", *sys.argv[1:]])
    report = Report(command, machine.describe(), given.rounds, [])
    failed = False
    for size in given.ranks:
        sizes = [s for s in given.sizes if size <= _LARGE_RANKS or s <= _LARGE_MIB]
        numels = [round(s * MIB / 4) for s in sizes]
        with console.status(f"{size} ranks"), mpi_ranks.running(size, ranks.pins(size)) as mpi:
            load_before = machine.load()
            try:
                blocks = ranks.run(size, given.deadline_s, peers.measure, numels, given.rounds, mpi)
            except ranks.RankFailed as error:
                failed = True
                console.print(f"{size} ranks were not measured: {error}", markup=False)
                continue
            loads = load_before, machine.load()
            report.results += allreduce.collect(size, ranks.pins(size) is not None, loads, blocks)
    show(report, given)
    return 1 if failed else 0


def show(report: Report, given: argparse.Namespace) -> None:
    """On the screen, and wherever else it was asked for."""
    text = tables.as_text(tables.allreduce_parts(report.results, report.rounds))
    for key, value in report.environment.items():
        print(f"{key}: {value}")
    print(text)
    if given.plot:
        picture.draw(report.results, given.plot)
    if given.keep:
        folder = keeping.keep(
            "allreduce",
            report.command,
            report.environment,
            text,
            dataclasses.asdict(report),
            pictures=("time.png",),
        )
        picture.draw(report.results, folder / "time.png")
        print(f"kept in {folder.relative_to(machine.ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
