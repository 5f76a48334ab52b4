"""Training over a slow network: our class and torch's over gloo, in turns on the same ranks.

    python bench/network.py                       1 Gbit, 100 Mbit and unshaped: some minutes
    python bench/network.py --quick               a look: noisy
    python bench/network.py --mbit 1000 --hosts 2x2 --wire exact int8
    python bench/network.py --keep                and write bench/results/<date>-network/

Hosts are network namespaces on this machine, their links shaped with tbf: needs root and iproute2.
All ranks share the cores of this machine, so what computing costs weighs more than on real hosts.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import hops
import keeping
import machine
from rich.console import Console

import ranks
from closeranks.bench import tables
from closeranks.bench.findings import best, median, slowest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.hosts.network import INTERFACE, Network, why_not

UNSHAPED = 0.0
EXACT = "exact"
_WIRES = {"2x2": (EXACT, "bf16", "int8", "auto"), "2x1": (EXACT, "int8", "powersgd:4", "auto")}
_FAST_MBIT = 1000.0
_BLOCK_STEPS = 4  # on a network at least so fast, else one
_LEGEND = """\
ms: best/median step, slowest rank. x torch: first of the best steps, then the median over rounds of
the ratio within one round; above 1 is faster. way: how gradients went, in the class's own words.
"""


@dataclass
class Result:
    """One network, all variants."""

    hosts: str
    mbit: float
    loads: tuple[float, float]
    ms: dict[str, list[list[float]]]
    ways: dict[str, str]

    def ratio_best(self, name: str) -> float:
        return best(self.ms[hops.TORCH]) / best(self.ms[name])

    def ratio_median(self, name: str) -> float:
        pairs = zip(self.ms[hops.TORCH], self.ms[name], strict=True)
        return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--mbit",
        type=float,
        nargs="+",
        default=[1000.0, 100.0, UNSHAPED],
        help="speeds of the links; 0 is unshaped (default: 1000 100 0)",
    )
    parser.add_argument(
        "--hosts",
        nargs="+",
        default=list(_WIRES),
        metavar="HxR",
        help="so many hosts of so many ranks (default: 2x2 2x1)",
    )
    parser.add_argument("--wire", nargs="+", metavar="FORMAT", help="instead of the usual ones")
    parser.add_argument("--rounds", type=int, help="turns of every variant (10, or 3 with --quick)")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--keep", action="store_true", help="write a folder in bench/results")
    parser.add_argument("--deadline-s", type=float, default=900.0, help="for each network")
    given = parser.parse_args()
    given.rounds = given.rounds or (3 if given.quick else 10)
    if given.rounds < 1 or min(given.mbit) < 0:
        parser.error("--rounds wants a positive number, --mbit numbers that are not negative")
    try:
        given.shapes = {shape: tuple(map(int, shape.split("x"))) for shape in given.hosts}
        assert all(len(shape) == 2 and min(shape) > 0 for shape in given.shapes.values())
    except (ValueError, AssertionError):
        parser.error("--hosts wants shapes like 2x2: so many hosts of so many ranks")
    return given


def measure(shape: str, mbit: float, given: argparse.Namespace) -> Result:
    hosts, ranks_each = given.shapes[shape]
    variants = [hops.TORCH, *(given.wire or _WIRES.get(shape, _WIRES["2x2"]))]
    steps = _BLOCK_STEPS if mbit == UNSHAPED or mbit >= _FAST_MBIT else 1
    load_before = machine.load()
    with Network(hosts, mbit or None) as network:
        meeting = f"tcp://{network.address(0)}:29500"
        places = [
            ranks.Place(network.names[host], meeting, INTERFACE)
            for host in range(hosts)
            for _ in range(ranks_each)
        ]
        size = hosts * ranks_each
        hauls: list[hops.Haul] = ranks.run(
            size, given.deadline_s, hops.measure, variants, given.rounds, steps, places=places
        )
    ms = {name: slowest([haul.ms[name] for haul in hauls]) for name in variants}
    return Result(shape, mbit, (load_before, machine.load()), ms, hauls[0].ways)


def table(results: list[Result], rounds: int) -> list[object]:
    parts: list[object] = []
    for result in results:
        speed = "unshaped" if result.mbit == UNSHAPED else f"{result.mbit:g} Mbit"
        loads = f"load {result.loads[0]:.1f} -> {result.loads[1]:.1f}"
        made = tables.table(
            f"{result.hosts} ranks, {speed}, {rounds} rounds, {loads}",
            ("variant", "ms", "x torch", "way"),
            left=("variant", "way"),
        )
        for name, rows in result.ms.items():
            ratios = f"{result.ratio_best(name):.2f} {result.ratio_median(name):.2f}"
            made.add_row(
                name,
                f"{best(rows):.0f}/{median(rows):.0f}",
                "" if name == hops.TORCH else ratios,
                result.ways[name],
            )
        parts.append(made)
    return [*parts, _LEGEND]


def main() -> int:
    given = arguments()
    console = Console(stderr=True)
    reason = why_not()
    if reason:
        console.print(f"nothing can be measured here: {reason}", markup=False)
        return 1
    environment, results, failed = machine.describe(), [], False
    for shape in given.shapes:
        for mbit in given.mbit:
            with console.status(f"{shape} ranks, {mbit:g} Mbit"):
                try:
                    results.append(measure(shape, mbit, given))
                except ranks.RankFailed as error:
                    failed = True
                    console.print(f"{shape} at {mbit:g} Mbit: {error}", markup=False)
    text = tables.as_text(table(results, given.rounds))
    for key, value in environment.items():
        print(f"{key}: {value}")
    print(text)
    if given.keep:
        command = shlex.join(["python", "bench/network.py", *sys.argv[1:]])
        raw = [dataclasses.asdict(result) for result in results]
        folder = keeping.keep("network", command, environment, text, raw)
        print(f"kept in {folder.relative_to(machine.ROOT)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
