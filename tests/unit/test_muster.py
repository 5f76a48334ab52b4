"""Who is started again, who is given up, and who is killed for standing still: by plain values."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from closeranks.launch.muster import Muster, Seen, is_stalled
from closeranks.launch.policy import Action, ResilientPolicy
from closeranks.segment import roster as words
from closeranks.segment.roster import ALIVE, FAILED, KILLED, Roster, area_start

SEEN = Seen(number=1, pid=1, at=50, steps=9, silent_s=61.0, is_lost=False, is_stopped=True)
OTHER = replace(SEEN, number=0, silent_s=0.1, is_stopped=False)


@pytest.fixture
def muster() -> Iterator[Muster]:
    made = Muster(Roster.create(3), ResilientPolicy(2))
    for worker in range(3):
        made.roster.started(made.admit(worker), 1000 + worker)
    made.hear(0, {"made": True}, 0.0)
    yield made
    made.roster.close()


def put(muster: Muster, number: int, **values: int) -> None:
    """What a worker writes into its own area."""
    for name, value in values.items():
        at = area_start(number) + 8 * getattr(words, name)
        os.pwrite(muster.roster.fd, value.to_bytes(8, "little"), at)


def test_restarts_in_vain_are_counted_for_each_worker(muster: Muster) -> None:
    number, actions = 1, []
    for _ in range(3):
        actions.append(muster.closed(number, -9, 0.0).action)
        number = muster.admit(1)
    assert actions == [Action.RESTART_ONE, Action.RESTART_ONE, Action.GO_ON]
    assert muster.closed(2, 1, 0.0).action is Action.RESTART_ONE
    assert muster.roster.status(1) == KILLED and muster.roster.status(2) == FAILED


def test_a_restart_that_finished_a_step_no_longer_counts(muster: Muster) -> None:
    number = 1
    for _ in range(20):
        put(muster, number, STEPS=1)
        assert muster.closed(number, -9, 0.0).action is Action.RESTART_ONE
        number = muster.admit(1)


def test_who_asks_to_be_started_again_is_not_counted(muster: Muster) -> None:
    number = 1
    for _ in range(20):
        muster.hear(number, {"again": True}, 0.0)
        assert muster.closed(number, 75, 0.0).action is Action.RESTART_ONE
        assert muster.asked_again(number)
        number = muster.admit(1)


def test_the_job_ends_when_the_last_is_given_up(muster: Muster) -> None:
    numbers, last = {worker: worker for worker in range(3)}, Action.GO_ON
    for _, worker in itertools.product(range(3), range(3)):
        last = muster.closed(numbers[worker], -9, 0.0).action
        if last is Action.RESTART_ONE:
            numbers[worker] = muster.admit(worker)
    assert last is Action.END


def test_nobody_is_started_again_after_an_end(muster: Muster) -> None:
    assert muster.closed(0, 0, 0.0).action is Action.GO_ON
    assert muster.closed(1, -9, 0.0).action is Action.GO_ON
    assert muster.look(time.monotonic_ns(), lambda pid: pid == 1002)[0][0] == 2


def test_every_death_is_seen_by_all(muster: Muster) -> None:
    before = muster.roster.generation
    assert muster.roster.status(1) == ALIVE
    muster.closed(1, -9, 0.0)
    assert muster.roster.generation == before + 1


def test_a_line_and_an_end_are_said_once(muster: Muster) -> None:
    line = {"print": "hello", "key": "line 1"}
    assert [s.text for s in muster.hear(0, line, 0.0)] == ["hello"]
    assert muster.hear(1, line, 0.0) == []
    assert [s.what for s in muster.hear(1, {"end": "why", "code": 3}, 0.0)] == ["end"]
    assert muster.hear(2, {"end": "other", "code": 4}, 0.0) == []


def test_who_is_back_says_after_how_long(muster: Muster) -> None:
    muster.closed(1, -9, 10.0)
    number = muster.admit(1)
    (said,) = muster.hear(number, {"back": 17}, 10.5)
    assert said.text == "rank 1 is back after 0.5 s, at step 17"


def test_memory_is_given_back_when_all_are_past_it(muster: Muster) -> None:
    for number in range(3):
        put(muster, number, AT=10)
    muster.closed(1, -9, 0.0)
    muster.tidy()
    assert muster.roster.word_of(1, words.AT) == 10  # The others may still want it.
    put(muster, 0, AT=12)
    muster.tidy()
    assert muster.roster.word_of(1, words.AT) == 10
    put(muster, 2, AT=12)
    muster.tidy()
    assert muster.roster.word_of(1, words.AT) == 0


@pytest.mark.parametrize(
    ("worker", "others", "stalled"),
    [
        (SEEN, [OTHER], True),
        (replace(SEEN, silent_s=59.0), [OTHER], False),
        (replace(SEEN, steps=1), [OTHER], False),
        (replace(SEEN, is_stopped=False), [OTHER], False),
        (replace(SEEN, is_stopped=False), [replace(OTHER, at=52)], True),
        (SEEN, [], False),
        (SEEN, [replace(OTHER, is_stopped=True)], False),
    ],
)
def test_who_stands_still(worker: Seen, others: list[Seen], stalled: bool) -> None:
    assert is_stalled(worker, others) is stalled
