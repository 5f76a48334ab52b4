"""A tensor that lives in shared memory on every rank, so that its all-reduce copies nothing.

Its first all-reduce is two collectives: a meeting, in which every rank maps the memory of all, and
the sum itself, staged. When both have ended, all ranks know the same: whether everybody could. From
then on it is pushed, or staged for ever. The decision depends on no clock, so that ranks agree.

Knows regions and operations; must not know the queue in which they stand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from closeranks.exchange.operation import Operation
from closeranks.observe import points
from closeranks.segment.page import wrapped

if TYPE_CHECKING:
    from closeranks.exchange.base import Pending
    from closeranks.exchange.region import Region
    from closeranks.exchange.shm import ShmExchange


class Resident:
    """A tensor that allocate() has made, and its twins on the other ranks."""

    def __init__(self, region: Region, start: int, numel: int, dtype: torch.dtype) -> None:
        """`start` is the place of its first byte in the region."""
        self.region = region
        self.start = start
        self.numel = numel
        self.is_settled = False  # whether it is known if it can be pushed
        self.push: Any = None  # of the kernels, if it can
        self.parts: list[Tensor] = []  # of all ranks, if it can
        self._dtype = dtype

    def settle(self, kernels: Any) -> None:
        """The meeting is over."""
        self.is_settled = True
        parts = self.region.settle()
        if parts is not None:
            at = self.start, self.numel, self._dtype
            self.parts = [slice_of(part, *at) for part in parts]
            self.push = kernels.push(self.parts)


def slice_of(region: Tensor, start: int, numel: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor in a region's bytes."""
    return region[start : start + numel * dtype.itemsize].view(dtype)


class Meeting(Operation):
    """All ranks map the memory of all."""

    def __init__(self, exchange: ShmExchange, resident: Resident) -> None:
        super().__init__(exchange)
        self.resident = resident

    def work(self) -> None:
        self.resident.region.map_all()

    def wait(self) -> None:
        super().wait()
        if not self.resident.is_settled:
            self.resident.settle(self.exchange.team.kernels)


class FirstUse:
    """The first all-reduce of a resident tensor."""

    def __init__(self, meeting: Meeting, staged: Pending) -> None:
        self._meeting = meeting
        self._staged = staged

    def wait(self) -> None:
        self._meeting.wait()
        self._staged.wait()


class Push(Operation):
    """An all-reduce of a resident tensor."""

    def __init__(self, exchange: ShmExchange, resident: Resident, scale: float) -> None:
        super().__init__(exchange)
        self._word = wrapped(self.tick)
        self._push = resident.push
        self._scale = scale

    def advance(self, until: int, slice_us: int) -> int:
        if points.on_reach is not None:
            return super().advance(until, slice_us)
        phase: int = self._push.advance(self._word, self.phase, until, self._scale, slice_us)
        self.phase = phase
        return phase

    def work(self) -> None:
        self._push.share(self._scale)
