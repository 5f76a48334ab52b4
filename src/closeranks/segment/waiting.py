"""How to wait for a word of another process: a pure choice, and the loop for Python.

Polling is fastest and, with more ranks than cores, ruinous: the rank that is waited for does not
run. Offering the core to others (sched_yield) is nearly as fast and harmless, but burns the core
when the wait is long. Sleeping costs a wake-up of 50 us and nothing else. So: a few polls if there
are cores to spare, then yields for a moment, then sleep.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

SLEEP_S_MAX = 0.001


@dataclass(frozen=True)
class WaitPolicy:
    """How long each way of waiting lasts."""

    polls: int
    yield_us: int


def choose(ranks: int, cores: int) -> WaitPolicy:
    """For so many ranks of this host, which may use so many cores together."""
    return WaitPolicy(polls=0 if ranks >= cores else 200, yield_us=200)


def await_first(find_late: Callable[[], int], policy: WaitPolicy, slice_us: int) -> int:
    """Wait until find_late() finds nobody, for at most slice_us: -1, or who is late."""
    late = find_late()
    if late < 0 or slice_us <= 0:
        return late
    for _ in range(policy.polls):
        late = find_late()
        if late < 0:
            return late
    start = time.perf_counter()
    end, yield_end, sleep_s = start + slice_us / 1e6, start + policy.yield_us / 1e6, 20e-6
    while late >= 0:
        now = time.perf_counter()
        if now >= end:
            return late
        if now < yield_end:
            os.sched_yield()
        else:
            time.sleep(min(sleep_s, end - now))
            sleep_s = min(2 * sleep_s, SLEEP_S_MAX)
        late = find_late()
    return late
