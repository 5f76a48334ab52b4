"""Who is to blame when ranks wait: pure judgements."""

import pytest

from closeranks.observe.hang import Hang, Seen, judge, where

NOW = 1000.0
LONG, SHORT = NOW - 100.0, NOW - 10.0


def _judge(*ranks: Seen) -> Hang | None:
    return judge(ranks, 60.0, NOW)


def _absent(*ranks: Seen) -> list[int]:
    hang = _judge(*ranks)
    assert hang is not None
    return [seen.rank for seen in hang.absent]


def _waits(rank: int, since_s: float = LONG) -> Seen:
    return Seen(rank, wait=("exchange 4", since_s))


@pytest.mark.parametrize(
    "absent",
    [
        Seen(2),
        Seen(2, has_ended=True),
        Seen(2, is_stopped=True, wait=("exchange 4", LONG)),
        Seen(2, is_silent=True, call="barrier", unmoved_since_s=LONG),
    ],
    ids=["computes", "ended", "stopped", "silent"],
)
def test_whoever_does_not_wait_is_absent(absent: Seen) -> None:
    hang = _judge(_waits(0), _waits(1), absent)
    assert hang is not None
    assert [seen.rank for seen in hang.absent] == [2]
    assert [seen.rank for seen in hang.stuck] == [0, 1]
    assert hang.since_s == LONG


def test_a_short_wait_is_no_hang() -> None:
    assert _judge(_waits(0, SHORT), Seen(1)) is None


def test_a_rank_that_waits_for_a_short_time_is_neither_stuck_nor_absent() -> None:
    hang = _judge(_waits(0), _waits(1, SHORT), Seen(2))
    assert hang is not None
    assert [seen.rank for seen in hang.stuck] == [0]
    assert [seen.rank for seen in hang.absent] == [2]


def test_whoever_came_a_little_later_is_stuck_as_well() -> None:
    hang = _judge(_waits(0), _waits(1, NOW - 59.0), Seen(2))
    assert hang is not None
    assert [seen.rank for seen in hang.stuck] == [0, 1]


def test_one_rank_alone_never_hangs() -> None:
    assert _judge(_waits(0)) is None


def test_a_call_counts_from_when_it_was_first_seen_unmoved() -> None:
    call = Seen(0, call="all_reduce", unmoved_since_s=LONG)
    assert _absent(call, Seen(1)) == [1]
    assert _judge(Seen(0, call="all_reduce", unmoved_since_s=SHORT), Seen(1)) is None


def test_who_has_started_more_collectives_waits() -> None:
    """A wait inside C++ has no Python frame of its own."""
    ahead = Seen(0, groups={"g": 5}, unmoved_since_s=LONG)
    behind = Seen(1, groups={"g": 4}, unmoved_since_s=LONG)
    assert _absent(ahead, behind) == [1]
    assert where(ahead).startswith("collective 5 of g")


def test_equal_counts_and_no_call_is_work() -> None:
    ranks = [Seen(rank, groups={"g": 5}, unmoved_since_s=LONG) for rank in range(2)]
    assert _judge(*ranks) is None


def test_a_group_that_others_do_not_have_proves_nothing() -> None:
    assert _judge(Seen(0, groups={"mine": 9}, unmoved_since_s=LONG), Seen(1)) is None


def test_if_all_wait_those_that_are_behind_are_absent() -> None:
    ranks = [
        Seen(0, call="all_reduce", groups={"g": 5}, unmoved_since_s=LONG),
        Seen(1, call="all_gather", groups={"g": 4}, unmoved_since_s=LONG),
    ]
    assert _absent(*ranks) == [1]


def test_if_nobody_is_behind_nobody_is_blamed() -> None:
    hang = _judge(_waits(0), Seen(1, call="barrier", unmoved_since_s=LONG))
    assert hang is not None
    assert hang.absent == () and len(hang.stuck) == 2


def test_two_looks_at_one_hang_have_one_key() -> None:
    first, second = _judge(_waits(0), Seen(1)), _judge(_waits(0, LONG - 1), Seen(1))
    assert first is not None and second is not None
    assert first.key == second.key
    other = _judge(_waits(1), Seen(0))
    assert other is not None and other.key != first.key
