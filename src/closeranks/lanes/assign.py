"""Who does what, decided by every worker for itself: pure, and nobody has to agree.

Tasks (lanes, or regions) are numbered. Each worker of the crew has a block of them; beyond its own
it may do any task, because a task done twice has the same bits twice. So a wrong guess about the
others costs time and nothing else, and these are rules of thumb:

    mine       not done, nobody is at it, and in my block
    behind     nobody is at it, and its worker has more left than it can begin soon
    absent     nobody is at it, and its worker does not come
    late       somebody is at it for so long that it may be stopped
    sooner     somebody is at it, and is so slow that I will have done it before

Knows numbers and times, which are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from closeranks.exchange.tree import split

T = TypeVar("T")

_WORTH_IT = 1.2  # so much faster I must be, or both waste their time


@dataclass(frozen=True)
class Mate:
    """A worker, as another sees it."""

    number: int
    task: int | None = None  # what it is busy with
    busy_s: float = 0.0
    patience_s: float = 0.0  # how much longer to wait for it than for others
    usual_s: float = 0.0  # a task of this kind usually takes it so long; 0: not known


@dataclass(frozen=True)
class Limits:
    """When a task may be taken from its worker."""

    late_s: float  # that is busy with it
    grace_s: float  # that has not begun it


@dataclass(frozen=True)
class Choice:
    """What to do next, or None, and why."""

    task: int | None
    reason: str


def cut(samples: int, lanes: int) -> list[tuple[int, int]]:
    """Where the lanes of a batch begin and end: sizes differ by at most one, none has less than 2.

    A batch of one sample is one lane.
    """
    count = min(lanes, max(1, samples // 2))
    return [(k * samples // count, (k + 1) * samples // count) for k in range(count)]


def block(tasks: int, workers: int, place: int) -> range:
    """The tasks of the place-th of so many workers."""
    return range(place * tasks // workers, (place + 1) * tasks // workers)


def choose(
    tasks: int,
    done: Collection[int],
    me: int,
    crew: Sequence[Mate],
    idle_s: float,
    limits: Limits,
    mine_s: float | None = None,
) -> Choice:
    """What worker `me`, who has been idle for so long, does next; the crew is sorted and has it.

    mine_s: a task usually takes me so long.
    """
    others = [mate for mate in crew if mate.number != me]
    held = {m.task for m in others if m.task is not None and m.busy_s < limits.late_s}
    free = [t for t in range(tasks) if t not in done and t not in held]
    if not free:
        return _sooner(done, others, mine_s)
    blocks = {m.number: block(tasks, len(crew), k) for k, m in enumerate(crew)}
    mine = [t for t in free if t in blocks[me]]
    if mine:
        return Choice(mine[0], "mine")
    at_it = {m.task for m in others if m.task is not None}
    best: list[int] = []
    for mate in others:
        left = [t for t in free if t in blocks[mate.number]]
        late = [t for t in left if t in at_it]
        if late:
            return Choice(late[-1], "late")
        if mate.task is not None:
            may = len(left) > 1 or mate.busy_s > limits.grace_s
        else:
            may = idle_s > max(limits.grace_s, mate.patience_s)
        if may and len(left) > len(best):
            best = left
    if best:
        return Choice(best[-1], "behind or absent")
    return Choice(None, "its worker will begin it soon")


def _sooner(done: Collection[int], others: Sequence[Mate], mine_s: float | None) -> Choice:
    """All that is left is being done: is one of them so slow that I would be the first?"""
    if mine_s is not None:
        for mate in others:
            left_s = mate.usual_s - mate.busy_s
            if mate.task is not None and mate.task not in done and left_s > _WORTH_IT * mine_s:
                return Choice(mate.task, "sooner done by me")
    return Choice(None, "all are done or in good hands")


def covered(nodes: Collection[tuple[int, int]]) -> set[int]:
    """The lanes whose sums are in one of these nodes."""
    return {lane for lo, hi in nodes for lane in range(lo, hi)}


def merge_path(lane: int, lanes: int, have: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
    """The nodes that a newly computed lane is to be joined with, one after the other."""
    path: list[tuple[int, int]] = []
    node = (lane, lane + 1)
    while True:
        parent, sibling = _above(node, lanes)
        if sibling is None or sibling not in have:
            return path
        path.append(sibling)
        node = parent


def _above(node: tuple[int, int], lanes: int) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """The parent and the sibling of a node in the tree over all lanes; the root has no sibling."""
    lo, hi = 0, lanes
    parent, sibling = (0, lanes), None
    while (lo, hi) != node:
        middle = split(lo, hi)
        parent = (lo, hi)
        if node[0] < middle:
            sibling, hi = (middle, hi), middle
        else:
            sibling, lo = (lo, middle), middle
    return parent, sibling


def sum_of(
    lo: int, hi: int, have: Callable[[int, int], T | None], add: Callable[[T, T], T]
) -> T | None:
    """The sum of lanes [lo, hi) from what there is, in the order of the tree; None: not all is."""
    found = have(lo, hi)
    if found is not None or hi - lo == 1:
        return found
    middle = split(lo, hi)
    left = sum_of(lo, middle, have, add)
    right = sum_of(middle, hi, have, add) if left is not None else None
    if left is None or right is None:
        return None
    return add(left, right)
