"""An all-reduce in an elementwise format, in chunks, so that encoding and network work together.

Two ranks:

    start   each chunk is encoded, and gathered by both
    end     each chunk becomes the sum of both encodings, in order of ranks

More ranks; a chunk has one part for each:

    start   each chunk's parts are encoded, and part r goes to rank r
    turn    rank r sums all ranks' part r in float32, in the order of the tree, encodes the sum,
            and it is gathered by all
    end     each chunk becomes what the gathered encodings say

Every rank decodes the same bytes with the same operations, so all end with the same bits; its own
values, too, it takes from what it sent. What an encoding does not hold stays in the residual of
the rank that encoded it: the second encoding's with the first one's, for what it lacks, it lacks
in the same elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.wire import int8
from closeranks.wire.cast import Bf16, Fp16

if TYPE_CHECKING:
    from closeranks.exchange.group import GroupExchange
    from closeranks.wire.codec import Codec

CHUNK_NUMEL = 1 << 19  # 2 MiB of gradients: less, and messages cost more than they hide


class Chunk:
    """Where a stretch of the tensor passes through on its way; memory that is used again."""

    def __init__(self, codec: Codec, ranks: int, start: int, stop: int, like: Tensor) -> None:
        self.start, self.stop = start, stop
        length = stop - start
        if ranks > 2:
            length = -(-length // (ranks * codec.block)) * codec.block
        self.part_numel = length
        self.slot_bytes = slot_bytes = codec.bytes_for(length)

        def memory(slots: int) -> Tensor:
            return like.new_zeros(slots * slot_bytes, dtype=torch.uint8)

        self.sent = memory(1 if ranks == 2 else ranks)
        self.received = memory(ranks)
        if ranks > 2:
            self.own_sum = like.new_empty(length, dtype=torch.float32)
            self.lost = like.new_empty(length, dtype=torch.float32)
            self.own_encoded = memory(1)
            self.gathered = memory(ranks)

    def part(self, rank: int) -> tuple[int, int]:
        """The elements that a rank sums, of the whole tensor."""
        lo = min(self.start + rank * self.part_numel, self.stop)
        return lo, min(lo + self.part_numel, self.stop)

    def slot(self, memory: Tensor, rank: int) -> Tensor:
        return memory[rank * self.slot_bytes : (rank + 1) * self.slot_bytes]


class Workspace:
    """All chunks of a tensor of some length."""

    def __init__(self, codec: Codec, ranks: int, like: Tensor) -> None:
        self.codec = codec
        step = -(-CHUNK_NUMEL // (ranks * codec.block)) * ranks * codec.block
        bounds = range(0, like.numel(), step)
        self.chunks = [Chunk(codec, ranks, at, min(at + step, like.numel()), like) for at in bounds]
        self.is_free = True


class Workspaces:
    """Kept from exchange to exchange: new memory costs as much as encoding."""

    def __init__(self, group: GroupExchange) -> None:
        self._ranks = group.size
        self._codecs: dict[tuple[str, torch.device], Codec] = {}
        self._known: dict[tuple[str, int, torch.device], list[Workspace]] = {}

    def take(self, name: str, like: Tensor) -> Workspace:
        """A workspace that nobody uses."""
        known = self._known.setdefault((name, like.numel(), like.device), [])
        found = next((each for each in known if each.is_free), None)
        if found is None:
            found = Workspace(self.codec(name, like.device), self._ranks, like)
            known.append(found)
        found.is_free = False
        return found

    def codec(self, name: str, device: torch.device) -> Codec:
        key = (name, device)
        if key not in self._codecs:
            makers: dict[str, Any] = {"bf16": Bf16, "fp16": Fp16}
            made = int8.make(device) if name == "int8" else makers[name]()
            self._codecs[key] = made
        return self._codecs[key]


class Encoded:
    """One all-reduce."""

    def __init__(
        self,
        groups: tuple[GroupExchange, GroupExchange],
        workspace: Workspace,
        values: Tensor,
        residual: Tensor,
        scale: float,
    ) -> None:
        """`groups` are those of the first and of the second collectives."""
        group, turns = groups
        self._group, self._turns = group.group, turns.group
        self._rank, self._size = group.rank, group.size
        self.workspace = workspace
        self._codec = workspace.codec
        self._values = values
        self._residual = residual
        self._scale = scale
        self.works: list[Any] = []

    def start(self) -> None:
        for chunk in self.workspace.chunks:
            if self._size == 2:
                self._encode(chunk.start, chunk.stop, chunk.sent)
                self.works.append(self._gather(self._group, chunk.sent, chunk.received))
                continue
            for rank in range(self._size):
                self._encode(*chunk.part(rank), chunk.slot(chunk.sent, rank))
            options = dist.AllToAllOptions()
            work = self._group.alltoall_base(chunk.received, chunk.sent, [], [], options)
            self.works.append(work)

    def turn(self) -> None:
        if self._size == 2:
            return
        arrived, self.works = self.works, []
        for chunk, work in zip(self.workspace.chunks, arrived, strict=True):
            work.wait()
            lo, hi = chunk.part(self._rank)
            if lo < hi:
                self._sum_part(chunk, lo, hi)
            self.works.append(self._gather(self._turns, chunk.own_encoded, chunk.gathered))

    def end(self) -> None:
        for chunk, work in zip(self.workspace.chunks, self.works, strict=True):
            work.wait()
            if self._size == 2:
                slots = [chunk.slot(chunk.received, rank) for rank in range(2)]
                self._codec.sum(slots, self._values[chunk.start : chunk.stop], self._scale)
                continue
            for lo, hi, slot in self._parts(chunk, chunk.gathered):
                self._codec.sum([slot], self._values[lo:hi], self._scale)
        self.workspace.is_free = True

    def _encode(self, start: int, stop: int, slot: Tensor) -> None:
        if start < stop:
            out = slot[: self._codec.bytes_for(stop - start)]
            self._codec.encode(self._values[start:stop], self._residual[start:stop], out)

    def _sum_part(self, chunk: Chunk, lo: int, hi: int) -> None:
        length = hi - lo
        size_bytes = self._codec.bytes_for(length)
        total, lost = chunk.own_sum[:length], chunk.lost[:length].zero_()
        slots = [chunk.slot(chunk.received, rank)[:size_bytes] for rank in range(self._size)]
        self._codec.sum(slots, total, 1.0)
        self._codec.encode(total, lost, chunk.own_encoded[:size_bytes])
        self._residual[lo:hi].add_(lost)

    def _parts(self, chunk: Chunk, memory: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        for rank in range(self._size):
            lo, hi = chunk.part(rank)
            if lo < hi:
                yield lo, hi, chunk.slot(memory, rank)[: self._codec.bytes_for(hi - lo)]

    def _gather(self, group: Any, own: Tensor, everyones: Tensor) -> Any:
        return group.allgather([list(everyones.view(self._size, -1))], [own])
