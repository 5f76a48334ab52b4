"""How long to poll, to yield and to sleep: the choice, and the loop, on a clock of the test's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.segment.waiting import SLEEP_S_MAX, WaitPolicy, await_first, choose


@given(ranks=st.integers(1, 300), cores=st.integers(1, 300))
def test_nobody_polls_where_others_need_the_core(ranks: int, cores: int) -> None:
    policy = choose(ranks, cores)
    assert (policy.polls > 0) == (ranks < cores)
    assert 0 < policy.yield_us <= 1000


class Clock:
    """Time passes by what is done: a look 1 us, a yield 10 us, a sleep as long as it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, there_at_s: float) -> None:
        self.now_s = 0.0
        self.there_at_s = there_at_s
        self.looks = self.yields = 0
        self.sleeps: list[float] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(time, "sleep", self._sleep)
        monkeypatch.setattr(os, "sched_yield", self._yield)

    def look(self) -> int:
        self.looks += 1
        self.now_s += 1e-6
        return -1 if self.now_s >= self.there_at_s else 3

    def _yield(self) -> None:
        self.yields += 1
        self.now_s += 10e-6

    def _sleep(self, for_s: float) -> None:
        self.sleeps.append(for_s)
        self.now_s += for_s


MakeClock = Callable[[float], Clock]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MakeClock:
    return lambda there_at_s: Clock(monkeypatch, there_at_s)


def test_who_is_there_is_not_waited_for(clock: MakeClock) -> None:
    at = clock(0.0)
    assert await_first(at.look, WaitPolicy(100, 200), 20_000) == -1
    assert (at.looks, at.yields, at.sleeps) == (1, 0, [])


def test_a_short_wait_is_polled(clock: MakeClock) -> None:
    at = clock(50e-6)
    assert await_first(at.look, WaitPolicy(100, 200), 20_000) == -1
    assert (at.yields, at.sleeps) == (0, [])


def test_a_longer_one_yields(clock: MakeClock) -> None:
    at = clock(250e-6)
    assert await_first(at.look, WaitPolicy(100, 200), 20_000) == -1
    assert at.yields > 0 and at.sleeps == []


def test_a_long_one_sleeps_longer_and_longer(clock: MakeClock) -> None:
    at = clock(15e-3)
    assert await_first(at.look, WaitPolicy(0, 200), 20_000) == -1
    assert at.sleeps == sorted(at.sleeps) and at.sleeps[-1] == SLEEP_S_MAX
    assert at.now_s < 15e-3 + 2 * SLEEP_S_MAX


def test_no_wait_is_longer_than_its_slice(clock: MakeClock) -> None:
    at = clock(1.0)
    assert await_first(at.look, WaitPolicy(10, 200), 5_000) == 3, "who is late is told"
    assert 5e-3 <= at.now_s < 5.2e-3


def test_without_a_slice_nobody_waits(clock: MakeClock) -> None:
    """A look in passing, at the start of a collective: the caller has other work to do."""
    at = clock(1.0)
    assert await_first(at.look, WaitPolicy(100, 200), 0) == 3
    assert (at.looks, at.yields, at.sleeps) == (1, 0, [])
