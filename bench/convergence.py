"""Time to a target over a slow network: does a wire format learn as well, and how much sooner?

    python bench/convergence.py                     both tasks, 3 seeds, 100 Mbit: about 15 minutes
    python bench/convergence.py --quick             one seed, a third of the steps: a look
    python bench/convergence.py --task gpt --wire exact int8 --seeds 5
    python bench/convergence.py --keep              and write bench/results/<date>-convergence/

Two hosts of one rank are network namespaces on this machine, their links shaped with tbf: needs
root and iproute2. Fashion-MNIST is downloaded once with apt-get, into ~/.cache/closeranks. The
curves are drawn with matplotlib (the extra `plot`).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import keeping
import machine
from learning import Curve, learn
from rich.console import Console
from tasks import TASKS, fetch_clothes
from verdicts import EXACT, Verdict, judge, spread

import ranks
from closeranks.bench import tables

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.hosts.network import INTERFACE, Network, why_not

_WIRES = (EXACT, "bf16", "fp16", "int8", "powersgd:4", "auto")
_PICTURE = "curves.png"
_LEGEND = """\
final: mean over seeds, smaller is better. Holds: it is no worse than the worst of the exact runs.
to target: seconds until the worst final metric of the exact runs is reached, the median over seeds;
"missing": most seeds never reach it. x: how much sooner than exact. run: seconds for all steps.
"""
Curves = dict[str, dict[str, list[Curve]]]  # by task and format, one for each seed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--task", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--wire", nargs="+", default=list(_WIRES), metavar="FORMAT")
    parser.add_argument("--mbit", type=float, default=100.0, help="speed of the links (100)")
    parser.add_argument("--seeds", type=int, help="runs of every format (3, or 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help="one seed, fewer steps")
    parser.add_argument("--keep", action="store_true", help="write a folder in bench/results")
    parser.add_argument("--deadline-s", type=float, default=300.0, help="for one run")
    given = parser.parse_args()
    given.seeds = given.seeds or (1 if given.quick else 3)
    if given.seeds < 1 or not given.mbit > 0:
        parser.error("--seeds and --mbit want positive numbers")
    if EXACT not in given.wire:
        given.wire.insert(0, EXACT)
    return given


def run_all(given: argparse.Namespace, console: Console) -> Curves:
    found: Curves = {task: {wire: [] for wire in given.wire} for task in given.task}
    with Network(2, given.mbit) as network:
        meeting = f"tcp://{network.address(0)}:29500"
        places = [ranks.Place(name, meeting, INTERFACE) for name in network.names]
        for task in given.task:
            steps = TASKS[task].steps // (3 if given.quick else 1)
            for seed in range(given.seeds):
                for wire in given.wire:
                    with console.status(f"{task}, seed {seed}, {wire}"):
                        job = (task, wire, seed, steps)
                        curves = ranks.run(2, given.deadline_s, learn, *job, places=places)
                    found[task][wire].append(curves[0])
    return found


def table(task: str, verdicts: dict[str, Verdict], limits: tuple[float, float]) -> Any:
    made = tables.table(
        f"{task}: {TASKS[task].metric}; exact runs end between {limits[0]:.4g} and {limits[1]:.4g}",
        ("format", "final", "of seeds", "holds", "to target", "x", "run"),
        left=("format", "of seeds"),
    )
    exact_s = verdicts[EXACT].seconds
    for name, verdict in verdicts.items():
        is_missing = math.isinf(verdict.seconds)
        made.add_row(
            name,
            f"{sum(verdict.finals) / len(verdict.finals):.4g}",
            " ".join(f"{final:.4g}" for final in verdict.finals),
            "yes" if verdict.holds else "MISSES",
            "missing" if is_missing else f"{verdict.seconds:.1f}",
            "" if is_missing else f"{exact_s / verdict.seconds:.1f}",
            f"{verdict.total_s:.1f}",
        )
    return made


def draw(found: Curves, path: Path) -> None:
    """Metric against time, a line for each seed; the band is where the exact runs end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(found), figsize=(7 * len(found), 5), squeeze=False)
    for axis, (task, by_wire) in zip(axes[0], found.items(), strict=True):
        verdicts = judge(by_wire)
        for number, (wire, curves) in enumerate(by_wire.items()):
            for seed, curve in enumerate(curves):
                label = wire + ("" if verdicts[wire].holds else " (misses)")
                axis.plot(
                    curve.seconds,
                    curve.metrics,
                    color=f"C{number}",
                    linewidth=1.2,
                    linestyle="-" if verdicts[wire].holds else ":",
                    label=None if seed else label,
                )
        axis.axhspan(*spread(by_wire), color="black", alpha=0.12, label="end of exact runs")
        axis.set(title=task, xlabel="seconds of training", ylabel=TASKS[task].metric, yscale="log")
        axis.set_xscale("log")
        axis.grid(alpha=0.3, which="both")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    given = arguments()
    console = Console(stderr=True)
    reason = why_not()
    if reason:
        console.print(f"nothing can be measured here: {reason}", markup=False)
        return 1
    if "cnn" in given.task:
        fetch_clothes()
    environment = machine.describe() | {"links": f"{given.mbit:g} Mbit, 2 hosts of 1 rank"}
    load_before = machine.load()
    try:
        found = run_all(given, console)
    except ranks.RankFailed as error:
        console.print(str(error), markup=False)
        return 1
    environment["load"] = f"{load_before:.1f} before, {machine.load():.1f} after"
    parts = [table(task, judge(curves), spread(curves)) for task, curves in found.items()]
    text = tables.as_text([*parts, _LEGEND])
    for key, value in environment.items():
        print(f"{key}: {value}")
    print(text)
    if given.keep:
        command = shlex.join(["python", "bench/convergence.py", *sys.argv[1:]])
        raw = {
            task: {wire: [dataclasses.asdict(c) for c in curves] for wire, curves in each.items()}
            for task, each in found.items()
        }
        folder = keeping.keep("convergence", command, environment, text, raw, [_PICTURE])
        draw(found, folder / _PICTURE)
        print(f"kept in {folder.relative_to(machine.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
