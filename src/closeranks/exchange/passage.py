"""Collectives of tensors that lie anywhere, through slots in shared memory, from begin to end.

A tensor is cut into pieces that fit a slot, and each piece is one tick. There are two slots per
rank, used in turn, so that the next piece is copied in while others still read the last one:

    Phase 1  give     this rank's piece goes into its own slot; it says so (ARRIVED)
    Phase 2  work     everybody's is there: compute from all slots; say so (DONE)
    Phase 3  finish   only if ranks divide the work: everybody is done; copy out of the own slot

A slot is written again when all are done with what was in it. Few ranks sum whole pieces, each for
itself; many divide a piece, and each sums its share for all (`_DIVIDING_RANKS`): one more wait, but
no piece is read more than twice.

In front of a slot's data stands what its rank came for. All compare, so that ranks that come for
different things are told so, instead of waiting for ever or mixing up their data.

Unlike `shm`, which keeps gradients where all can reach them, this knows nothing of tensors before
they come, and works in the caller's thread until the collective has ended. One at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from closeranks.errors import ExchangeFailed, PeerLost, RankAbsent
from closeranks.exchange.purpose import Purpose, describe
from closeranks.exchange.reduction import Fold
from closeranks.observe import points
from closeranks.segment.page import ARRIVED, DONE, SLOT_BYTES, SLOT_COUNT, wrapped
from closeranks.segment.team import SLICE_US, Team
from closeranks.segment.twin import share

_HEAD_BYTES = 64  # so that the data behind it begins with a cache line
_ROOM_BYTES = SLOT_BYTES - _HEAD_BYTES
_DIVIDING_RANKS = 4
_ALIGN = 64  # elements, so that parts of a slot begin with cache lines

# What happens to one piece: its number, and the slots of all ranks.
Step = Callable[[int, Sequence[Tensor]], object]


class Passage:
    """The slots of a team, as one of its ranks uses them."""

    only_reduces = False

    def __init__(self, team: Team, members: Sequence[int]) -> None:
        """`members` are the numbers of their group's ranks in the job, for messages."""
        self.team = team
        self.size = team.size
        self.way = f"shm: {team.size} ranks on one host, {team.kernels.name}"
        self._members = members
        self._tick = 0
        slots = [[page.slot(number) for page in team.pages] for number in range(SLOT_COUNT)]
        self._heads = [[slot[:_HEAD_BYTES].cast("Q") for slot in row] for row in slots]
        self._rooms = [
            [torch.frombuffer(slot[_HEAD_BYTES:], dtype=torch.uint8) for slot in row]
            for row in slots
        ]
        self._typed = {torch.uint8: self._rooms}

    # Collectives. All tensors are flat and contiguous.

    def all_reduce(self, tensor: Tensor, fold: Fold) -> None:
        """Replace the tensor by the fold of all ranks' tensors."""
        length = _ROOM_BYTES // tensor.element_size()
        pieces = tensor.split(length) if tensor.numel() else ()
        rank = self.team.rank

        def give(number: int, slots: Sequence[Tensor]) -> None:
            piece = pieces[number]
            slots[rank][: piece.numel()].copy_(piece)

        def fold_all(number: int, slots: Sequence[Tensor]) -> None:
            piece = pieces[number]
            fold([slot[: piece.numel()] for slot in slots], [piece])

        def fold_share(number: int, slots: Sequence[Tensor]) -> None:
            start, end = share(pieces[number].numel(), self.team.size, rank)
            if start < end:
                parts = [slot[start:end] for slot in slots]
                fold(parts, parts)

        def copy_out(number: int, slots: Sequence[Tensor]) -> None:
            piece = pieces[number]
            piece.copy_(slots[rank][: piece.numel()])

        for_what = Purpose("all_reduce", tensor.dtype, tensor.numel(), fold.number)
        if self.team.size < _DIVIDING_RANKS:
            self._pass(for_what, len(pieces), give, fold_all)
        else:
            self._pass(for_what, len(pieces), give, fold_share, copy_out)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], fold: Fold) -> None:
        """Put the fold of what all ranks have for this one into the output."""
        rank, size = self.team.rank, self.team.size
        length = _ROOM_BYTES // output.element_size() // size // _ALIGN * _ALIGN
        count = max(-(-tensor.numel() // length) for tensor in inputs)

        def give(number: int, slots: Sequence[Tensor]) -> None:
            at = number * length
            for other, tensor in enumerate(inputs):
                if other != rank:  # nobody else needs what this rank has for itself
                    part = tensor[at : at + length]
                    slots[rank][other * length : other * length + part.numel()].copy_(part)

        def work(number: int, slots: Sequence[Tensor]) -> None:
            at = number * length
            target = output[at : at + length]
            if not target.numel():
                return
            here = slice(rank * length, rank * length + target.numel())
            parts = [slot[here] for slot in slots]
            parts[rank] = inputs[rank][at : at + length]
            fold(parts, [target])

        numel = sum(tensor.numel() for tensor in inputs)
        for_what = Purpose("reduce_scatter", output.dtype, numel, fold.number)
        self._pass(for_what, count, give, work)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Put every rank's tensor into the output for it."""
        rank = self.team.rank
        length = _ROOM_BYTES // tensor.element_size()
        count = max(-(-output.numel() // length) for output in outputs)

        def give(number: int, slots: Sequence[Tensor]) -> None:
            piece = tensor[number * length : (number + 1) * length]
            slots[rank][: piece.numel()].copy_(piece)

        def work(number: int, slots: Sequence[Tensor]) -> None:
            for slot, output in zip(slots, outputs, strict=True):
                piece = output[number * length : (number + 1) * length]
                piece.copy_(slot[: piece.numel()])

        numel = sum(output.numel() for output in outputs)
        self._pass(Purpose("all_gather", tensor.dtype, numel), count, give, work)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace the tensor by the one of rank `source`."""
        length = _ROOM_BYTES // tensor.element_size()
        pieces = tensor.split(length) if tensor.numel() else ()
        here = self.team.rank == source

        def give(number: int, slots: Sequence[Tensor]) -> None:
            if here:
                slots[source][: pieces[number].numel()].copy_(pieces[number])

        def work(number: int, slots: Sequence[Tensor]) -> None:
            if not here:
                pieces[number].copy_(slots[source][: pieces[number].numel()])

        for_what = Purpose("broadcast", tensor.dtype, tensor.numel(), source)
        self._pass(for_what, len(pieces), give, work)

    def barrier(self) -> None:
        """Return when all ranks have come."""
        self._pass(Purpose("barrier", torch.uint8, 0), 1, _nothing, _nothing)

    def close(self) -> None:
        """This rank comes to no further collective."""
        self.team.close()

    # Ticks.

    def _pass(
        self, what: Purpose, count: int, give: Step, work: Step, finish: Step | None = None
    ) -> None:
        """Take so many pieces through the phases."""
        try:
            self._take_through(what, count, give, work, finish)
        except (PeerLost, RankAbsent) as error:
            raise self._explained(error, describe(what.word)) from error

    def _take_through(
        self, what: Purpose, count: int, give: Step, work: Step, finish: Step | None
    ) -> None:
        first = self._tick + 1
        self._tick += count
        rooms = self._rooms_of(what.dtype)
        for number in range(count + 1 if finish is None else count + 2):
            if finish is not None and number >= 2:  # Phase 3 of the piece before the last
                tick = first + number - 2
                self._await(DONE, tick, what)
                finish(number - 2, rooms[tick % SLOT_COUNT])
            if number < count:  # Phase 1 of this piece
                tick = first + number
                self._await(DONE, tick - SLOT_COUNT, what)
                self._heads[tick % SLOT_COUNT][self.team.rank][0] = what.word
                give(number, rooms[tick % SLOT_COUNT])
                self._tell(ARRIVED, tick, what)
            if 1 <= number <= count:  # Phase 2 of the last piece
                tick = first + number - 1
                self._await(ARRIVED, tick, what)
                self._compare(tick, what)
                work(number - 1, rooms[tick % SLOT_COUNT])
                self._tell(DONE, tick, what)

    def _tell(self, which: int, tick: int, what: Purpose) -> None:
        name = "arriving" if which == ARRIVED else "done"
        points.reach(f"before {name}", tick=tick, collective=what.kind)
        self.team.kernels.publish(which, wrapped(tick))
        points.reach(f"after {name}", tick=tick, collective=what.kind)

    def _await(self, which: int, tick: int, what: Purpose) -> None:
        if self.team.kernels.await_all(which, wrapped(tick), SLICE_US) >= 0:
            self.team.wait(which, tick)

    def _compare(self, tick: int, what: Purpose) -> None:
        """Raise if a rank has come for something else."""
        for rank, head in enumerate(self._heads[tick % SLOT_COUNT]):
            if head[0] != what.word:
                raise ExchangeFailed(
                    "ranks of one group came for different things: rank "
                    f"{self.team.numbers[self.team.rank]} for {describe(what.word)}, rank "
                    f"{self.team.numbers[rank]} for {describe(head[0])}. All ranks have "
                    "to call the same collectives in the same order, with equal sizes and types. "
                    "The group cannot be used any more."
                )

    def _explained(self, error: PeerLost | RankAbsent, what: str) -> ExchangeFailed:
        text, members = f"{what}: {error}", self._members
        if list(members) != list(range(len(members))):
            text += f" (these are numbers within a group; its ranks in the job are {members})"
        text += ". This process group cannot be used any more"
        if isinstance(error, PeerLost):
            rank = None if error.rank is None else members[error.rank]
            text += "; look at the end of that rank's output, then restart."
            return PeerLost(text, rank, error.host, error.is_silent)
        return RankAbsent(f"{text}; look at what that rank does instead, then restart.")

    def _rooms_of(self, dtype: torch.dtype) -> list[list[Tensor]]:
        typed = self._typed.get(dtype)
        if typed is None:
            whole = _ROOM_BYTES // dtype.itemsize * dtype.itemsize
            typed = [[room[:whole].view(dtype) for room in row] for row in self._rooms]
            self._typed[dtype] = typed
        return typed


def _nothing(number: int, slots: Sequence[Tensor]) -> None:
    """A barrier moves no data."""
