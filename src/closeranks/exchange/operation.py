"""One collective in shared memory, on its way through the phases that all of them have.

    phase 0 -> 1   give: this rank's data can be read by all, and it says so (ARRIVED); first, where
                   it has to wait for room, this waits for an older collective (`after`)
    phase 1 -> 2   everybody's can: do this rank's share, and say so (DONE)
    phase 2 -> 3   everybody has

Nothing here waits longer than it is told to; who waits, and for whom, is the exchange's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from closeranks.observe import points
from closeranks.segment.page import ARRIVED, DONE, wrapped

if TYPE_CHECKING:
    from closeranks.exchange.shm import ShmExchange


class Operation:
    """What is asked for once; `wait` returns when its result is there."""

    result_phase = 3  # from which on this rank's result is there
    after: Operation | None = None  # it must have reached phase 3 before this one can give

    def __init__(self, exchange: ShmExchange) -> None:
        self.exchange = exchange
        self.tick = exchange.next_tick()
        self.phase = 0

    def advance(self, until: int, slice_us: int) -> int:
        """Go on until a phase, as far as the others allow within slice_us; returns the phase."""
        kernels, word = self.exchange.team.kernels, wrapped(self.tick)
        if self.phase == 0 < until:
            if not self.has_room(slice_us):
                return 0
            self.give()
            points.reach("before arriving", tick=self.tick)
            kernels.publish(ARRIVED, word)
            self.phase = 1
            points.reach("after arriving", tick=self.tick)
        if self.phase == 1 < until:
            if kernels.await_all(ARRIVED, word, slice_us) >= 0:
                return 1
            self.work()
            points.reach("before done", tick=self.tick)
            kernels.publish(DONE, word)
            self.phase = 2
            points.reach("after done", tick=self.tick)
        if self.phase == 2 < until and kernels.await_all(DONE, word, slice_us) < 0:
            self.phase = 3
        return self.phase

    def has_room(self, slice_us: int) -> bool:
        """Whether this rank's data may be given now."""
        before = self.after
        if before is not None:
            if before.phase < 2 or before.advance(3, slice_us) < 3:
                return False
            self.after = None
        return True

    def give(self) -> None:
        """Make this rank's data readable for all."""

    def work(self) -> None:
        """This rank's share, once all data is there."""

    def wait(self) -> None:
        """Return when the result is there."""
        self.exchange.finish(self, self.result_phase)
