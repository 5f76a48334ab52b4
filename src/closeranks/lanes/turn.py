"""One tick as one worker lives it: what to do next, until the tick is complete or was missed.

    look    is somebody ahead? are all results there? which lanes are done?
    choose  a lane or a region to work on (assign.py), or wait a moment and look again

A tick is *complete* when all its results are there, whoever made them; from then on they are facts.
It was *missed* when somebody alive is past it and results are gone, because their place was used
again two ticks later: this worker was overtaken.

Every wait looks at who is alive and at whether the others do the same thing. Who stands still for
too long is the launcher's business (launch/muster.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from closeranks.errors import LaneDeadly, LoopDiverged
from closeranks.lanes import words as w
from closeranks.lanes.assign import Choice, Limits, choose, covered
from closeranks.lanes.board import Board, Task
from closeranks.lanes.folds import Nodes
from closeranks.segment.area import Area

DEADLY = 2  # workers killed at the same lane


@dataclass(frozen=True)
class Shape:
    """What there is to do in a tick. Without regions the lanes' records are the results."""

    place: str
    lanes: int
    regions: int = 0
    has_folds: bool = False
    may_repeat: bool = True  # a lane that is begun may be taken from a worker that is late


class Turn:
    """One tick, for one worker. Times are measured in `median_s`, the usual length of a lane."""

    def __init__(self, board: Board, tick: int, shape: Shape, median_s: float | None) -> None:
        self.board = board
        self.tick = tick
        self.shape = shape
        self.median_s = median_s
        self._has_all_lanes = False  # then nodes tells where
        self.limits = limits(median_s, shape.may_repeat)
        self.makers: list[Area | None] = [None] * shape.regions  # of results
        self.nodes: Nodes = {}
        self._idle_since = time.monotonic()
        board.enter(tick, shape.place, 0.0 if median_s is None else median_s)

    def next(self) -> Task | None:
        """The next task, begun; None: nothing is left to do, see is_complete()."""
        wait = Wait(workers=self.board.roster.workers)
        self._idle_since = time.monotonic()
        while True:
            self.board.refresh()
            ahead = self.board.ahead_of(self.tick)  # Before the results are looked for.
            if self.is_complete():
                return None
            if ahead:
                return None
            self._check_others()
            task = self._choose()
            if task is not None:
                self.board.begin(task)
                return task
            wait.once()

    def is_complete(self) -> bool:
        """Whether all results are there: every region (`makers` says where), every record."""
        return self._has_regions() and len(self._records()) == self.shape.lanes

    def _has_regions(self) -> bool:
        if not self.makers:
            return True
        first = w.region_word(self.tick, 0)
        self.makers = [None] * self.shape.regions
        for area in self.board.known:
            ticks = area.words[first : first + self.shape.regions].tolist()
            for index, tick in enumerate(ticks):
                if tick == self.tick:
                    self.makers[index] = area
        return None not in self.makers

    def _records(self) -> set[int]:
        """The lanes of which somebody tells."""
        first = w.record_word(self.tick, 0)
        told = [a.words[first : first + self.shape.lanes].tolist() for a in self.board.known]
        return {lane for ticks in told for lane, tick in enumerate(ticks) if tick == self.tick}

    def _lanes_done(self) -> set[int]:
        """The lanes that need not be computed. Both parts of a lane may be with different workers,
        and one may be gone: a worker that is dead now may have been two ticks further."""
        records = self._records()
        if not self.shape.has_folds or self._has_regions():
            return records
        nodes: dict[tuple[int, int], tuple[Area, int]] = {}
        end = w.FOLDS + self.shape.lanes + 2
        for area in self.board.known:
            for slot, word in enumerate(area.words[w.FOLDS : end].tolist()):
                tick, lo, hi = w.node_of(word)
                if tick == self.tick:
                    nodes[lo, hi] = area, slot
        self.nodes = nodes
        return covered(nodes) & records

    def look_again(self) -> None:
        """What was known of the lanes has turned out to be gone."""
        self._has_all_lanes = False

    def _regions_done(self) -> set[int]:
        return {index for index, maker in enumerate(self.makers) if maker is not None}

    def _choose(self) -> Task | None:
        count, is_region = self.shape.lanes, False
        if len(self._regions_done()) == self.shape.regions:
            self._has_all_lanes = False  # And yet the tick is not complete: a lane is gone again.
        done = set(range(count)) if self._has_all_lanes else self._lanes_done()
        if len(done) == count:
            self._has_all_lanes = True
            done, count, is_region = self._regions_done(), self.shape.regions, True
        crew = self.board.crew(self.tick, is_region, time.monotonic_ns())
        idle_s = time.monotonic() - self._idle_since
        limits = REGION_LIMITS if is_region else self.limits
        mine_s = None if is_region else self.median_s
        choice: Choice = choose(count, done, self.board.me.number, crew, idle_s, limits, mine_s)
        if choice.task is None:
            return None
        task = Task(self.tick, is_region, choice.task)
        if not is_region:
            self._check_deadly(task)
        return task

    # What else is looked at while waiting.

    def _check_others(self) -> None:
        other = self.board.elsewhere(self.tick)
        if other is not None:
            worker, does = other
            raise LoopDiverged(
                f"worker {worker} {does}, while worker {self.board.seat.worker} is at "
                f"{self.shape.place}: every worker must do the same calls on its Ranks in the same "
                "order. Training stopped; let every decision depend on step.values or on "
                "ranks.state, which are equal everywhere."
            )

    def _check_deadly(self, task: Task) -> None:
        victims = self.board.killed_at(task)
        if len(victims) >= DEADLY:
            raise LaneDeadly(
                f"lane {task.index} of {self.shape.place} was begun by workers "
                f"{' and '.join(map(str, victims))}, and both were killed by a signal while they "
                "computed it. Training stopped, because a third would be killed as well: look at "
                "its samples, at memory, and at the launcher's messages about the signals."
            )


REGION_LIMITS = Limits(late_s=0.01, grace_s=0.005)  # A region takes less than a millisecond.


def limits(median_s: float | None, may_repeat: bool = True) -> Limits:
    """When a lane may be taken from its worker, given how long a lane usually takes."""
    if not may_repeat:
        return Limits(late_s=float("inf"), grace_s=0.1)
    if median_s is None:  # This worker has not computed any yet.
        return Limits(late_s=1.0, grace_s=0.2)
    late_s = max(0.1, 3.0 * median_s)
    return Limits(late_s, min(late_s, max(0.01, 0.5 * median_s)))


class Wait:
    """Ever longer pauses. Short ones where every worker has a core, so nobody needs this one."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep, workers: int = 0) -> None:
        self._looks = 0
        self._sleep = sleep
        has_cores = 0 < workers <= (os.cpu_count() or 1)
        self._longest_s = 100e-6 if has_cores else 500e-6

    def once(self) -> None:
        self._looks += 1
        if self._looks <= 20:
            os.sched_yield()
        else:
            self._sleep(min(50e-6 * (self._looks - 20), self._longest_s))
