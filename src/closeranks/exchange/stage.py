"""The stage: slots in shared memory through which tensors pass that lie elsewhere.

A tensor is cut into pieces that fit a slot. Each rank copies its piece into its own slot, and when
all have, every rank combines all pieces by itself. There are two slots, used in turn, so that the
next piece is copied in while others still read the last one. A slot is written again only when all
have done their share of what was in it; nobody waits for that before the result is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from closeranks.exchange.operation import Operation
from closeranks.segment.page import SLOT_BYTES, SLOT_COUNT

if TYPE_CHECKING:
    from closeranks.exchange.shm import ShmExchange

# Combines the pieces of all ranks into the piece of this one.
Work = Callable[[Sequence[Tensor], Tensor], object]


class Stage:
    """The slots of all ranks, as one of them sees them."""

    def __init__(self, exchange: ShmExchange) -> None:
        self._exchange = exchange
        pages = exchange.team.pages
        self._slots = [[_bytes(p.slot(number)) for p in pages] for number in range(SLOT_COUNT)]
        self._count = 0
        self._newest: list[Staged | None] = [None] * SLOT_COUNT  # in each slot

    def pass_through(self, tensor: Tensor, work: Work, gives: bool = True) -> Operation:
        """Start work(all ranks' pieces, this rank's) on every piece of a tensor.

        Args:
            gives: whether this rank's data is needed by anybody.
        """
        flat = tensor.detach().contiguous().view(-1)
        length = SLOT_BYTES // flat.element_size()
        pieces = flat.split(length) if flat.numel() > length else (flat,)
        for piece in pieces:
            number = self._count % SLOT_COUNT
            self._count += 1
            slots = [
                slot[: piece.numel() * piece.element_size()].view(piece.dtype)
                for slot in self._slots[number]
            ]
            staged = Staged(self._exchange, piece, slots, work, gives)
            staged.after, self._newest[number] = self._newest[number], staged
            self._exchange.start(staged)
        if flat.data_ptr() != tensor.data_ptr():
            staged.copy_back = (tensor, flat)
        return staged


class Staged(Operation):
    """One piece in its slot."""

    result_phase = 2

    def __init__(
        self,
        exchange: ShmExchange,
        piece: Tensor,
        slots: Sequence[Tensor],
        work: Work,
        gives: bool,
    ) -> None:
        super().__init__(exchange)
        self._piece: Tensor | None = piece
        self._slots = slots
        self._work = work
        self._gives = gives
        self.copy_back: tuple[Tensor, Tensor] | None = None

    def give(self) -> None:
        if self._gives:
            self._slots[self.exchange.rank].copy_(self._own())

    def work(self) -> None:
        self._work(self._slots, self._own())
        self._piece = None  # The slot remembers this operation, and is not to keep a tensor alive.

    def _own(self) -> Tensor:
        assert self._piece is not None, "a piece is worked on once"
        return self._piece

    def wait(self) -> None:
        super().wait()
        if self.copy_back is not None:
            target, flat = self.copy_back
            target.copy_(flat.view(target.shape))
            self.copy_back = None


def _bytes(memory: memoryview) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)
