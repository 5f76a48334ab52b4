"""A rank that is killed or stopped in the middle of a collective in shared memory.

Ranks 0 and 1 survive. With each other rank they form a group of three, in which that rank dies at
one of the points around the barriers, so that one start of ranks sees many deaths.
"""

from __future__ import annotations

import datetime
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from closeranks.errors import PeerLost, RankAbsent
from closeranks.exchange.base import Exchange, Pending
from tests.process.exchange_ways import CPU, WAYS, exchange_here, need
from tests.process.faults import AROUND_BARRIERS, happened_at_s, kill_at, stop_at
from tests.process.reference import Chain, assert_replicas_equal, rows, wrap
from tests.ranks import run_ranks, try_ranks

_NOTICED_S_MAX = 2.0  # what is measured on a quiet machine is in the notebook


def _sum_of_resident(exchange: Exchange) -> Callable[[], Pending]:
    tensor = exchange.allocate([100_000], torch.float32, CPU)[0]
    exchange.all_reduce(tensor).wait()  # the first use is staged
    return lambda: exchange.all_reduce(tensor)


COLLECTIVES: dict[str, Callable[[Exchange], Callable[[], Pending]]] = {
    "sum of a resident": _sum_of_resident,
    "first sum of a resident": lambda exchange: (
        lambda: exchange.all_reduce(exchange.allocate([70_000], torch.float32, CPU)[0])
    ),
    "staged sum": lambda exchange: lambda: exchange.all_reduce(torch.ones(600_000)),
    "all_max": lambda exchange: lambda: exchange.all_max(torch.ones(5, dtype=torch.int32)),
    "broadcast": lambda exchange: lambda: exchange.broadcast(torch.ones(600_000), 2),
}


def _trio(rank: int, victim: int) -> dist.ProcessGroup | None:
    group = dist.new_group([0, 1, victim], timeout=datetime.timedelta(seconds=30))
    return group if rank in (0, 1, victim) else None


def _lose_in_a_collective(rank: int, world: int, name: str, folder: str) -> list[float]:
    trios = {victim: _trio(rank, victim) for victim in range(2, world)}
    starts: dict[int, Callable[[], Pending]] = {
        victim: COLLECTIVES[name](exchange_here(group))
        for victim, group in trios.items()
        if group is not None
    }
    dist.barrier()
    late_s = []
    for victim, point in enumerate(AROUND_BARRIERS, start=2):
        if victim not in starts:
            continue
        note = Path(folder) / point
        if rank == victim:
            kill_at(point, note)
        began_s = time.monotonic()
        try:
            starts[victim]().wait()
            # It had given all that the others needed: they notice at the next collective.
            assert point != "before arriving", "nobody can have its data"
            starts[victim]().wait()
        except PeerLost as error:
            now_s = time.monotonic()
            assert error.rank == 2 and "rank 2 is gone" in str(error), error
            late_s.append(now_s - max(began_s, happened_at_s(note)))
        else:
            raise AssertionError(f"killed {point}, and nobody noticed")
    return late_s


@pytest.mark.parametrize("way", ("shm-c", "shm-python"))
@pytest.mark.parametrize("name", COLLECTIVES)
def test_survivors_name_who_died_in_a_collective(name: str, way: str, tmp_path: Path) -> None:
    need(way)
    world = 2 + len(AROUND_BARRIERS)
    outcomes = try_ranks(world, _lose_in_a_collective, world, name, str(tmp_path), env=WAYS[way])
    for outcome in outcomes[2:]:
        assert outcome.exitcode == -signal.SIGKILL, f"rank {outcome.rank} lives\n{outcome.trace}"
    for outcome in outcomes[:2]:
        assert not outcome.failed, outcome.trace
        assert len(outcome.value) == len(AROUND_BARRIERS)
        assert max(outcome.value) < _NOTICED_S_MAX, outcome.value


def _lose_in_training(rank: int, world: int, folder: str) -> list[tuple[float, str]]:
    trios = {victim: _trio(rank, victim) for victim in range(2, world)}
    nets = {
        victim: wrap(Chain(), process_group=group, bucket_cap_mb=0.0001)
        for victim, group in trios.items()
        if group is not None
    }
    for step in range(2):
        for net in nets.values():
            _step(net, rank, step)
    dist.barrier()
    seen = []
    for victim, point in enumerate(AROUND_BARRIERS, start=2):
        if victim not in nets:
            continue
        note = Path(folder) / point
        if rank == victim:
            kill_at(point, note, nth=2)  # at the second bucket; the first may be under way
        began_s = time.monotonic()
        try:
            for step in range(2, 4):
                _step(nets[victim], rank, step)
        except PeerLost as error:
            now_s = time.monotonic()
            assert error.rank == 2
            seen.append((now_s - max(began_s, happened_at_s(note)), str(error)))
        else:
            raise AssertionError(f"killed {point}, and nobody noticed")
    return seen


