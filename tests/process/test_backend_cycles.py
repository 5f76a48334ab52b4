"""Groups that come and go leave nothing: no descriptor, mapping, thread or memory."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.ranks import run_ranks

CYCLES = 300
_SETTLED = 30  # after so many, whatever is made once has been made


def _held() -> dict[str, int]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "mappings shared": sum("memfd:" in line for line in maps),
    }


def _anonymous_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def _come_and_go(rank: int) -> tuple[dict[str, int], dict[str, int], int]:
    before, kib_before = _held(), 0
    for cycle in range(CYCLES):
        group = dist.new_group(backend="closeranks")
        tensor = torch.ones(1000)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.get_future().wait()
        dist.barrier(group=group)
        assert tensor[0] == 2
        dist.destroy_process_group(group)
        del group, work
        if cycle == _SETTLED:
            before, kib_before = _held(), _anonymous_kib()
    deadline = time.monotonic() + 10.0  # gloo closes its connections from a thread of its own
    while any(_held()[key] > before[key] for key in before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return before, _held(), _anonymous_kib() - kib_before


def test_hundreds_of_groups_leave_nothing() -> None:
    for before, after, grown_kib in run_ranks(2, _come_and_go, deadline_s=150.0):
        assert all(after[key] <= before[key] for key in before), (before, after)
        assert after["mappings shared"] == 0
        # gloo and torch keep some 50 KiB for each group that ever was; a page of ours is 2 MiB.
        assert grown_kib < 200 * CYCLES


def test_a_group_that_is_only_dropped_ends_with_its_process() -> None:
    """Nobody calls destroy_process_group, and a collective is under way in the background."""
    run_ranks(2, _drop, backend="closeranks")
    left = [name for name in os.listdir("/dev/shm") if "closeranks" in name]
    assert left == []


def _drop(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(3), async_op=True)
