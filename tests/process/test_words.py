"""Words between real processes: none is lost, however often, and whoever has to sleep is woken.

The memory is made here and mapped by the ranks through /proc, as ranks map each other's.
"""

from __future__ import annotations

import os
import time

import pytest

from closeranks.segment.kernels import CKernels, library, make
from closeranks.segment.memory import Memory, attach
from closeranks.segment.page import ARRIVED, DONE, PAGE_SIZE_BYTES, Page, wrapped
from closeranks.segment.waiting import WaitPolicy, choose
from tests.ranks import run_ranks

needs_c = pytest.mark.skipif(library() is None, reason="the C kernels were not built here")
_SLICE_US = 30_000_000
# The words pass the end of their 32 bits on the way.
_FIRST = (1 << 32) - 5000


def _pages(places: list[tuple[int, int]]) -> list[Page]:
    return [Page(attach(pid, fd, PAGE_SIZE_BYTES)) for pid, fd in places]


def _handshakes_in_c(
    rank: int, places: list[tuple[int, int]], policy: WaitPolicy | None, count: int
) -> tuple[int, float]:
    chosen = policy or choose(2, len(os.sched_getaffinity(0)))
    kernels = make("c", _pages(places), rank, chosen)
    assert isinstance(kernels, CKernels)
    started = time.monotonic()
    done = kernels.library.cr_handshakes(kernels.address, _FIRST, count, _SLICE_US)
    return done, time.monotonic() - started


def _barriers(rank: int, places: list[tuple[int, int]], kind: str, count: int) -> int:
    """Both words in turn, as a collective uses them; a rank must never be two ticks ahead."""
    pages = _pages(places)
    kernels = make(kind, pages, rank, choose(len(pages), len(os.sched_getaffinity(0))))
    for tick in range(_FIRST, _FIRST + count):
        for which in (ARRIVED, DONE):
            kernels.publish(which, wrapped(tick))
            if kernels.await_all(which, wrapped(tick), _SLICE_US) >= 0:
                return tick - _FIRST
            ahead = [(page.words[which // 4] - wrapped(tick)) & 0xFFFFFFFF for page in pages]
            assert max(ahead) <= 1, f"somebody is {max(ahead)} ticks ahead"
    return count


def _made(count: int) -> list[Memory]:
    """Pages whose words say that the tick before the first is over."""
    made = [Memory(PAGE_SIZE_BYTES) for _ in range(count)]
    for one in made:
        page = Page(one.map)
        page.words[ARRIVED // 4] = page.words[DONE // 4] = wrapped(_FIRST - 1)
    return made


def _places(made: list[Memory]) -> list[tuple[int, int]]:
    return [(os.getpid(), one.fd) for one in made]


@needs_c
def test_ten_million_words_and_none_is_lost() -> None:
    made = _made(2)
    count = 10_000_000
    results = run_ranks(
        2, _handshakes_in_c, _places(made), None, count, init_group=False, deadline_s=150.0
    )
    assert [done for done, _ in results] == [count, count]


@needs_c
def test_a_rank_that_sleeps_at_once_is_woken_every_time() -> None:
    """No polls and no yields: every wait sleeps in the kernel, and a lost wake-up costs 30 s."""
    made = _made(2)
    count = 50_000
    results = run_ranks(
        2, _handshakes_in_c, _places(made), WaitPolicy(0, 0), count, init_group=False
    )
    assert [done for done, _ in results] == [count, count]
    assert max(seconds for _, seconds in results) < 29, "a wake-up was lost"


@pytest.mark.parametrize("kind", ("c", "python"))
@pytest.mark.parametrize("world", (2, 5))
def test_ranks_stay_together(world: int, kind: str) -> None:
    if kind == "c" and library() is None:
        pytest.skip("the C kernels were not built here")
    made = _made(world)
    count = 10_000 if world == 2 else 3_000
    done = run_ranks(world, _barriers, _places(made), kind, count, init_group=False)
    assert done == [count] * world
