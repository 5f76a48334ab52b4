"""The command: start the measurement under our launcher, and show what came of it.

1. Decide: how many ranks, what is measured, and whether there is memory for it.
2. Measure: closeranks.measure, in workers, which leave a file each.
3. Show: tables and a verdict, or JSON, and a picture if one is wanted.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from closeranks.bench import allreduce, findings, picture, raw, tables, where
from closeranks.bench.raw import MIB
from closeranks.bench.verdict import verdict
from closeranks.launch import machine
from closeranks.launch.options import RunOptions
from closeranks.launch.run import run

_SIZES_MIB = (4 / 1024, 1.0, 25.0, 100.0)
_SIZES_QUICK_MIB = (4 / 1024, 1.0, 25.0)
_CASES = ("tiny", "mlp16", "transformer")
_CASES_QUICK = ("tiny", "mlp16")
_ROUNDS, _ROUNDS_QUICK = 12, 3
_ENDED_BY_THE_USER = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_TENSORS = 12  # of one size, that a rank holds at once for all ways together


@dataclass(frozen=True)
class Wish:
    """What the user asks for."""

    workers: int | None
    is_quick: bool
    as_json: bool
    plot: Path | None


def bench(wish: Wish) -> int:
    """All of it; returns the exit code."""
    # Phase 1
    if wish.plot is not None:
        _check_plot(wish.plot)
    cores = machine.cores()
    ranks = wish.workers or max(2, cores.count)
    if ranks < 2:
        raise ValueError(f"-n {ranks}: there is nothing to exchange among fewer than 2 ranks")
    memory = machine.memory()
    sizes = fitting(
        _SIZES_QUICK_MIB if wish.is_quick else _SIZES_MIB, ranks, memory.total - memory.used
    )
    cases = _CASES_QUICK if wish.is_quick else _CASES
    rounds = _ROUNDS_QUICK if wish.is_quick else _ROUNDS
    # Phase 2
    folder = Path(tempfile.mkdtemp(prefix="closeranks-bench-"))
    arguments = [str(folder), "--rounds", str(rounds), "--cases", *cases]
    arguments += ["--sizes", *map(str, sizes)]
    options = RunOptions(
        target="closeranks.measure",
        arguments=tuple(arguments),
        is_module=True,
        workers=ranks,
        log_dir=folder,
        name="logs",
    )
    code = run(options)
    if code:
        if code in _ENDED_BY_THE_USER:
            shutil.rmtree(folder)
        return code  # A report has named the folder with the logs: it stays.
    hauls = [raw.read(folder / f"rank-{rank}.json") for rank in range(ranks)]
    shutil.rmtree(folder)
    # Phase 3
    loads, is_pinned = hauls[0].loads, ranks <= len(cores.cpus)
    found = allreduce.collect(ranks, is_pinned, loads, [haul.blocks for haul in hauls])
    steps = [
        findings.collect(case, loads, is_pinned, [haul.steps[case] for haul in hauls])
        for case in cases
    ]
    _show(wish, found, steps, rounds)
    return 0


def fitting(sizes_mib: tuple[float, ...], ranks: int, free_bytes: int) -> list[float]:
    """The sizes for which all ways fit into half of the memory that is free."""
    return [s for s in sizes_mib if s * MIB * ranks * _TENSORS <= free_bytes / 2]


def _check_plot(path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"--plot {path} needs matplotlib, which is not installed. Nothing was measured; "
            "`pip install 'closeranks[plot]'` brings it"
        )
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: name a file in a folder that is there")


def _show(
    wish: Wish, found: list[allreduce.Result], steps: list[findings.Result], rounds: int
) -> None:
    environment = where.describe()
    sentence = verdict(found, steps)
    if wish.as_json:
        told = {
            "environment": environment,
            "rounds": rounds,
            "allreduce": [dataclasses.asdict(result) for result in found],
            "steps": [dataclasses.asdict(result) for result in steps],
            "verdict": sentence,
        }
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        lines = [f"{name}: {value}" for name, value in environment.items()]
        parts = [*tables.allreduce_parts(found, rounds), tables.step_table(steps, rounds)]
        text = tables.as_text([*parts, tables.STEP_LEGEND])
        sys.stdout.write("\n".join([*lines, "", text, sentence]) + "\n")
        load, cores = steps[0].load_before, machine.cores().count
        if load > cores / 2:
            sys.stdout.write(
                f"The machine was busy before it began (load {load:.1f} on {cores} cores): trust "
                "none of these times, and the ratios a little.\n"
            )
    if wish.plot is not None:
        picture.draw(found, wish.plot)
