"""What a worker sees of the others: who is alive, where they are, what is done. And its own words.

The launcher's roster says who is alive; each worker's area says what it does. Areas of the dead are
read as well, because what they had finished still counts, until this worker is past it.

Knows words. Must not know gradients or the user's script.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from closeranks.lanes import words as w
from closeranks.lanes.assign import Mate
from closeranks.lanes.seat import Seat
from closeranks.segment.area import Area, order_writes
from closeranks.segment.roster import ALIVE, ENDED, KILLED


@dataclass(frozen=True)
class Task:
    """A lane or a region of a tick."""

    tick: int
    is_region: bool
    index: int


class Board:
    """All areas of a job, seen by one worker."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.roster = seat.roster
        self.me = Area(self.roster.fd, seat.number)
        self.me.take_head()
        self.alive: list[Area] = []  # without me
        self.dead: list[Area] = []
        self._areas: dict[int, Area] = {}
        self._seen = (-1, -1)
        self._forgotten: set[int] = set()
        self.refresh()

    def refresh(self) -> bool:
        """Look at the roster; whether anything has changed there."""
        seen = (self.roster.generation, len(self.roster))
        if seen == self._seen:
            return False
        self._seen = seen
        self.alive, self.dead = [], []
        for number in range(seen[1]):
            if number == self.me.number or number in self._forgotten:
                continue
            area = self._areas.get(number)
            if area is None:
                area = self._areas[number] = Area(self.roster.fd, number)
            (self.alive if self.roster.status(number) == ALIVE else self.dead).append(area)
        self.alive.sort(key=lambda area: self.roster.worker(area.number))
        return True

    def forget_before(self, tick: int) -> None:
        """The dead who were not at this tick have nothing to tell any more.

        But those whose script has ended remain: it should not have ended before ours.
        """
        for area in [a for a in self.dead if a.words[w.AT] < tick]:
            if self._has_left(area):
                continue
            self.dead.remove(area)
            self._forgotten.add(area.number)
            self._areas.pop(area.number).forget()

    @property
    def known(self) -> list[Area]:
        return [self.me, *self.alive, *self.dead]

    def standing(self) -> tuple[int, int]:
        """How many workers there are now, and the place of this one among them."""
        before = sum(self.roster.worker(a.number) < self.seat.worker for a in self.alive)
        return len(self.alive) + 1, before

    # What others do.

    def ahead_of(self, tick: int) -> bool:
        """Whether somebody alive has all of this tick."""
        return any(area.words[w.AT] > tick for area in self.alive)

    def crew(self, tick: int, is_region: bool, now_ns: int) -> list[Mate]:
        """Who can be expected to work on a tick, in the order of workers, me among them."""
        expected: list[tuple[int, Mate]] = [(self.seat.worker, Mate(self.me.number))]
        served = self._served(tick, now_ns)
        for area in self.alive:
            at = area.words[w.AT]
            patience_s = served.get(area.number, 0.0)
            is_here = tick - 1 <= at and at > 0 and not area.words[w.LOST]
            if not is_here and patience_s <= 0.0:
                continue
            mate = Mate(area.number, patience_s=patience_s)
            work, since_ns = area.words[w.WORK], area.words[w.WORK_NS]
            if work and w.task_of(work)[:2] == (tick, is_region):
                busy_s = max(0, now_ns - since_ns) / 1e9
                usual_s = 0.0 if is_region else area.words[w.LANE_NS] / 1e9
                mate = Mate(area.number, w.task_of(work)[2], busy_s, usual_s=usual_s)
            expected.append((self.roster.worker(area.number), mate))
        expected.sort(key=lambda pair: pair[0])
        return [mate for _, mate in expected]

    def _served(self, tick: int, now_ns: int) -> dict[int, float]:
        """Who is just being given somebody's state, and for how long they may be waited for."""
        found = {}
        for area in [self.me, *self.alive]:
            serving = area.words[w.SERVING]
            if serving and area.words[w.SERVING_TICK] <= tick:
                left_ns = area.words[w.SERVING_NS] + area.words[w.PATIENCE_NS] - now_ns
                if left_ns > 0:
                    found[w.asker_of(serving)[0]] = left_ns / 1e9
        return found

    def elsewhere(self, tick: int) -> tuple[int, str] | None:
        """A worker that does something else in this tick than I do, and what."""
        mine = self.me.words[w.PLACE + (tick & 1)]
        for area in self.alive:
            place = area.words[w.PLACE + (tick & 1)]
            if area.words[w.AT] == tick and place >> 24 == tick and place != mine:
                start = w.PLACE_TEXT + (tick & 1) * w.PLACE_TEXT_BYTES
                text = area.head_text(start, w.PLACE_TEXT_BYTES)
                return self.roster.worker(area.number), f"is at {text}"
        worker = self.left_before(tick + 1)
        return None if worker is None else (worker, "has ended its script")

    def left_before(self, tick: int) -> int | None:
        """A worker whose script has ended and had no such tick."""
        for area in (*self.alive, *self.dead):
            # In this order: who has left does not move any more.
            if self._has_left(area) and area.words[w.AT] < tick:
                return self.roster.worker(area.number)
        return None

    def _has_left(self, area: Area) -> bool:
        """Whether the script of a worker that was not lost has come to its end."""
        if area.words[w.LOST]:
            return False
        return bool(area.words[w.LEFT]) or self.roster.status(area.number) == ENDED

    def anyone_has_ended(self) -> bool:
        return any(row.status == ENDED for row in self.roster.rows())

    def killed_at(self, task: Task) -> list[int]:
        """The workers that were killed while they were busy with a task."""
        key = w.task_key(task.tick, task.is_region, task.index)
        return [
            self.roster.worker(area.number)
            for area in self.dead
            if area.words[w.WORK] == key and self.roster.status(area.number) == KILLED
        ]

    # What I do.

    def enter(self, tick: int, place: str, lane_s: float) -> None:
        """I am at this tick now, and do this in it; one of its lanes usually takes me so long."""
        self.me.words[w.LANE_NS] = int(lane_s * 1e9)
        words, parity = self.me.words, tick & 1
        start = w.PLACE_TEXT + parity * w.PLACE_TEXT_BYTES
        with self.me.write(w.PLACE + parity, tick << 24 | w.hash24(place)):
            self.me.set_head_text(start, w.PLACE_TEXT_BYTES, place)
        words[w.AT] = tick
        self.forget_before(tick)

    def begin(self, task: Task) -> None:
        now_ns = time.monotonic_ns()
        self.me.words[w.WORK_NS] = now_ns
        self.me.words[w.WORK] = w.task_key(task.tick, task.is_region, task.index)

    def leave(self) -> None:
        """My script has ended. Seen by all before I look at where they are."""
        self.me.words[w.LEFT] = 1
        order_writes()

    def end_task(self) -> None:
        self.me.words[w.WORK] = 0
        self.me.words[w.PROGRESS_NS] = time.monotonic_ns()
