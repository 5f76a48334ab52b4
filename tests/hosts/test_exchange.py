"""Ranks on several hosts: the same sums everywhere, through memory inside and a group between."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from closeranks.exchange.hosts import HostsExchange
from tests.hosts.places import TWO_BY_TWO, hosts, run_on
from tests.process.exchange_cases import CASES, Notes
from tests.process.exchange_ways import exchange_here, need
from tests.process.faults import fail_at
from tests.process.noticed import noticed
from tests.process.reference import Chain, assert_replicas_equal, rows, train_and_compare, wrap


def _run_all(rank: int, world: int) -> tuple[str, list[str], dict[str, str]]:
    exchange = exchange_here()
    assert isinstance(exchange, HostsExchange)
    findings, digests = [], {}
    for case in CASES:
        notes = Notes()
        case(exchange, world, notes, "hosts")
        findings += [f"{case.__name__}: {finding}" for finding in notes.findings[:5]]
        digests |= {f"{case.__name__}, {name}": d for name, d in notes.digests.items()}
    exchange.close()
    return exchange.way, findings, digests


@pytest.mark.parametrize(
    ("host_of", "kernels", "way"),
    (
        (TWO_BY_TWO, "c", "hosts: 2 x 2 ranks, shm inside, gloo between, float32"),
        ((0, 1, 1, 0, 1), "python", "hosts: 2 + 3 ranks, shm inside, gloo between, float32"),
        ((0, 1), "python", "hosts: 2 x 1 rank, gloo between, float32"),
    ),
    ids=("two by two", "interleaved and uneven", "one rank each"),
)
def test_an_exchange_keeps_what_all_promise(
    host_of: tuple[int, ...], kernels: str, way: str
) -> None:
    need(f"shm-{kernels}")
    world = len(host_of)
    env = {"CLOSERANKS_KERNELS": kernels}
    with hosts(2) as network:
        outcomes = run_on(network, host_of, _run_all, world, env=env, deadline_s=120.0)
    first = outcomes[0][2]
    assert any("resident" in name for name in first)
    for rank, (used, findings, digests) in enumerate(outcomes):
        assert used == way
        assert not findings, f"rank {rank}: {findings}"
        assert digests.keys() == first.keys()
        differing = [name for name in first if digests[name] != first[name]]
        assert not differing, f"rank {rank} and rank 0 differ in {differing[:5]}"


def _step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step)).square().mean().backward()


def _train(rank: int, world: int) -> str:
    """Several buckets, one of which is used through `no_sync` as well."""
    net = wrap(Chain(), bucket_cap_mb=0.0001)
    train_and_compare(Chain, rank, world, _step, steps=5, net=net)
    with net.no_sync():
        _step(net, rank, 7)
    _step(net, rank, 8)
    assert_replicas_equal([p.grad for p in net.parameters()])
    return net.exchange


def test_training_gives_what_one_process_would() -> None:
    with hosts(2) as network:
        ways = run_on(network, (1, 0, 0, 1), _train, 4)
        assert set(ways) == {"hosts: 2 x 2 ranks, shm inside, gloo between, float32"}


def _without_memory(rank: int, point: str, who: int) -> tuple[str, int]:
    with noticed() as said:
        if rank == who:
            fail_at(point, lambda: OSError(28, "No space left on device"))
        net: Any = wrap(Chain(), bucket_cap_mb=0.0001)
        train_and_compare(Chain, rank, 4, _step, steps=3, net=net)
    return net.exchange, len(said)


@pytest.mark.parametrize("point", ("make page", "allocate"))
def test_where_one_rank_has_no_memory_all_do_without(point: str) -> None:
    with hosts(2) as network:
        outcomes = run_on(network, TWO_BY_TWO, _without_memory, point, 2)
    inside = "shm inside, " if point == "allocate" else ""
    assert {way for way, _ in outcomes} == {f"hosts: 2 x 2 ranks, {inside}gloo between, float32"}
    assert sum(said for _, said in outcomes) == 1


class _Ahead:
    """Carries sums between hosts, and lands none before the next one, if any, has arrived.

    So do wire formats with two collectives: the second of one goes with the first of the next.
    """

    format, transport, wire_state = "float32", "gloo", None

    def __init__(self, between: Any) -> None:
        self._between = between
        self._started: list[Any] = []

    def all_reduce(self, tensor: torch.Tensor, scale: float, layout: Any) -> Any:
        self._started.append(self._between.all_reduce(tensor, scale, layout))
        return _Landing(self._started, len(self._started))

    def close(self) -> None:
        self._between.close()


class _Landing:
    def __init__(self, started: list[Any], count: int) -> None:
        self._started, self._count = started, count

    def wait(self) -> None:
        for work in self._started[: self._count + 1]:
            work.wait()


def _start_ahead(rank: int) -> None:
    exchange = exchange_here()
    assert isinstance(exchange, HostsExchange)
    exchange.between = _Ahead(exchange.between)
    tensors = exchange.allocate([5000] * 4, torch.float32, torch.device("cpu"))
    pending = []
    for number, tensor in enumerate(tensors):
        if number and rank in (0, 3):
            time.sleep(0.2)  # so that the other rank of the host waits for it elsewhere
        pending.append(exchange.all_reduce(tensor.fill_(rank + number)))
    for number, tensor in enumerate(tensors):
        pending[number].wait()
        assert torch.equal(tensor, torch.full((5000,), 6.0 + 4 * number))


def test_who_waits_for_a_landing_lets_the_next_one_set_off() -> None:
    with hosts(2) as network:
        run_on(network, TWO_BY_TWO, _start_ahead, deadline_s=20.0, group_timeout_s=10.0)


def _of_a_subgroup(rank: int) -> list[str]:
    """Groups of some ranks choose for themselves, and do not mind each other."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 1, 3], [0, 1, 2, 3])]
    ways = []
    for group in groups:
        if dist.get_rank(group) < 0:
            continue
        exchange = exchange_here(group)
        for number in range(3):
            tensor = exchange.allocate([1000], torch.float32, torch.device("cpu"))[0]
            tensor.fill_(dist.get_rank(group) + number)
            exchange.all_reduce(tensor).wait()
            size = exchange.size
            assert torch.equal(tensor, torch.full((1000,), size * (size - 1) / 2 + size * number))
        ways.append(exchange.way.split(",")[0])
    return ways


def test_groups_of_some_ranks() -> None:
    with hosts(2) as network:
        ways = run_on(network, TWO_BY_TWO, _of_a_subgroup)
    one, two, three, four = (
        "shm: 2 ranks on one host",
        "hosts: 2 x 1 rank",
        "hosts: 2 + 1 ranks",
        "hosts: 2 x 2 ranks",
    )
    assert ways == [[one, three, four], [one, two, three, four], [two, four], [three, four]]
