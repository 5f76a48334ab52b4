"""The test harness itself: values come back, failures and hangs are told with their stacks."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks, try_ranks


def _sum_of_ranks(rank: int) -> float:
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return total.item()


def _raise_on_one(rank: int) -> int:
    dist.barrier()  # nobody is cut off while the group is being made
    if rank == 1:
        raise KeyError("no such thing")
    return rank


def _sleep_for_ever(rank: int) -> None:
    time.sleep(600)


def _kill_self(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_values_come_back_by_rank() -> None:
    assert run_ranks(3, _sum_of_ranks) == [3.0, 3.0, 3.0]


def test_a_failure_is_told_with_its_traceback() -> None:
    first, second = try_ranks(2, _raise_on_one)
    assert first.value == 0 and not first.failed
    assert second.error == "'no such thing'" and second.error_type.startswith("KeyError,")
    with pytest.raises(AssertionError, match="_raise_on_one"):
        run_ranks(2, _raise_on_one)


def test_a_killed_rank_has_its_exit_code() -> None:
    assert [o.exitcode for o in try_ranks(2, _kill_self)] == [-9, -9]


def test_a_hang_fails_with_stacks() -> None:
    with pytest.raises(AssertionError, match="_sleep_for_ever"):
        run_ranks(2, _sleep_for_ever, deadline_s=3.0)
