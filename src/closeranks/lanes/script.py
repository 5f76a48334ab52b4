"""Where a worker is in the user's script, and how it gets to where the others are.

The calls on a Ranks at the outer level are numbered. The *position* of a training is the number of
a call and the place inside it; every worker reaches the same positions in the same order. At each
position a worker is at a *boundary*: its state is whole, so it can be given to others, kept, or
overwritten.

A newcomer runs the script from its top. A call that lies before the position of the state it gets
is complete: steps() yields nothing, evaluate() returns what is recorded. In the first call that is
not complete the state is loaded.

Knows positions; what is inside a call, the call knows.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from closeranks.errors import CheckpointMismatch, LoopDiverged
from closeranks.lanes import words as w
from closeranks.lanes.durable import Durable
from closeranks.lanes.likeness import Likeness
from closeranks.lanes.rejoin import Rejoin
from closeranks.lanes.turn import Wait
from closeranks.lanes.worker import Worker
from closeranks.observe import points

_MEETING_S = 10.0
_STEPS_BEHIND = 2  # ticks whose results are still there

Inside = dict[str, Any]
COMPLETE: Inside = {"complete": True}  # the place behind everything inside a call


class Script:
    """The position of one worker."""

    def __init__(self, worker: Worker, likeness: Likeness, durable: Durable | None = None) -> None:
        self.worker = worker
        self.likeness = likeness
        self.durable = durable  # None: no checkpoints
        self.rejoin = Rejoin(worker.board)
        self.call = 0
        self.loop: str | None = None  # the loop that user code is in
        self.records: dict[str, Any] = {}  # what completed calls have returned
        self.steps_done = 0  # of the whole script
        self._complete_until = 0  # calls before it are known to be complete
        self._pending: Any | None = None  # a state for a call that is not reached yet
        self._has_begun = False
        self._is_newcomer = True  # whose first state is one that it gets from others

    def next_call(self) -> int:
        """The number of a call at the outer level."""
        self.call += 1
        return self.call

    def arrive(self, call: int, inside: Inside) -> Inside | None:
        """A boundary. Returns where to go on inside the call, or None if the call is complete."""
        worker = self.worker
        worker.board.refresh()
        if not self._has_begun:
            self._begin()
        while True:
            if call < self._complete_until:
                return None
            if self._pending is None and not (worker.is_lost or self._is_behind()):
                break
            was_lost = worker.is_lost
            tree = self._pending if self._pending is not None else self._fetch()
            position = tree["position"]
            if position["call"] > call:
                self._pending, self._complete_until = tree, position["call"]
                self.records = tree["records"]
            elif position["call"] < call:
                # User code has left a loop in which the others still are.
                worker.is_lost = was_lost
                worker.diverged(f"the others are in call {position['call']}", f"call {call}")
            else:
                inside = self._load(tree)
                if inside == COMPLETE:
                    self._complete_until = call + 1
                    return None
        self._is_newcomer = False
        self._serve(call, inside)
        points.reach("boundary", call=call, **inside)
        return inside

    def after_step(self, call: int, inside: Inside, ends: tuple[bool, bool]) -> None:
        """The boundary after a step, which may be the last of its epoch, and of the call."""
        if self.worker.is_lost:
            return
        if ends[0] and not self.worker.seat.is_alone:
            self.compare(f"epoch {inside['epoch'] - 1} of call {call}")
        if self.durable is not None:
            capture = functools.partial(self.capture, call, inside)
            self.durable.after_step(capture, self.steps_done, call, ends)

    def compare(self, place: str) -> None:
        """See whether the others hold the same values here."""
        self.likeness.compare(self.worker.tick, place)

    def complete(self, call: int) -> None:
        """The boundary after a call other than steps()."""
        if self.durable is not None and not self.worker.is_lost:
            capture = functools.partial(self.capture, call, COMPLETE)
            self.durable.after_call(capture, self.steps_done, call)

    def capture(self, call: int, inside: Inside) -> dict[str, Any]:
        """Everything that another worker, or another job, needs to go on from this boundary."""
        return {
            "tick": self.worker.tick,
            "position": {"call": call, "inside": inside},
            "records": self.records,
            "steps_done": self.steps_done,
            "prepared": self.worker.prepared.capture(),
        }

    # Getting a state.

    def _is_behind(self) -> bool:
        """Whether the others are so far ahead that what this worker would read is gone."""
        tick = self.worker.tick + _STEPS_BEHIND
        return any(area.words[w.AT] > tick for area in self.worker.board.alive)

    def _fetch(self) -> Any:
        self.worker.is_lost = True
        tree = self.rejoin.ask()
        if tree is None:
            self.worker.give_up()
        return tree

    def _load(self, tree: Any) -> Inside:
        self._pending = None
        other = self.worker.prepared.differs_from(tree["prepared"])
        if other:
            raise CheckpointMismatch(
                f"{other}. Nothing was loaded; prepare the same objects in the same order, or "
                "start with another checkpoint folder."
            )
        self.worker.prepared.restore(tree["prepared"])
        self.records, self.steps_done = tree["records"], tree["steps_done"]
        self.worker.become(tree["tick"])
        if self._is_newcomer:
            self._is_newcomer = False
            self.worker.seat.tell(back=self.steps_done)
        inside: Inside = tree["position"]["inside"]
        return inside

    def _serve(self, call: int, inside: Inside) -> None:
        asker = self.rejoin.is_asked()
        if asker is not None:
            tree = self.capture(call, inside)
            self.rejoin.give(asker, self.worker.tick + 1, tree)

    # The first boundary.

    def _begin(self) -> None:
        self._has_begun = True
        worker = self.worker
        if worker.board.anyone_has_ended():
            worker.give_up()  # It came too late, and would train everything again.
        worker.become(0)
        worker.board.me.words[w.AT] = 0
        self.likeness.introduce()
        if self._is_behind():
            return
        if not worker.seat.is_alone:
            self._meet()
        if self.durable is not None:
            found = self.durable.newest()
            self._pending = None if found is None else found.tree
        board = worker.board
        if any(a.words[w.AT] for a in board.dead) and not any(a.words[w.AT] for a in board.alive):
            where = "its start" if self._pending is None else f"step {self._pending['steps_done']}"
            worker.seat.tell(
                note=f"warning: all workers were gone. The job goes on from {where}, to the same "
                "result"
            )

    def _meet(self) -> None:
        """The first workers of a job compare what they have prepared."""
        worker = self.worker
        looks = self.likeness.meet()
        if worker.seat.number >= worker.board.roster.workers:
            return
        wait, deadline = Wait(), time.monotonic() + _MEETING_S
        while time.monotonic() < deadline:
            worker.board.refresh()
            late = [a for a in worker.board.alive if not a.words[w.LOOKS] and not a.words[w.AT]]
            expected = len(worker.board.roster) >= worker.board.roster.workers
            if expected and not late:
                break
            wait.once()
        self.likeness.compare_first(looks)

    def refuse_nesting(self, what: str) -> None:
        if self.loop is not None:
            raise LoopDiverged(
                f"{what} was called inside {self.loop}, whose loop has not ended: a resumed job "
                "could not find its way back there. Training stopped; end the outer loop first."
            )
