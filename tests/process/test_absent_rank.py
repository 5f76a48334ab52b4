"""A rank that does not come: a warning while there is hope, an error at the group's timeout.

Both name the bucket, its parameters and the absent ranks. A rank that has left its training loop is
told apart from one that is late, and one that died from both.
"""

from __future__ import annotations

import atexit
import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from tests.process.noticed import noticed
from tests.process.reference import Chain, rows, train_and_compare, wrap
from tests.ranks import Outcome, run_ranks, try_ranks

pytestmark = pytest.mark.parametrize("world", (2, 3))

TIMEOUT_S = 3.0


def _step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step)).square().mean().backward()


def _come_late(rank: int, world: int) -> list[str]:
    def step(net: Any, rank: int, step: int) -> None:
        if rank == 1 and net is wrapped:
            time.sleep(2.5)
        _step(net, rank, step)

    wrapped = wrap(Chain(), warn_after_s=1.0)
    with noticed() as said:
        train_and_compare(Chain, rank, world, step, net=wrapped)
    return said


def test_a_late_rank_is_named_in_a_warning(world: int) -> None:
    said = run_ranks(world, _come_late, world)
    for rank, texts in enumerate(said):
        about = [text for text in texts if "bucket 0" in text]
        if rank == 1:
            assert not about, "the late rank has nobody to wait for"
            continue
        assert len(about) == 1, f"rank {rank} must warn once, said {texts}"
        for wanted in ("rank 1", "first.weight"):
            assert wanted in about[0], about[0]
        for present in set(range(world)) - {1}:
            assert f"rank {present} did not" not in about[0], about[0]


def _be_quick(rank: int, world: int) -> list[str]:
    with noticed() as said:
        train_and_compare(Chain, rank, world, _step, steps=3, warn_after_s=1.0)
    return said


def test_nobody_is_warned_of_without_reason(world: int) -> None:
    assert run_ranks(world, _be_quick, world) == [[]] * world


def _never_come(rank: int) -> None:
    net = wrap(Chain(), warn_after_s=1.0)
    _step(net, rank, 0)
    if rank == 1:
        time.sleep(TIMEOUT_S + 4)
        os._exit(0)
    _step(net, rank, 1)


def _errors(outcomes: list[Outcome]) -> list[Outcome]:
    """The outcomes of the ranks that waited for rank 1."""
    return [outcome for outcome in outcomes if outcome.rank != 1]


def test_a_rank_that_never_comes_is_named_in_the_error(world: int) -> None:
    outcomes = try_ranks(world, _never_come, group_timeout_s=TIMEOUT_S)
    for outcome in _errors(outcomes):
        assert outcome.error is not None and outcome.error_type is not None, outcome
        assert "RankAbsent" in outcome.error_type.split(","), outcome.trace
        for wanted in ("bucket 0", "first.weight", "rank 1"):
            assert wanted in outcome.error, outcome.error
        assert "rank 0 did not" not in outcome.error
        assert TIMEOUT_S - 1 < outcome.seconds < TIMEOUT_S + 5, outcome.seconds


def _run_out_of_data(rank: int, how: str) -> None:
    net = wrap(Chain(), warn_after_s=1.0)
    for step in range(2 if rank == 1 else 4):
        _step(net, rank, step)
        net.zero_grad()
    if how == "destroys its group":
        dist.destroy_process_group()
        time.sleep(2.0)
    elif how == "exits":
        atexit._run_exitfuncs()  # the harness ends a rank without them; a script does not
    elif how == "waits at a barrier":
        dist.barrier()


@pytest.mark.parametrize("how", ("destroys its group", "exits"))
def test_a_rank_that_ran_out_of_data_is_named(world: int, how: str) -> None:
    outcomes = try_ranks(world, _run_out_of_data, how, group_timeout_s=TIMEOUT_S)
    assert not outcomes[1].failed, outcomes[1].trace
    for outcome in _errors(outcomes):
        assert outcome.error is not None and outcome.error_type is not None, outcome
        assert "OutOfData" in outcome.error_type.split(","), outcome.trace
        for wanted in ("rank 1", "join"):
            assert wanted in outcome.error, outcome.error
        assert outcome.seconds < TIMEOUT_S + 5, outcome.seconds


def test_a_rank_that_waits_at_a_barrier_is_an_error(world: int) -> None:
    """An exchange meets a barrier. What comes of it is an error on every rank, and no hang."""
    outcomes = try_ranks(
        world, _run_out_of_data, "waits at a barrier", group_timeout_s=TIMEOUT_S, deadline_s=30.0
    )
    for outcome in _errors(outcomes):
        assert outcome.error_type is not None, outcome
        assert "ExchangeFailed" in outcome.error_type.split(","), outcome.trace


def _die(rank: int) -> None:
    net = wrap(Chain(), warn_after_s=1.0)
    _step(net, rank, 0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _step(net, rank, 1)


def test_a_rank_that_died_is_an_error_before_the_timeout(world: int) -> None:
    outcomes = try_ranks(world, _die, group_timeout_s=20.0)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for outcome in _errors(outcomes):
        assert outcome.error is not None and outcome.error_type is not None, outcome
        kinds = outcome.error_type.split(",")
        assert "PeerLost" in kinds and "OutOfData" not in kinds, outcome.trace
        assert "bucket 0" in outcome.error, outcome.error
        assert outcome.seconds < 15, outcome.seconds
