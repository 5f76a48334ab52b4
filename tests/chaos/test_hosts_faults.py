"""Ranks, hosts and links that fail at moments of chance, on three hosts: survivors say which."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from closeranks.errors import PeerLost
from tests.hosts.network import Network
from tests.hosts.places import hosts, try_on
from tests.hosts.test_faults import Seen, when_noted
from tests.process.faults import note_now
from tests.process.reference import assert_replicas_equal, wrap

_HOST_OF = (0, 1, 2, 0, 1, 2, 2)
_HOW = ("kill a rank", "kill a host", "unplug", "take down")
_WITHIN_S = 8.0


def _train(rank: int, folder: str) -> Seen:
    torch.manual_seed(0)
    layers = [nn.Linear(200, 200) for _ in range(6)]
    net = wrap(nn.Sequential(*layers), bucket_cap_mb=0.2)
    data = torch.ones(2, 200)
    for step in range(100_000):
        if step == 5:
            note_now(Path(folder) / f"note {rank}")
        try:
            net(data).sum().backward()
        except PeerLost as error:
            return Seen(type(error).__name__, str(error), error.rank, error.host, time.monotonic())
    raise AssertionError("nothing failed")


def _strike(network: Network, how: str, host: int, folder: Path, clock: random.Random) -> None:
    for rank in range(len(_HOST_OF)):
        while not (folder / f"note {rank}").exists():
            time.sleep(0.005)
    time.sleep(clock.uniform(0.0, 0.5))
    if how == "unplug":
        network.unplug(host)
    elif how == "take down":
        network.take_down(host)
    else:
        victims = network.processes_of(host)
        for pid in victims[: 1 if how == "kill a rank" else None]:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("seed", range(12))
def test_every_survivor_names_the_host_that_failed(seed: int, tmp_path: Path) -> None:
    clock = random.Random(seed)
    how, host = _HOW[seed % len(_HOW)], clock.randrange(3)
    with hosts(3) as network:

        def act() -> None:
            _strike(network, how, host, tmp_path, clock)

        with when_noted(tmp_path / "note 0", act) as at_s:
            outcomes = try_on(network, _HOST_OF, _train, str(tmp_path), deadline_s=90.0)
    for outcome in outcomes:
        is_there = _HOST_OF[outcome.rank] == host
        if is_there and outcome.exitcode == -signal.SIGKILL:
            continue
        assert not outcome.failed, f"{how} {host}: {outcome.trace}"
        seen: Seen = outcome.value
        assert seen.at_s - at_s[0] < _WITHIN_S, (how, host, outcome.rank, seen)
        if not (is_there and how in ("unplug", "take down")):
            assert network.address(host) in seen.text, (how, host, outcome.rank, seen)


def _long_life(rank: int, world: int) -> list[int]:
    """Many buckets, many steps, with ranks that are late by turns; replicas stay equal."""
    torch.manual_seed(0)
    net: Any = wrap(nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    clock = random.Random(rank)
    for step in range(300):
        if clock.random() < 0.02:
            time.sleep(clock.uniform(0.0, 0.2))
        generator = torch.Generator().manual_seed(step * world + rank)
        net(torch.randn(4, 64, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_replicas_equal([p.detach() for p in net.parameters()])
    links = len(os.listdir("/proc/self/fd"))
    dist.barrier()
    return [links]


def test_a_long_life_over_three_uneven_hosts() -> None:
    with hosts(3, mbit=200) as network:
        world = len(_HOST_OF)
        outcomes = try_on(network, _HOST_OF, _long_life, world, deadline_s=150.0)
    for outcome in outcomes:
        assert not outcome.failed, outcome.trace
