"""One suite for every exchange: through shared memory with either kernels, and by the group.

The cases are in exchange_cases. All of them run in one start of ranks, because a start costs more
than they do.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from closeranks.exchange.shm import ShmExchange
from closeranks.segment.page import ARRIVED, DONE, wrapped
from tests.process.exchange_cases import CASES, Notes
from tests.process.exchange_ways import WAYS, exchange_here, need
from tests.ranks import run_ranks


def _run_all(rank: int, world: int, way: str) -> tuple[str, dict[str, tuple[list[str], dict]]]:
    exchange = exchange_here()
    reports = {}
    for case in CASES:
        notes = Notes()
        case(exchange, world, notes, way)
        reports[case.__name__] = (notes.findings, notes.digests)
    exchange.close()
    return exchange.way, reports


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", (1, 2, 3, 4, 5, 8))
def test_an_exchange_keeps_what_all_promise(way: str, world: int) -> None:
    need(way)
    if world == 1 and way != "group":
        pytest.skip("one rank shares memory with nobody")
    outcomes = run_ranks(world, _run_all, world, way, env=WAYS[way], deadline_s=150.0)
    ways = {outcome[0] for outcome in outcomes}
    wanted = {"shm-c": "C kernels", "shm-python": "pure Python", "group": "gloo"}[way]
    assert len(ways) == 1 and wanted in ways.pop(), ways
    wrong = []
    for case in CASES:
        reports = [outcome[1][case.__name__] for outcome in outcomes]
        for rank, (findings, digests) in enumerate(reports):
            wrong += [f"rank {rank}, {case.__name__}: {finding}" for finding in findings[:5]]
            first = reports[0][1]
            assert digests.keys() == first.keys()
            differing = [name for name, digest in digests.items() if digest != first[name]]
            wrong += [f"rank {rank} and rank 0 differ in {name}" for name in differing[:5]]
    assert not wrong, "\n".join(wrong)


def _across_the_end_of_words(rank: int, world: int) -> None:
    """Ticks that begin shortly before 2^32, and go on behind it."""
    exchange = exchange_here()
    assert isinstance(exchange, ShmExchange)
    exchange._tick = (1 << 32) - 60
    words = exchange.team.pages[rank].words
    words[ARRIVED // 4] = words[DONE // 4] = wrapped(exchange._tick)
    dist.barrier()
    resident = exchange.allocate([5000], torch.float32, torch.device("cpu"))[0]
    for number in range(60):
        resident.fill_(rank + number)
        staged = torch.full((300_000,), float(rank))  # in two pieces
        pending = [exchange.all_reduce(resident), exchange.all_reduce(staged)]
        for one in pending if rank % 2 else reversed(pending):
            one.wait()
        total = world * (world - 1) / 2
        assert torch.equal(resident, torch.full((5000,), total + number * world))
        assert torch.equal(staged, torch.full((300_000,), total))
    assert exchange._tick > 1 << 32


@pytest.mark.parametrize("way", ("shm-c", "shm-python"))
def test_ticks_pass_the_end_of_words(way: str) -> None:
    need(way)
    run_ranks(3, _across_the_end_of_words, 3, env=WAYS[way])


def _all_but_one_start_early(rank: int) -> None:
    """Starting collectives waits for nobody: rank 1 comes when all others have started theirs."""
    exchange = exchange_here()
    resident = exchange.allocate([1000], torch.float32, torch.device("cpu"))[0]
    for _ in range(2):  # the first use of a resident tensor, and the usual one
        resident.fill_(1.0)
        tensors = [torch.ones(3_000_000), resident, torch.ones(10), torch.ones(700_000)]
        if rank == 1:
            dist.barrier()
        pending = [exchange.all_reduce(tensor) for tensor in tensors]
        pending += [exchange.all_max(torch.ones(5)), exchange.broadcast(torch.ones(900_000), 2)]
        if rank != 1:
            dist.barrier()
        for one in reversed(pending):
            one.wait()
        assert all(torch.equal(tensor, torch.full_like(tensor, 3.0)) for tensor in tensors)


@pytest.mark.parametrize("way", ("shm-c", "shm-python"))
def test_starting_a_collective_waits_for_nobody(way: str) -> None:
    need(way)
    run_ranks(3, _all_but_one_start_early, env=WAYS[way])


def _forget(rank: int) -> None:
    """The exchange keeps no tensor alive once it is over."""
    exchange = exchange_here()
    tensor = torch.ones(800_000)
    exchange.all_reduce(tensor).wait()
    watched = weakref.ref(tensor.untyped_storage())
    storage = tensor.untyped_storage()._cdata
    del tensor
    gc.collect()
    alive = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
    assert all(t.untyped_storage()._cdata != storage for t in alive)
    assert watched() is None


def test_no_tensor_is_kept_alive() -> None:
    run_ranks(2, _forget, env={"CLOSERANKS_EXCHANGE": "shm"})
