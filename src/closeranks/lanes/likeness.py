"""Whether workers are alike: the conditions they compute under, and the values they hold.

    conditions   when a worker comes: the build of torch, the kind of CPU, threads, lanes, seed
    values       when training begins, at the end of each epoch and whenever lanes are checked:
                 everything prepared, compared by hashes with names

Each writes down its own and looks at the others', so that at least the second one sees a
difference. Nobody waits for anybody here. Knows words, texts and hashes.
"""

from __future__ import annotations

import json
from typing import Any

from closeranks.checkpoint.format import digest
from closeranks.errors import ModelMismatch, WorkersDiffer
from closeranks.lanes import words as w
from closeranks.lanes.board import Board
from closeranks.lanes.records import Records
from closeranks.lanes.state import Prepared

_TOLD = {
    "torch": "the build of torch",
    "cpu": "the CPU",
    "threads": "threads",
    "lanes": "lanes",
    "seed": "seed",
}
_SHOWN = 3


class Likeness:
    """One worker's comparison with the others."""

    def __init__(self, records: Records, prepared: Prepared, conditions: dict[str, Any]) -> None:
        self.records = records
        self.board: Board = records.board
        self.prepared = prepared
        self.conditions = conditions

    def introduce(self) -> None:
        """Tell the conditions of this worker; WorkersDiffer if somebody has others."""
        me = self.board.me
        with me.write(w.CONDITIONS, 1):
            me.set_head_text(
                w.CONDITIONS_TEXT, w.CONDITIONS_TEXT_BYTES, json.dumps(self.conditions)
            )
        for area in self.board.alive:
            if not area.words[w.CONDITIONS]:
                continue
            theirs = json.loads(area.head_text(w.CONDITIONS_TEXT, w.CONDITIONS_TEXT_BYTES))
            differing = [n for n in _TOLD if theirs.get(n) != self.conditions.get(n)]
            if differing:
                other = self.board.roster.worker(area.number)
                told = "; ".join(
                    f"{_TOLD[n]}: {self.conditions.get(n)}, there {theirs.get(n)}"
                    for n in differing
                )
                raise WorkersDiffer(
                    f"worker {self.board.seat.worker} computes under other conditions than worker "
                    f"{other} ({told}), so its lanes would have other bits. Training stopped; "
                    "start all workers from the same environment, with the same arguments of Ranks."
                )

    def meet(self) -> int:
        """Tell how the values look before the first step; returns a number that is never 0."""
        looks = looks_of(self.prepared)
        number = int(digest(looks)[:15], 16) | 1
        self.records.tell_looks(0, w.LOOKS, number, json.dumps(looks))
        return number

    def compare_first(self, looks: int) -> None:
        """ModelMismatch if somebody who is here has prepared something else."""
        for area in self.board.alive:
            theirs = area.words[w.LOOKS]
            if theirs not in (0, looks):
                pair = sorted((self.board.roster.worker(area.number), self.board.seat.worker))
                text = self.records.looks_of(area, 0, w.LOOKS, theirs)
                raise ModelMismatch(
                    f"workers {pair[0]} and {pair[1]} have prepared different things, or the same "
                    f"with different values{self._where(text)}. Training stopped; make the Ranks "
                    "before the model, so that its seed decides the values, and build the same on "
                    "every worker."
                )

    def compare(self, tick: int, place: str) -> None:
        """WorkersDiffer if somebody who was at this tick holds other values after it."""
        slot, word = 1 + (tick & 1), w.ALIKE + (tick & 1)
        mine = json.dumps(looks_of(self.prepared))
        self.records.tell_looks(slot, word, tick, mine)
        for area in self.board.alive:
            theirs = self.records.looks_of(area, slot, word, tick)
            if theirs is not None and theirs != mine:
                pair = sorted((self.board.roster.worker(area.number), self.board.seat.worker))
                raise WorkersDiffer(
                    f"workers {pair[0]} and {pair[1]} hold different values after {place}"
                    f"{self._where(theirs)}. Training stopped, because nobody can tell which are "
                    "right; what changes parameters or optimizers must be the same on every "
                    "worker, and depend on nothing but step.values and ranks.state."
                )

    def _where(self, text: str | None) -> str:
        if text is None:
            return ""
        mine, theirs = looks_of(self.prepared), json.loads(text)
        names = [n for n in {**mine, **theirs} if mine.get(n) != theirs.get(n)]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return f": {', '.join(names[:_SHOWN])}{more}"


def looks_of(prepared: Prepared) -> dict[str, str]:
    """A short hash of every value, by its name."""
    found: dict[str, str] = {}
    for name, tree in prepared.trees().items():
        _walk(name, tree, found)
    if len(found) <= 5000:
        return found
    # So many that their names would not fit: one hash for each object.
    return {name: digest(tree)[:16] for name, tree in prepared.trees().items()}


def _walk(name: str, tree: Any, found: dict[str, str]) -> None:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            _walk(f"{name}.{key}", value, found)
    else:
        found[name] = digest(tree)[:16]
