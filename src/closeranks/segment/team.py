"""The ranks of one host that share memory: their pages, their lives, and every wait for them.

A tick is the number of a collective step; all ranks count alike. A rank tells that its data for a
tick is there (ARRIVED), and that its share of the tick's work is done (DONE). Every wait is cut
into slices; between two slices it looks whether the ranks it waits for still live, so that a death
is known within a slice, and whether the deadline has passed.

Knows ranks, processes and words; must not know tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from closeranks.errors import PeerLost, RankAbsent
from closeranks.segment import farewell
from closeranks.segment.page import CLOSED, UNUSABLE, Page, has_reached, wrapped
from closeranks.segment.peers import Peer, is_stopped

if TYPE_CHECKING:
    from closeranks.segment.memory import Memory
    from closeranks.segment.twin import TwinKernels

SLICE_US = 10_000
STOPPED = "is stopped"  # what is said of a rank that is late and cannot come


class Team:
    """One rank's view of all of them."""

    def __init__(
        self,
        rank: int,
        pages: Sequence[Page],
        peers: Mapping[int, Peer],
        kernels: TwinKernels,
        timeout_s: float,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """`numbers` are those of the team's ranks in their group, for messages."""
        self.rank = rank
        self.numbers = range(len(pages)) if numbers is None else numbers
        self.look_further: Callable[[], None] = lambda: None  # raises if the wait is in vain
        self.size = len(pages)
        self.pages = pages
        self.peers = peers
        self.kernels = kernels
        self.timeout_s = timeout_s
        self.host: str | None = None  # its name, where there are several
        self.warned = False  # that memory cannot be shared
        self._regions = 0

    # Memory.

    def announce(self, memory: Memory | None) -> int:
        """Tell the others where this rank's next region is; None: there is none."""
        number, self._regions = self._regions, self._regions + 1
        size_bytes, fd = (UNUSABLE, -1) if memory is None else (memory.size_bytes, memory.fd)
        self.pages[self.rank].announce_region(number, size_bytes, fd)
        return number

    def withdraw(self, number: int) -> None:
        """Tell the others that this rank cannot use a region."""
        self.pages[self.rank].announce_region(number, UNUSABLE, -1)

    # Words.

    def wait(self, which: int, tick: int) -> None:
        """Return when all ranks are there."""
        self.until(lambda: self.kernels.await_all(which, wrapped(tick), SLICE_US) < 0, which, tick)

    def until(self, attempt: Callable[[], bool], which: int, tick: int) -> None:
        """Try again and again what can only fail because a rank is not there yet."""
        if attempt():
            return
        deadline = time.monotonic() + self.timeout_s
        self.look_after(which, tick, deadline)
        while not attempt():
            self.look_after(which, tick, deadline)

    def look_after(self, which: int, tick: int, deadline: float) -> None:
        """Raise if somebody who is waited for will not come, or has not come in time."""
        word = wrapped(tick)
        for rank, peer in self.peers.items():
            gone, page = peer.is_gone(), self.pages[rank]
            if not gone and not page.words[CLOSED // 4]:
                continue
            # It may have done all that it had to before it went: its word is read after its end.
            if has_reached(page.words[which // 4], word):
                continue
            if page.note:
                raise farewell.unpack(page.note)
            how = f"its process {peer.pid} has ended" if gone else "it has left the group"
            number = self.numbers[rank]
            raise PeerLost(f"rank {number}{self.where} is gone: {how}", number, self.host)
        self.look_further()
        if time.monotonic() >= deadline:
            raise RankAbsent(f"timed out after {self.timeout_s:.1f} s: {self._late(which, word)}")

    def _late(self, which: int, word: int) -> str:
        late = []
        for rank, peer in self.peers.items():
            if not has_reached(self.pages[rank].words[which // 4], word):
                late.append(
                    f"rank {self.numbers[rank]}{self.where} did not come (its process {peer.pid} "
                    f"{STOPPED if is_stopped(peer.pid) else 'runs'})"
                )
        return "; ".join(late)

    @property
    def where(self) -> str:
        return "" if self.host is None else f" on host {self.host}"

    def leave(self, error: RuntimeError) -> None:
        """This rank ends because of another one; say so, so that nobody blames this one."""
        page = self.pages[self.rank]
        if not page.note:
            page.leave_note(farewell.pack(error))
        self.close()

    def close(self) -> None:
        """This rank comes to no further tick; who waits for it learns that at once."""
        self.pages[self.rank].words[CLOSED // 4] = 1
