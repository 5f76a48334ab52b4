"""The exchange of ranks that share a host: sums in shared memory, where gradients already lie.

All-reduce of a tensor that allocate() has made (it is *resident*: every rank can map every rank's):

    Phase 1  arrive   this rank's data is there; it goes on with other work
    Phase 2  push     when all have arrived: sum 1/n of all n tensors, write it into all n
    Phase 3  done     when all have pushed: the tensor holds the result, the same bits everywhere

Two waits, no copy. Anything else is *staged*: copied into a slot that all can read, and combined by
every rank for itself once all have arrived; long tensors in pieces, through two slots in turn.

The first all-reduce of a resident tensor is staged, and beside it the ranks map each other's
memory. If one of them could not, all know at its end, and the tensor stays an ordinary one.

Every collective is a tick (a long one several). All ranks count ticks alike, and work through them
in order: what is asked for is announced as soon as there is room, and done when the others are
there, at the latest in wait(). No start of a collective waits for anybody. Nothing runs in the
background; a rank computes while it would have waited.

Tensors that are not on the CPU or not dense go through the process group.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from closeranks.errors import CloseranksError
from closeranks.exchange.operation import Operation
from closeranks.exchange.region import Region
from closeranks.exchange.resident import FirstUse, Meeting, Push, Resident, slice_of
from closeranks.exchange.stage import Stage
from closeranks.observe import points
from closeranks.segment.page import ARRIVED, DONE
from closeranks.segment.team import SLICE_US
from closeranks.segment.twin import combine

if TYPE_CHECKING:
    from closeranks.exchange.base import Pending
    from closeranks.exchange.group import GroupExchange
    from closeranks.exchange.layout import Layout
    from closeranks.segment.team import Team


_ALIGN_BYTES = 64


class ShmExchange:
    """n ranks of one host; `group` serves what cannot go through memory."""

    scales_for_free = True
    is_exact = True
    wire_state = None

    def __init__(self, team: Team, group: GroupExchange) -> None:
        self.rank, self.size = team.rank, team.size
        self.way = f"shm: {team.size} ranks on one host, {team.kernels.name}"
        self.team = team
        self.group = group
        self._tick = 0  # of the newest collective
        self._queue: deque[Operation] = deque()  # this rank's share is not done yet
        self._unannounced: deque[Operation] = deque()  # the newest of them: there was no room yet
        self._resident: dict[int, Resident] = {}  # by id of the tensor, while that lives
        self._stage = Stage(self)
        self._is_copy = False  # in a process that was forked from the rank
        _here.add(self)

    def allocate(
        self, numels: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        if device.type != "cpu" or not any(numels):
            return self.group.allocate(numels, dtype, device)
        # One region for all: a process has only so many descriptors and mappings.
        starts = list(accumulate((_aligned(n * dtype.itemsize) for n in numels), initial=0))
        region = Region(self.team, starts.pop())
        if region.own is None:  # The others learn it at the first use.
            tensors = self.group.allocate(numels, dtype, device)
        else:
            tensors = [slice_of(region.own, *at, dtype) for at in zip(starts, numels, strict=True)]
        for tensor, start in zip(tensors, starts, strict=True):
            if tensor.numel():
                resident = Resident(region, start, tensor.numel(), dtype)
                self._resident[id(tensor)] = resident
                # As long as this very object lives; views of it keep only its memory.
                weakref.finalize(tensor, self._resident.pop, id(tensor), None).atexit = False
        return tensors

    def all_reduce(
        self, tensor: Tensor, scale: float = 1.0, layout: Layout | None = None
    ) -> Pending:
        resident = self._resident.get(id(tensor))
        if resident is None:
            if self.takes(tensor):
                return self._staged_sum(tensor, scale)
            return self.group.all_reduce(tensor, scale)
        if resident.push is not None:
            return self.start(Push(self, resident, scale))
        if resident.is_settled:
            return self._staged_sum(tensor, scale)
        meeting = Meeting(self, resident)
        self.start(meeting)
        return FirstUse(meeting, self._staged_sum(tensor, scale))

    def resident(self, tensor: Tensor) -> Resident | None:
        """What is known of a tensor that allocate() has made; None for any other."""
        return self._resident.get(id(tensor))

    def _staged_sum(self, tensor: Tensor, scale: float) -> Pending:
        def fold(sources: Sequence[Tensor], target: Tensor) -> None:
            self.team.kernels.fold(sources, [target], scale)

        plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return self._stage.pass_through(plain, fold)

    def all_max(self, tensor: Tensor) -> Pending:
        if not self.takes(tensor):
            return self.group.all_max(tensor)

        def fold(sources: Sequence[Tensor], target: Tensor) -> None:
            combine(sources, [target], operation=torch.maximum)

        return self._stage.pass_through(tensor, fold)

    def broadcast(self, tensor: Tensor, source: int) -> Pending:
        if not self.takes(tensor):
            return self.group.broadcast(tensor, source)

        def copy(sources: Sequence[Tensor], target: Tensor) -> None:
            if source != self.rank:
                target.copy_(sources[source])

        return self._stage.pass_through(tensor, copy, gives=source == self.rank)

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor can go through memory."""
        return tensor.device.type == "cpu" and tensor.layout == torch.strided

    def close(self) -> None:
        if not self._is_copy:
            self.team.close()

    # Ticks.

    def next_tick(self) -> int:
        if self._is_copy:
            raise CloseranksError(
                f"process {os.getpid()} was forked from rank {self.rank} and tried to take part in "
                "an exchange, in whose memory it would speak in the rank's name. Use the wrapped "
                "module in the rank itself, and in other processes the module inside it."
            )
        self._tick += 1
        return self._tick

    def start(self, operation: Operation) -> Operation:
        """Announce a collective, and do this rank's share of whatever is ready."""
        queue = self._queue
        if not queue and points.on_reach is None:
            operation.advance(3, 0)
            if operation.phase < 2:
                self._put(operation)
            return operation
        self._put(operation)
        self.go_on()
        return operation

    def go_on(self) -> None:
        """Do whatever can be done of what was asked for, without waiting."""
        self._announce()
        while self._queue and self._queue[0].advance(2, 0) >= 2:
            self._take()

    def finish(self, operation: Operation, until: int) -> None:
        """Bring a collective to a phase: first whatever was asked for before it."""
        queue = self._queue
        while operation.phase < 2:
            head = queue[0]
            if head.phase == 0 and head.after is not None:
                self._wait_for(head, 1, 1, DONE, head.after.tick)
            self._wait_for(head, 2, until if head is operation else 2, ARRIVED, head.tick)
            self._take()
        if operation.phase < until:
            self._wait_for(operation, 3, 3, DONE, operation.tick)

    def _put(self, operation: Operation) -> None:
        self._queue.append(operation)
        if operation.phase == 0:
            self._unannounced.append(operation)

    def _take(self) -> None:
        """The oldest collective is out of the queue; there may be room for another now."""
        self._queue.popleft()
        self._announce()

    def _announce(self) -> None:
        """In the order of ticks: who sees a word knows that all older data is there as well."""
        waiting = self._unannounced
        while waiting and waiting[0].advance(1, 0) >= 1:
            waiting.popleft()

    def _wait_for(
        self, operation: Operation, phase: int, until: int, which: int, tick: int
    ) -> None:
        """Bring an operation to a phase; it goes on until another if it can at once."""
        self.team.until(lambda: operation.advance(until, SLICE_US) >= phase, which, tick)


def _aligned(size_bytes: int) -> int:
    """The next tensor begins with a cache line; elsewhere, some kernels give other bits."""
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


_here: weakref.WeakSet[ShmExchange] = weakref.WeakSet()


def _mark_copies() -> None:
    for exchange in _here:
        exchange._is_copy = True


os.register_at_fork(after_in_child=_mark_copies)
