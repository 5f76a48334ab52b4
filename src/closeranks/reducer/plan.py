"""Which gradients travel together, and in which order: a pure decision over plain values.

Knows sizes, kinds and an order; never sees a tensor or a process. The same input gives the same
plan on every rank, which is what lets ranks pair their buckets by position alone.

The rule is torch's: gradients of one kind (dtype, device) fill a bucket in the order in which
they become ready, and a bucket closes when its size reaches its cap. Buckets fly in the order in
which they become complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ParameterSpec:
    """What the plan must know of one parameter."""

    index: int  # its number in the order of registration
    numel: int
    itemsize: int
    dtype: str
    device: str
    sparse: bool  # its gradient is a sparse tensor, which travels alone

    @property
    def size_bytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class BucketPlan:
    """The parameters of one bucket, in the order of its memory."""

    indices: tuple[int, ...]
    cap_bytes: int


def make_plan(
    parameters: Sequence[ParameterSpec],
    caps_bytes: Sequence[int],
    order: Sequence[int] | None = None,
) -> tuple[BucketPlan, ...]:
    """Cut the parameters into buckets, in launch order.

    Args:
        parameters: all of them.
        caps_bytes: the caps of the first, second, ... bucket of a kind; the last one repeats.
        order: the indices of the parameters in the order in which their gradients become ready.
            By default the reverse of registration, which is what a plain network does.
    """
    by_index = {p.index: p for p in parameters}
    ready_order = [p.index for p in reversed(parameters)] if order is None else list(order)
    assert sorted(ready_order) == sorted(by_index), "an order names every parameter exactly once"

    finished: list[tuple[int, BucketPlan]] = []  # (position of the last parameter, bucket)
    open_buckets: dict[tuple[str, str], tuple[list[int], int]] = {}
    closed_count: dict[tuple[str, str], int] = {}
    last_position: dict[tuple[str, str], int] = {}

    for position, index in enumerate(ready_order):
        parameter = by_index[index]
        if parameter.sparse:
            finished.append((position, BucketPlan((index,), parameter.size_bytes)))
            continue
        kind = (parameter.dtype, parameter.device)
        indices, size_bytes = open_buckets.get(kind, ([], 0))
        indices.append(index)
        size_bytes += parameter.size_bytes
        cap_bytes = _cap(caps_bytes, closed_count.get(kind, 0))
        last_position[kind] = position
        if size_bytes >= cap_bytes:
            finished.append((position, BucketPlan(tuple(indices), cap_bytes)))
            closed_count[kind] = closed_count.get(kind, 0) + 1
            open_buckets.pop(kind, None)
        else:
            open_buckets[kind] = (indices, size_bytes)

    for kind, (indices, _) in open_buckets.items():
        cap_bytes = _cap(caps_bytes, closed_count.get(kind, 0))
        finished.append((last_position[kind], BucketPlan(tuple(indices), cap_bytes)))
    finished.sort(key=lambda item: item[0])
    return tuple(bucket for _, bucket in finished)


def _cap(caps_bytes: Sequence[int], number: int) -> int:
    return caps_bytes[min(number, len(caps_bytes) - 1)]
