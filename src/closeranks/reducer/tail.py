"""What ranks tell each other at the end of every backward: a few numbers behind the last bucket.

For each parameter whether this rank used it, and one flag for each thing that all ranks must
know before they go on. The numbers are summed with the bucket that carries them, so every rank
reads the same sums. This file knows the layout only; what follows from a flag is the reducer's.

    [ used(0) ... used(n-1) | late | grads_changed ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FLAG_COUNT = 2
# Sums of ones up to this many ranks are exact in these types; others cannot carry a tail.
_RANKS_MAX = {
    torch.float32: 1 << 24,
    torch.float64: 1 << 53,
    torch.bfloat16: 1 << 8,
    torch.float16: 1 << 11,
    torch.int32: 1 << 31,
}


@dataclass(frozen=True)
class Flags:
    """Sums over ranks, as read from a tail; True if any rank raised the flag."""

    late: bool
    grads_changed: bool


def tail_length(parameter_count: int) -> int:
    return parameter_count + FLAG_COUNT


def can_carry(dtype: torch.dtype, ranks: int) -> bool:
    """Whether sums over so many ranks are exact in a bucket of this type."""
    return ranks <= _RANKS_MAX.get(dtype, 0)


def write_tail(tail: Tensor, used: Sequence[bool] | None, flags: Flags) -> None:
    """Write this rank's numbers; used=None says that it used every parameter."""
    if used is None:
        tail.fill_(1)
    else:
        tail[:-FLAG_COUNT] = torch.tensor(used, dtype=tail.dtype, device=tail.device)
    tail[-FLAG_COUNT:] = torch.tensor(
        [flags.late, flags.grads_changed], dtype=tail.dtype, device=tail.device
    )


class News:
    """The tail of the newest exchange, summed over ranks; read when somebody asks."""

    def __init__(self, tail: Tensor, unit: float) -> None:
        self._tail = tail
        self._unit = unit  # what the exchange made of a one
        self._counts: list[int] | None = None

    def flags(self) -> Flags:
        late, grads_changed = self._tail[-FLAG_COUNT:].tolist()
        return Flags(late > 0, grads_changed > 0)

    def counts(self) -> list[int]:
        """On how many ranks each planned parameter was used."""
        if self._counts is None:
            self._counts = [round(v / self._unit) for v in self._tail[:-FLAG_COUNT].tolist()]
        return self._counts

    def release(self) -> None:
        """Let go of the bucket that carried the tail."""
        self._tail = self._tail.clone()
