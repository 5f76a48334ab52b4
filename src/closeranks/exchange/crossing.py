"""An all-reduce of a tensor that is resident on every host, on its way from host to host.

    arrive   this rank's data can be read by the ranks of its host                  (ARRIVED)
    fold     everybody's can: this rank sums its slice over its host, times the scale, in the place
             of the host's first rank, and sends it off to the other hosts          (DONE)
    land     the sum over hosts is here: it goes into all tensors of this host      (LANDED)

Between the second and the third this rank does other things, and other crossings set off: they
land in the order of their numbers, which are the same on all ranks of a host. A rank that has no
slice, because another host has fewer ranks, only arrives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from closeranks.exchange.operation import Operation
from closeranks.observe import points
from closeranks.segment.page import LANDED, wrapped
from closeranks.segment.twin import share

if TYPE_CHECKING:
    from closeranks.exchange.base import Pending
    from closeranks.exchange.hosts import HostsExchange
    from closeranks.exchange.layout import Layout
    from closeranks.exchange.resident import Resident


class Crossing(Operation):
    """One of them."""

    result_phase = 2

    def __init__(
        self, hosts: HostsExchange, resident: Resident, scale: float, layout: Layout | None
    ) -> None:
        assert hosts.inside is not None, "only what is shared inside a host crosses"
        super().__init__(hosts.inside)
        self.number = hosts.next_crossing()
        self._hosts = hosts
        self._scale = scale
        rank, columns = hosts.inside.rank, hosts.columns
        start, stop = (0, 0)
        if rank < columns:
            start, stop = share(resident.numel, columns, rank)
        self._layout = None if layout is None else layout.cut(start, stop)
        self._slices = [part[start:stop] for part in resident.parts] if start < stop else []
        self._pending: Pending | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it can land without waiting."""
        if self.phase < 2:
            return False
        completed = getattr(self._pending, "is_completed", None)
        return self._pending is None or (completed is not None and bool(completed()))

    def work(self) -> None:
        """Fold."""
        if not self._slices:
            return
        between = self._hosts.between
        assert between is not None, "who has a slice has a column"
        total = self._slices[0]  # From here on this slice of all tensors is this rank's business.
        self.exchange.team.kernels.fold(self._slices, [total], self._scale)
        points.reach("before crossing", number=self.number)
        self._pending = between.all_reduce(total, 1.0, self._layout)

    def land(self) -> None:
        """Wait for the other hosts, hand on what they have, and say so."""
        if self._pending is not None:
            self._hosts.wait_between(self._pending)
            self._pending = None
            points.reach("before landing", number=self.number)
            for part in self._slices[1:]:
                part.copy_(self._slices[0])
        self._slices = []
        self.exchange.team.kernels.publish(LANDED, wrapped(self.number))
        points.reach("after landing", number=self.number)

    def wait(self) -> None:
        super().wait()
        self._hosts.finish(self)
