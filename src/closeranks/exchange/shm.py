"""The exchange of ranks that share a host: sums in shared memory, where gradients already lie.

All-reduce of a tensor that allocate() has made (it is *resident*: every rank can map every rank's):

    Phase 1  arrive   this rank's data is there; it goes on with other work
    Phase 2  push     when all have arrived: sum 1/n of all n tensors, write it into all n
    Phase 3  done     when all have pushed: the tensor holds the result, the same bits everywhere

Two waits, no copy. Anything else is *staged*: copied into a slot that all can read, and combined by
every rank for itself once all have arrived; long tensors in pieces, through two slots in turn.

Every collective is a tick (a long one several). All ranks count ticks alike, and work through them
in order: what is asked for is announced at once, and done when the others are there, at the latest
in wait(). Nothing runs in the background; a rank computes while it would have waited.

Tensors that are not on the CPU or not dense go through the process group.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from closeranks.exchange.operation import Operation
from closeranks.exchange.region import Region
from closeranks.exchange.stage import Stage
from closeranks.observe import points
from closeranks.segment.page import ARRIVED, DONE, wrapped
from closeranks.segment.team import SLICE_US
from closeranks.segment.twin import combine

if TYPE_CHECKING:
    from closeranks.exchange.base import Pending
    from closeranks.exchange.group import GroupExchange
    from closeranks.segment.team import Team


class ShmExchange:
    """n ranks of one host; `group` serves what cannot go through memory."""

    scales_for_free = True

    def __init__(self, team: Team, group: GroupExchange) -> None:
        self.rank, self.size = team.rank, team.size
        self.way = f"shm: {team.size} ranks on one host, {team.kernels.name}"
        self.team = team
        self.group = group
        self._tick = 0  # of the newest collective
        self._queue: deque[Operation] = deque()  # this rank's share is not done yet
        self._resident: dict[int, _Resident] = {}  # by address
        self._stage = Stage(self)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu" or not numel:
            return self.group.allocate(numel, dtype, device)
        resident = _Resident(Region(self.team, numel * dtype.itemsize), numel, dtype)
        own = resident.region.own
        if own is None:  # The others learn it at the first use; then all take the group.
            tensor = self.group.allocate(numel, dtype, device)
        else:
            tensor = own[: numel * dtype.itemsize].view(dtype)
        self._resident[tensor.data_ptr()] = resident
        # It is resident as long as this very object lives; views of it keep only its memory.
        weakref.finalize(tensor, self._resident.pop, tensor.data_ptr(), None).atexit = False
        return tensor

    def all_reduce(self, tensor: Tensor, scale: float = 1.0) -> Pending:
        if not self.takes(tensor):
            return self.group.all_reduce(tensor, scale)
        resident = self._resident.get(tensor.data_ptr())
        if resident is not None and resident.is_this(tensor):
            return self.start(_Push(self, resident, tensor, scale))

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
        self.team.close()

    # Ticks.

    def next_tick(self) -> int:
        self._tick += 1
        return self._tick

    def start(self, operation: Operation) -> Operation:
        """Announce a collective, and do this rank's share of whatever is ready."""
        queue = self._queue
        if not queue and points.on_reach is None:
            operation.advance(3, 0)
            if operation.phase < 2:
                queue.append(operation)
            return operation
        operation.advance(1, 0)
        queue.append(operation)
        while queue and queue[0].advance(2, 0) >= 2:
            queue.popleft()
        return operation

    def finish(self, operation: Operation, until: int) -> None:
        """Bring a collective to a phase: first whatever was asked for before it."""
        queue = self._queue
        while operation.phase < 2:
            head = queue[0]
            self._wait_for(head, 2, until if head is operation else 2)
            queue.popleft()
        if operation.phase < until:
            self._wait_for(operation, 3, 3)

    def _wait_for(self, operation: Operation, phase: int, until: int) -> None:
        which = ARRIVED if phase == 2 else DONE
        self.team.until(lambda: operation.advance(until, SLICE_US) >= phase, which, operation.tick)


class _Resident:
    """A tensor that allocate() has made, and its twins on the other ranks."""

    def __init__(self, region: Region, numel: int, dtype: torch.dtype) -> None:
        self.region = region
        self.numel = numel
        self._dtype = dtype
        self.push: Any = None  # of the kernels, once all parts are mapped

    def is_this(self, tensor: Tensor) -> bool:
        """Whether it is the whole tensor and not a view that begins at the same place."""
        return tensor.numel() == self.numel and tensor.dtype == self._dtype

    def map_all(self, kernels: Any) -> bool:
        """Whether the tensors of all ranks can be reached; asked when all have arrived."""
        region = self.region
        if region.parts is None and region.is_shared:
            region.map_all()
            if region.parts is not None:
                size_bytes = self.numel * self._dtype.itemsize
                self.push = kernels.push([p[:size_bytes].view(self._dtype) for p in region.parts])
        return region.is_shared


class _Push(Operation):
    """An all-reduce of a resident tensor."""

    def __init__(
        self, exchange: ShmExchange, resident: _Resident, tensor: Tensor, scale: float
    ) -> None:
        super().__init__(exchange)
        self._resident = resident
        self._tensor = tensor
        self._scale = scale

    def advance(self, until: int, slice_us: int) -> int:
        push = self._resident.push
        if push is None or points.on_reach is not None:
            return super().advance(until, slice_us)
        self.phase = push.advance(wrapped(self.tick), self.phase, until, self._scale, slice_us)
        return self.phase

    def work(self) -> None:
        exchange = self.exchange
        if self._resident.map_all(exchange.team.kernels):
            self._resident.push.share(self._scale)
        else:
            exchange.group.all_reduce(self._tensor, self._scale).wait()

    def wait(self) -> None:
        super().wait()
        self._resident.region.close_door()
