"""Who does what, and in which order lanes are summed: properties of pure functions."""

from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.exchange.tree import fold
from closeranks.lanes.assign import (
    Limits,
    Mate,
    block,
    choose,
    covered,
    cut,
    merge_path,
    sum_of,
)

LIMITS = Limits(late_s=0.3, grace_s=0.05)
Node = tuple[int, int]


def joined(a: str, b: str) -> str:
    """Addition that shows its order."""
    return f"({a}+{b})"


def tree(lanes: int) -> str:
    return fold([str(k) for k in range(lanes)], joined)


@given(samples=st.integers(1, 5000), lanes=st.integers(1, 1024))
def test_lanes_are_cut_evenly(samples: int, lanes: int) -> None:
    pieces = cut(samples, lanes)
    assert len(pieces) == min(lanes, max(1, samples // 2))
    assert pieces[0][0] == 0 and pieces[-1][1] == samples
    assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    sizes = [hi - lo for lo, hi in pieces]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(2, samples)


@given(tasks=st.integers(0, 300), workers=st.integers(1, 40))
def test_blocks_share_all_tasks(tasks: int, workers: int) -> None:
    blocks = [block(tasks, workers, place) for place in range(workers)]
    assert [task for each in blocks for task in each] == list(range(tasks))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


def partial_folds(lanes: int, order: list[int], owners: list[int]) -> list[dict[Node, str]]:
    """What each worker holds after lanes were done in this order by these workers."""
    held: list[dict[Node, str]] = [{} for _ in range(max(owners, default=0) + 1)]
    for lane, owner in zip(order, owners, strict=True):
        mine = held[owner]
        if lane in covered(mine.keys()):
            continue
        lo, hi, value = lane, lane + 1, str(lane)
        for sibling in merge_path(lane, lanes, mine):
            other = mine.pop(sibling)
            value = joined(other, value) if sibling[0] < lo else joined(value, other)
            lo, hi = min(lo, sibling[0]), max(hi, sibling[1])
        mine[lo, hi] = value
    return held


@st.composite
def sharing(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    lanes = draw(st.integers(1, 40))
    order = draw(st.permutations(range(lanes)))
    owners = draw(st.lists(st.integers(0, 6), min_size=lanes, max_size=lanes))
    return lanes, list(order), owners


@given(sharing())
@settings(max_examples=300)
def test_any_grouping_of_partial_folds_gives_the_one_sum(
    shared: tuple[int, list[int], list[int]],
) -> None:
    lanes, order, owners = shared
    have = {
        node: value for held in partial_folds(lanes, order, owners) for node, value in held.items()
    }
    assert sum_of(0, lanes, lambda lo, hi: have.get((lo, hi)), joined) == tree(lanes)


@given(sharing(), st.data())
def test_lanes_that_were_done_twice_change_nothing(
    shared: tuple[int, list[int], list[int]], data: st.DataObject
) -> None:
    lanes, order, owners = shared
    again = data.draw(st.lists(st.integers(0, lanes - 1), max_size=10))
    others = data.draw(st.lists(st.integers(0, 6), min_size=len(again), max_size=len(again)))
    have: dict[Node, str] = {}
    for held in partial_folds(lanes, order + again, owners + others):
        have |= held
    assert sum_of(0, lanes, lambda lo, hi: have.get((lo, hi)), joined) == tree(lanes)


@given(sharing(), st.data())
def test_an_absent_lane_means_no_sum(
    shared: tuple[int, list[int], list[int]], data: st.DataObject
) -> None:
    lanes, order, owners = shared
    absent = data.draw(st.integers(0, lanes - 1))
    at = order.index(absent)
    rest = partial_folds(lanes, order[:at] + order[at + 1 :], owners[:at] + owners[at + 1 :])
    have = {node: value for held in rest for node, value in held.items()}
    assert sum_of(0, lanes, lambda lo, hi: have.get((lo, hi)), joined) is None
    assert absent not in covered(have)


@given(lanes=st.integers(1, 200), workers=st.integers(1, 20))
def test_a_block_of_lanes_needs_few_sums_at_a_time(lanes: int, workers: int) -> None:
    """Which is what bounds the memory of a worker; one more is being written."""
    for place in range(workers):
        mine = block(lanes, workers, place)
        held: set[Node] = set()
        most = 0
        for lane in mine:
            most = max(most, len(held) + 1)
            node = (lane, lane + 1)
            for sibling in merge_path(lane, lanes, held):
                held.remove(sibling)
                node = min(node[0], sibling[0]), max(node[1], sibling[1])
            held.add(node)
        assert most <= 2 * math.log2(max(2, len(mine))) + 1


@given(
    tasks=st.integers(1, 30),
    workers=st.integers(1, 8),
    data=st.data(),
)
def test_what_is_chosen_is_neither_done_nor_in_good_hands(
    tasks: int, workers: int, data: st.DataObject
) -> None:
    done = data.draw(st.sets(st.integers(0, tasks - 1)))
    busy = st.one_of(st.none(), st.integers(0, tasks - 1))
    crew = [
        Mate(n, data.draw(busy), data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1)))
        for n in range(workers)
    ]
    me = data.draw(st.integers(0, workers - 1))
    found = choose(tasks, done, me, crew, data.draw(st.floats(0, 2)), LIMITS)
    if found.task is not None:
        assert found.task in range(tasks) and found.task not in done
        holders = [m for m in crew if m.number != me and m.task == found.task]
        assert not any(m.busy_s < LIMITS.late_s for m in holders)


@given(tasks=st.integers(1, 30), workers=st.integers(1, 8), data=st.data())
def test_who_is_alone_with_the_work_does_all_of_it(
    tasks: int, workers: int, data: st.DataObject
) -> None:
    """Whoever waits long enough ends up with every task that nobody does."""
    me = data.draw(st.integers(0, workers - 1))
    crew = [Mate(n) for n in range(workers)]
    done: set[int] = set()
    while len(done) < tasks:
        found = choose(tasks, done, me, crew, 1.0, LIMITS)
        assert found.task is not None, f"{done} of {tasks}: {found.reason}"
        done.add(found.task)


def test_a_slow_mate_is_helped_only_if_it_is_worth_it() -> None:
    crew = [Mate(0), Mate(1, task=3, busy_s=0.01, usual_s=0.08)]
    assert choose(4, {0, 1, 2}, 0, crew, 0.0, LIMITS, mine_s=0.02).task == 3
    assert choose(4, {0, 1, 2}, 0, crew, 0.0, LIMITS, mine_s=0.06).task is None
    assert choose(4, {0, 1, 2}, 0, crew, 0.0, LIMITS).task is None
    equal = [Mate(0), Mate(1, task=3, busy_s=0.0, usual_s=0.02)]
    assert choose(4, {0, 1, 2}, 0, equal, 0.0, LIMITS, mine_s=0.02).task is None
    # While there is work that nobody has begun, that comes first.
    assert choose(4, {0, 2}, 0, crew, 0.0, LIMITS, mine_s=0.02).task == 1


@given(tasks=st.integers(1, 60), workers=st.integers(1, 9))
def test_workers_that_begin_together_do_nothing_twice(tasks: int, workers: int) -> None:
    begun: dict[int, int] = {}
    for me in range(workers):
        crew = [Mate(n, begun.get(n)) for n in range(workers)]
        found = choose(tasks, set(), me, crew, 0.0, LIMITS)
        if found.task is not None:
            assert found.task not in begun.values()
            begun[me] = found.task
