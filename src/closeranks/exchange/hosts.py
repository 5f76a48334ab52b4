"""The exchange of ranks on several hosts: shared memory inside, one exchange between.

A resident tensor (one that allocate() has made) crosses from host to host in slices, one for each
rank of the smallest host (grid.py, crossing.py): what leaves a host is the sum of its ranks, once.
So four hosts of eight ranks send a fifth less than one ring over all 32 would, two hosts of two a
third less, and no data are copied beyond the shared memory in which they lie anyway.

The order of a sum, the same for every rank: over the ranks of each host in the order of the tree
(tree.py), times the scale, in the tensor's own type; then over hosts as `between` does it, which
for gloo depends on the place in the tensor and the number of hosts, and for two hosts on nothing.

Everything else goes through one group over all ranks, beside the user's own: small tensors that
are not resident, maxima, broadcasts. So does everything where no two ranks share memory.

A rank or a host that is lost is noticed by a lookout, and every wait here ends with who it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from closeranks.exchange.crossing import Crossing
from closeranks.exchange.group import GroupExchange
from closeranks.exchange.resident import Meeting
from closeranks.segment.page import LANDED, wrapped

if TYPE_CHECKING:
    from closeranks.exchange.base import Between, Pending, WireState
    from closeranks.exchange.handshake import Wait
    from closeranks.exchange.layout import Layout
    from closeranks.exchange.meshes import Meshes
    from closeranks.exchange.shm import ShmExchange
    from closeranks.wire.formats import Format

_SLICE_US = 1000  # of a wait, before newer crossings are looked at


class HostsExchange:
    """n ranks on several hosts."""

    def __init__(
        self,
        meshes: Meshes,
        inside: ShmExchange | None,
        between: Between | None,
        wire: Format,
        wait: Wait,
    ) -> None:
        """`inside` are the ranks of this host, None where memory is not shared on any.

        `between` is this rank's column, None if it has no slice; without `inside` it is all ranks.
        `wire` is the format in which sums travel, the same on all ranks.
        `wait` waits for what only happens once in a while, and explains its failures.
        """
        grid = meshes.crowd.grid
        self.rank: int = meshes.crowd.rank
        self.size: int = len(meshes.crowd.names)
        self.inside = inside
        self.between = between
        self.columns = grid.columns
        self.is_exact = wire.is_exact
        self._wire = "float32" if wire.is_exact else str(wire)
        self.scales_for_free = inside is not None
        self._shape = grid.shape
        self._meshes = meshes
        assert meshes.flat is not None, "what is small needs a group over all ranks"
        self._flat = GroupExchange(meshes.flat.group)
        self._wait = wait
        self._peers = meshes.peers
        self._crossings = 0
        self._flying: deque[Crossing] = deque()  # they have not landed, oldest first
        if inside is not None:
            inside.team.host = meshes.crowd.names[self.rank]
            inside.team.look_further = meshes.lookout.raise_if_lost

    @property
    def wire_state(self) -> WireState | None:
        return None if self.between is None else self.between.wire_state

    @property
    def way(self) -> str:
        inside = "" if self.inside is None else "shm inside, "
        transport, form = self._meshes.transport, self._wire
        if self.between is not None:
            form = self.between.format
        return f"hosts: {self._shape}, {inside}{transport} between, {form}"

    def allocate(
        self, numels: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Waits for all ranks: whether all of them have the memory is known when it returns."""
        if self.inside is None or device.type != "cpu":
            return self._flat.allocate(numels, dtype, device)
        tensors = self.inside.allocate(numels, dtype, device)
        residents = [self.inside.resident(tensor) for tensor in tensors]
        meetings = [Meeting(self.inside, each) for each in residents if each is not None]
        for meeting in meetings:
            self.inside.start(meeting)
        agreed = _AgreedMeetings(meetings, self._flat)
        self._wait(self._guarded(agreed), lambda: "the sharing of memory")
        return tensors

    def all_reduce(
        self, tensor: Tensor, scale: float = 1.0, layout: Layout | None = None
    ) -> Pending:
        resident = None if self.inside is None else self.inside.resident(tensor)
        if resident is None or not resident.parts:
            if self.inside is None and self.between is not None:
                return self._guarded(self.between.all_reduce(tensor, scale, layout))
            return self._guarded(self._flat.all_reduce(tensor, scale))
        assert self.inside is not None, "it lies in shared memory"
        crossing = Crossing(self, resident, scale, layout)
        self._flying.append(crossing)
        self.inside.start(crossing)
        while self._flying and self._flying[0].is_ready:
            self._land_next()
        return _Guarded(crossing, self._explained)

    def all_max(self, tensor: Tensor) -> Pending:
        return self._guarded(self._flat.all_max(tensor))

    def broadcast(self, tensor: Tensor, source: int) -> Pending:
        return self._guarded(self._flat.broadcast(tensor, source))

    def close(self) -> None:
        if self.inside is not None:
            self.inside.close()
        if self.between is not None:
            self.between.close()
        self._meshes.close()

    # Crossings.

    def next_crossing(self) -> int:
        self._crossings += 1
        return self._crossings

    def wait_between(self, pending: Pending) -> None:
        """Return when what was sent to other hosts has come back."""
        try:
            pending.wait()
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                raise RuntimeError(
                    f"timed out: rank {self.rank} waited for {self._peers} on other hosts ({error})"
                ) from error
            raise

    def finish(self, crossing: Crossing) -> None:
        """Return when this crossing has landed on all ranks of this host."""
        while self._flying and self._flying[0].number <= crossing.number:
            self._land_next()
        assert self.inside is not None, "crossings begin inside a host"
        inside, word = self.inside, wrapped(crossing.number)

        def has_landed() -> bool:
            # Whoever lands this one on another rank may wait for the next one to set off here.
            inside.go_on()
            return inside.team.kernels.await_all(LANDED, word, _SLICE_US) < 0

        inside.team.until(has_landed, LANDED, crossing.number)

    def _land_next(self) -> None:
        crossing = self._flying[0]
        crossing.exchange.finish(crossing, 2)
        crossing.land()
        self._flying.popleft()

    # Errors.

    def _guarded(self, pending: Pending) -> Pending:
        return _Guarded(pending, self._explained)

    def _explained(self, error: RuntimeError) -> RuntimeError:
        return self._meshes.explained(error, None if self.inside is None else self.inside.team)


class _Guarded:
    """Waits, and says who is lost if that fails."""

    def __init__(self, pending: Pending, explain: Callable[[RuntimeError], RuntimeError]) -> None:
        self._pending = pending
        self._explain = explain

    def wait(self) -> None:
        try:
            self._pending.wait()
        except RuntimeError as error:
            explained = self._explain(error)
            if explained is error:
                raise
            raise explained from error


class _AgreedMeetings:
    """The end of meetings inside every host, and that all know how all of them ended."""

    def __init__(self, meetings: Sequence[Meeting], flat: GroupExchange) -> None:
        self._meetings = meetings
        self._flat = flat

    def wait(self) -> None:
        for meeting in self._meetings:
            meeting.wait()
        residents = [meeting.resident for meeting in self._meetings]
        failed = torch.tensor([any(not each.parts for each in residents)], dtype=torch.int32)
        self._flat.all_max(failed).wait()
        if failed.item():
            for each in residents:
                each.parts = []
