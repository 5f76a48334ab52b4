"""What a death costs: kill -9 and SIGSTOP of one of three workers, here and with torch's own tools.

    python bench/recovery.py                       ours and torchrun: some minutes
    python bench/recovery.py --torchft PYTHON      also torchft, by an interpreter that has it
    python bench/recovery.py --rounds 1            a look
    python bench/recovery.py --keep                and write bench/results/<date>-recovery/

The same model and batches for all (recovery_scripts). A fault hits the worker that has just worked.
The gap is the longest time between two steps that anybody finishes, from the fault on; beyond it
is what is left without the median step and, for ours, one lane, which has to be done again. Ours
runs to its end, and must have the digest of a run in peace.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import keeping
import machine
from recovery_jobs import Job, Note, Ours, Torchft, Torchrun, TunedTorchft
from rich.console import Console
from rich.table import Table

from closeranks.bench import tables

WORKERS = 3
_STEPS_BETWEEN = 40
_STOPPED_S = 3.0
_LIMIT_S = 120.0
_WAYS: dict[str, type[Job]] = {"ours": Ours, "torchrun": Torchrun}


@dataclass
class Fault:
    """One fault and what came of it."""

    way: str
    kind: str
    gap_ms: float
    beyond_ms: float
    step_ms: float
    lost_steps: int  # to be done again
    discarded: int  # work of a survivor that came to nothing, and steps that nobody finished
    back_ms: float | None  # until the one that died contributes again
    own_start_ms: float | None  # of which its script takes so long to come to its loop


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="faults of each kind (5)")
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=list(_WAYS))
    parser.add_argument("--torchft", metavar="PYTHON", help="an interpreter that has torchft")
    parser.add_argument("--keep", action="store_true", help="write a folder in bench/results")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    ways = {name: _WAYS[name] for name in given.ways}
    if given.torchft:
        Torchft.python = given.torchft
        ways |= {"torchft": Torchft, "torchft 500 ms": TunedTorchft}
    console, found, digests = Console(stderr=True), [], []
    for name, way in ways.items():
        with console.status(name), tempfile.TemporaryDirectory(prefix="recovery-") as folder:
            found += disturb(name, way, Path(folder), given.rounds, digests)
    if "ours" in ways:
        with console.status("ours, in peace"), tempfile.TemporaryDirectory() as folder:
            digests.append(in_peace(Path(folder), _steps(given.rounds)))
    text = tables.as_text([_table(found), _verdict(digests)])
    sys.stdout.write(text)
    if given.keep:
        command = shlex.join(["python", "bench/recovery.py", *sys.argv[1:]])
        raw = {"faults": [asdict(each) for each in found], "digests": digests}
        kept = keeping.keep("recovery", command, machine.describe(), text, raw)
        sys.stdout.write(f"\nKept in {kept}\n")
    return 0 if len(set(digests)) <= 1 else 1


def _steps(rounds: int) -> int:
    """Enough for all faults, a whole number of epochs of 8 steps."""
    return _STEPS_BETWEEN * (4 * rounds + 8)


def in_peace(folder: Path, steps: int) -> str:
    job = Ours(folder, steps)
    try:
        assert job.wait_for(lambda notes: job.is_over(), _LIMIT_S), job.output()
        return job.digest()
    finally:
        job.end()


def disturb(
    name: str, way: type[Job], folder: Path, rounds: int, digests: list[str]
) -> list[Fault]:
    """Kill, then stop; between two faults the job has some steps to itself."""
    kinds = ["kill"] * rounds + (["stop"] * rounds if name != "torchrun" else [])
    job = way(folder, _steps(rounds) if way is Ours else 1_000_000)
    found = []
    try:
        goal = _STEPS_BETWEEN
        for kind in kinds:
            reached = goal
            came = job.wait_for(lambda notes: _all_work(notes, reached), _LIMIT_S)  # noqa: B023
            assert came, f"{name} does not come to step {goal}\n{job.output()[-3000:]}"
            found.append(_inject(name, job, kind))
            goal = _newest(job.notes()) + _STEPS_BETWEEN
        if isinstance(job, Ours):
            assert job.wait_for(lambda notes: job.is_over(), _LIMIT_S), job.output()
            digests.append(job.digest())
    finally:
        job.end()
    return found


def _inject(name: str, job: Job, kind: str) -> Fault:
    known = {note.pid for note in job.notes()}
    victim = job.living()[-1]
    at_s = time.monotonic()
    os.kill(victim, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    before = [note for note in job.notes() if note.at_s <= at_s]
    if kind == "stop":
        job.wait_for(lambda notes: False, _STOPPED_S)  # Tending to it all the while.
        os.kill(victim, signal.SIGCONT)
    newest = _newest(before)
    job.wait_for(lambda notes: _newest(notes) > newest + 10, _LIMIT_S)
    if kind == "kill":
        job.wait_for(lambda notes: _contribution(notes, known) is not None, 20.0)
    return _judge(name, kind, at_s, victim, before, job.notes(), known)


def _judge(
    way: str, kind: str, at_s: float, victim: int, before: list[Note], notes: list[Note],
    known: set[int],
) -> Fault:  # fmt: skip
    step_s = _median_step_s(before)
    # A worker that is alone for the rest of the gap has one lane to do again.
    lane_s = _median_lane_s(before) if way == "ours" else 0.0
    moments = [n.at_s for n in before if n.what == "step"][-1:]
    moments += [n.at_s for n in notes if n.what == "step" and n.at_s > at_s and n.pid != victim]
    gap_s = max((b - a for a, b in itertools.pairwise(moments)), default=0.0)
    after = [n for n in notes if n.what == "step" and n.at_s > at_s]
    back, own = _contribution(notes, known) or (None, None)
    return Fault(
        way=way,
        kind=kind,
        gap_ms=1e3 * gap_s,
        beyond_ms=1e3 * max(0.0, gap_s - step_s - lane_s),
        step_ms=1e3 * step_s,
        lost_steps=_done_again(before, after),
        discarded=len([n for n in notes if n.what == "discarded" and n.at_s > at_s])
        + _done_by_nobody(before, after),
        back_ms=None if back is None or kind == "stop" else 1e3 * (back - at_s),
        own_start_ms=None if own is None or kind == "stop" else 1e3 * own,
    )


def _done_again(before: list[Note], after: list[Note]) -> int:
    """How far the furthest fallen process fell back; a new one is to begin after the newest."""
    newest: dict[int, int] = {}
    for note in before:
        if note.what == "step":
            newest[note.pid] = max(note.number, newest.get(note.pid, 0))
    first: dict[int, int] = {}
    for note in after:
        first[note.pid] = min(note.number, first.get(note.pid, note.number))
    everybodys = max(newest.values(), default=-1)
    fallen = [newest.get(pid, everybodys) + 1 - number for pid, number in first.items()]
    return max(0, *fallen) if fallen else 0


def _done_by_nobody(before: list[Note], after: list[Note]) -> int:
    """Steps from the fault on that no process finished, although later ones were."""
    finished = {note.number for note in after}
    expected = range(_newest(before) + 1, max(finished, default=0) + 1)
    return len([number for number in expected if number not in finished])


def _all_work(notes: list[Note], step: int) -> bool:
    """Whether three workers have lately finished steps beyond this one."""
    now_s = time.monotonic()
    return len({n.pid for n in notes if n.number > step and n.at_s > now_s - 0.5}) == WORKERS


def _newest(notes: list[Note]) -> int:
    return max((note.number for note in notes if note.what == "step"), default=0)


def _contribution(notes: list[Note], known: set[int]) -> tuple[float, float] | None:
    """When a process that is new first contributed, and how long its script took to its loop."""
    for note in notes:
        if note.pid not in known and note.what in ("lane", "step"):
            own = {n.what: n.at_s for n in notes if n.pid == note.pid and n.number == 0}
            if "ready" in own:
                return note.at_s, own["ready"] - own["begin"]
            return note.at_s, 0.0
    return None


def _median_step_s(notes: list[Note]) -> float:
    first: dict[int, float] = {}
    for note in notes:
        if note.what == "step":
            first.setdefault(note.number, note.at_s)
    moments = sorted(first.values())[-30:]
    return statistics.median(b - a for a, b in itertools.pairwise(moments))


def _median_lane_s(notes: list[Note]) -> float:
    lengths, last = [], {}
    for note in notes:
        if note.what == "lane" and note.pid in last and last[note.pid].what == "lane":
            lengths.append(note.at_s - last[note.pid].at_s)
        last[note.pid] = note
    return statistics.median(lengths or [0.0])


def _table(found: list[Fault]) -> Table:
    columns = [
        "way",
        "fault",
        "times",
        "step",
        "gap",
        "worst",
        "beyond",
        "worst ",
        "lost",
        "discarded",
    ]
    table = tables.table(
        "milliseconds; medians and the worst", [*columns, "back", "own start"], ["way", "fault"]
    )
    for way, kind in dict.fromkeys((each.way, each.kind) for each in found):
        these = [each for each in found if (each.way, each.kind) == (way, kind)]
        gaps, beyond = [f.gap_ms for f in these], [f.beyond_ms for f in these]
        backs = [f.back_ms for f in these if f.back_ms is not None]
        owns = [f.own_start_ms for f in these if f.own_start_ms is not None]
        table.add_row(
            way,
            kind,
            str(len(these)),
            f"{statistics.median(f.step_ms for f in these):.0f}",
            f"{statistics.median(gaps):.0f}",
            f"{max(gaps):.0f}",
            f"{statistics.median(beyond):.0f}",
            f"{max(beyond):.0f}",
            str(max(f.lost_steps for f in these)),
            str(max(f.discarded for f in these)),
            f"{statistics.median(backs):.0f}" if backs else "-",
            f"{statistics.median(owns):.0f}" if owns else "-",
        )
    return table


def _verdict(digests: list[str]) -> str:
    if not digests:
        return ""
    same = len(set(digests)) == 1
    return "\nours: digests disturbed and in peace are " + ("equal" if same else "NOT EQUAL")


if __name__ == "__main__":
    sys.exit(main())
