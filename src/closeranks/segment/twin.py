"""The Python twin of kernels.c: the same sums, with the same bits, in torch operations.

Used where there are no C kernels, on x86 only: a word written here is seen by other processes
after the data written before it because that machine keeps stores in order. The order of sums, the
widening of 16-bit types and the one rounding at the root are explained in kernels.c.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from closeranks.segment.page import ARRIVED, DONE, LANDED, Page, has_reached
from closeranks.segment.waiting import WaitPolicy, await_first

# So much of a buffer is summed and written at a time that it stays in the second cache.
CHUNK_BYTES = 256 * 1024
_ALIGN = 64  # elements: shares of different ranks never meet in a cache line

Combine = Callable[..., Tensor]


class TwinKernels:
    """Words and sums for one rank of a team."""

    name = "pure Python"

    def __init__(self, pages: Sequence[Page], rank: int, policy: WaitPolicy) -> None:
        self.rank = rank
        self._pages = pages
        told = (ARRIVED, DONE, LANDED)
        self._words = {w: [p.words[w // 4 : w // 4 + 1] for p in pages] for w in told}
        self._policy = policy

    def publish(self, which: int, word: int) -> None:
        """Set a word of this rank."""
        self._words[which][self.rank][0] = word

    def await_all(self, which: int, word: int, slice_us: int) -> int:
        """Wait until all ranks' words are there, for at most slice_us: -1, or a rank is late."""
        words = self._words[which]

        def find_late() -> int:
            for rank, seen in enumerate(words):
                if not has_reached(seen[0], word):
                    return rank
            return -1

        return await_first(find_late, self._policy, slice_us)

    def fold(self, sources: Sequence[Tensor], targets: Sequence[Tensor], scale: float) -> None:
        """Write the sum of the flat sources, times scale, into every flat target."""
        combine(sources, targets, scale)

    def push(self, buffers: Sequence[Tensor]) -> TwinPush:
        """An all-reduce over these buffers, one of each rank, that can be run again and again."""
        return TwinPush(self, buffers)


class TwinPush:
    """The phases of cr_push in kernels.c."""

    def __init__(self, kernels: TwinKernels, buffers: Sequence[Tensor]) -> None:
        self._kernels = kernels
        start, end = share(buffers[0].numel(), len(buffers), kernels.rank)
        chunk = max(1, CHUNK_BYTES // buffers[0].element_size())
        self._chunks = [
            [b[at : min(at + chunk, end)] for b in buffers] for at in range(start, end, chunk)
        ]

    def advance(self, word: int, phase: int, until: int, scale: float, slice_us: int) -> int:
        """From a phase until a phase, as far as the others allow within slice_us."""
        kernels = self._kernels
        if phase == 0 < until:
            kernels.publish(ARRIVED, word)
            phase = 1
        if phase == 1 < until:
            if kernels.await_all(ARRIVED, word, slice_us) >= 0:
                return 1
            self.share(scale)
            kernels.publish(DONE, word)
            phase = 2
        if phase == 2 < until and kernels.await_all(DONE, word, slice_us) < 0:
            phase = 3
        return phase

    def share(self, scale: float) -> None:
        """This rank's share of the work."""
        for pieces in self._chunks:
            combine(pieces, pieces, scale)


def share(numel: int, ranks: int, rank: int) -> tuple[int, int]:
    """The elements that a rank sums."""
    length = -(-numel // ranks)
    length = -(-length // _ALIGN) * _ALIGN
    return min(rank * length, numel), min((rank + 1) * length, numel)


def combine(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    scale: float = 1.0,
    operation: Combine = torch.add,
) -> None:
    """Combine the sources in the order of the tree, scale, and write into every target.

    Targets may be the sources themselves.
    """
    first = targets[0]
    narrow = operation is torch.add and first.dtype in (torch.bfloat16, torch.float16)
    dtype = torch.float32 if narrow else first.dtype
    wide = torch.empty_like(first, dtype=dtype) if narrow else first
    _tree([s.to(dtype) for s in sources] if narrow else sources, wide, operation)
    if scale != 1.0:
        wide.mul_(scale)
    if narrow:
        first.copy_(wide)
    for target in targets[1:]:
        target.copy_(first)


def _tree(sources: Sequence[Tensor], out: Tensor, operation: Combine) -> None:
    """Into out, which may be the first source: that one is read before out is written."""
    count = len(sources)
    if count == 1:
        if out is not sources[0]:
            out.copy_(sources[0])
        return
    half = 1 << (count - 1).bit_length() - 1
    if half == 1:
        operation(sources[0], sources[1], out=out)
        return
    _tree(sources[:half], out, operation)
    if count - half == 1:
        operation(out, sources[-1], out=out)
    else:
        right = torch.empty_like(out)
        _tree(sources[half:], right, operation)
        operation(out, right, out=out)