def _step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step)).square().mean().backward()


@pytest.mark.parametrize("way", ("shm-c", "shm-python"))
def test_survivors_name_the_dead_and_the_bucket(way: str, tmp_path: Path) -> None:
    need(way)
    world = 2 + len(AROUND_BARRIERS)
    outcomes = try_ranks(world, _lose_in_training, world, str(tmp_path), env=WAYS[way])
    for outcome in outcomes[:2]:
        assert not outcome.failed, outcome.trace
        for late_s, text in outcome.value:
            assert late_s < _NOTICED_S_MAX, late_s
            for wanted in ("rank 2 is gone", ", bucket ", ".weight", "restart the job"):
                assert wanted in text, text


_TIMEOUT_S = 2.0


def _be_stopped(rank: int, point: str, port_file: str, folder: str) -> tuple[str, float]:
    """Rank 0 serves the store that all could ask, and is the one that stops."""
    store = _store(rank, Path(port_file))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=3, timeout=datetime.timedelta(seconds=_TIMEOUT_S)
    )
    net = wrap(Chain(), warn_after_s=30.0)
    for step in range(2):
        _step(net, rank, step)
    note, pid_file = Path(folder) / "stopped", Path(folder) / "pid"
    if rank == 0:
        pid_file.write_text(str(os.getpid()))
        stop_at(point, note)
    text, took_s = "", 0.0
    try:
        for step in range(2, 4):
            _step(net, rank, step)
    except RankAbsent as error:
        text, took_s = str(error), time.monotonic() - happened_at_s(note)
    except PeerLost:
        assert rank == 0, "it goes on when the others are gone"
    finally:
        (Path(folder) / f"over {rank}").touch()
        if rank == 1:
            while not (Path(folder) / "over 2").exists():
                time.sleep(0.01)
            os.kill(int(pid_file.read_text()), signal.SIGCONT)
    return text, took_s


def _store(rank: int, port_file: Path) -> dist.TCPStore:
    long = datetime.timedelta(seconds=40)
    if rank == 0:
        served = dist.TCPStore("127.0.0.1", 0, 3, True, long, wait_for_workers=False)
        new = port_file.with_suffix(".new")
        new.write_text(str(served.port))
        new.rename(port_file)
        return served
    while not port_file.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(port_file.read_text()), 3, False, long)


@pytest.mark.parametrize("point", ("before arriving", "before done"))
def test_a_stopped_rank_is_an_error_at_the_timeout(point: str, tmp_path: Path) -> None:
    outcomes = try_ranks(
        3, _be_stopped, point, str(tmp_path / "port"), str(tmp_path), init_group=False
    )
    for outcome in outcomes[1:]:
        assert not outcome.failed, outcome.trace
        text, took_s = outcome.value
        for wanted in ("rank 0 did not come", "is stopped", "bucket 0", "first.weight"):
            assert wanted in text, text
        assert _TIMEOUT_S - 0.5 < took_s < _TIMEOUT_S + 5, took_s


def _late_is_not_lost(rank: int) -> Any:
    """A rank that is slow for longer than any slice of waiting is waited for."""
    exchange = exchange_here()
    for number in range(3):
        if rank == number:
            time.sleep(0.3)
        tensor = torch.ones(10)
        exchange.all_reduce(tensor).wait()
        assert torch.equal(tensor, torch.full((10,), 3.0))
    return exchange.way


def test_a_slow_rank_is_waited_for() -> None:
    assert all(way.startswith("shm") for way in run_ranks(3, _late_is_not_lost))


def train_while_ranks_stop(rank: int, steps: int) -> None:
    """A child stops and wakes this rank all the time; the others wait, and results stay right."""
    net: Any = wrap(Chain(), bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    parent, child = os.getpid(), os.fork()
    if child == 0:
        clock = random.Random(rank)
        while os.getppid() == parent:
            for sign in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(parent, sign)
                time.sleep(clock.uniform(0.0, 0.02))
        os._exit(0)
    try:
        for step in range(steps):
            optimizer.zero_grad()
            _step(net, rank, step)
            optimizer.step()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert_replicas_equal([p.detach() for p in net.parameters()])


@pytest.mark.parametrize("way", ("shm-c", "shm-python"))
def test_ranks_that_stop_and_wake_stay_equal(way: str) -> None:
    need(way)
    run_ranks(3, train_while_ranks_stop, 40, env=WAYS[way])
