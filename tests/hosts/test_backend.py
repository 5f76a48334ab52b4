"""A "closeranks" group over several hosts, beside a gloo group with the same tensors."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from closeranks.errors import PeerLost
from tests.hosts.places import TWO_BY_TWO, hosts, run_on, try_on
from tests.process.faults import happened_at_s, kill_at
from tests.process.reference import assert_replicas_equal
from tests.process.test_backend import (
    FLOATS,
    INTEGERS,
    NOT_FOR_FLOATS,
    NOT_FOR_INTEGERS,
    OPERATIONS,
    assert_like,
    numbers,
)

_SIZES = (0, 1, 130, 4099)
_LONG = 5_000_003  # three parts
_WORLD_LIKE = 3  # as gloo's, but for the order of sums


def _compare(rank: int, world: int) -> str:
    gloo: Any = dist.new_group(backend="gloo")
    for dtype in (*FLOATS, *INTEGERS):
        unwanted = NOT_FOR_FLOATS if dtype in FLOATS else NOT_FOR_INTEGERS
        for name in OPERATIONS:
            if name in unwanted:
                continue
            operation = getattr(dist.ReduceOp, name)
            for size in _SIZES:
                ours = numbers(size, dtype, rank)
                theirs = ours.clone()
                work = dist.all_reduce(ours, operation, async_op=size == 130)
                if work is not None:
                    work.wait()
                if name == "AVG":
                    dist.all_reduce(theirs, group=gloo)
                    theirs /= world
                else:
                    dist.all_reduce(theirs, operation, group=gloo)
                assert_like(ours, theirs, _WORLD_LIKE)
                assert_replicas_equal([ours], gloo)
    long = numbers(_LONG, torch.float32, rank)
    wanted = long.clone()
    dist.all_reduce(long)
    dist.all_reduce(wanted, group=gloo)
    assert_like(long, wanted, _WORLD_LIKE)
    assert_replicas_equal([long], gloo)
    _others(rank, world, gloo)
    return dist.distributed_c10d._get_default_group().way


def _others(rank: int, world: int, gloo: Any) -> None:
    """Reductions that are scattered, several at once, and what gloo does."""
    given = numbers(world * 700, torch.float32, rank)
    outputs = [torch.empty(700), torch.empty(700)]
    dist.reduce_scatter_single(outputs[0], given)
    dist.reduce_scatter(outputs[1], list(given.chunk(world)))
    wanted = given.clone()
    dist.all_reduce(wanted, group=gloo)
    for output in outputs:
        assert_like(output, wanted.chunk(world)[rank], _WORLD_LIKE)
    everyones = torch.empty(world * 5)
    dist.all_gather_single(everyones, torch.full((5,), float(rank)))
    assert everyones.tolist() == [float(r) for r in range(world) for _ in range(5)]
    told = torch.full((9,), float(rank))
    dist.broadcast(told, world - 1)
    assert told.tolist() == [float(world - 1)] * 9
    dist.barrier()


@pytest.mark.parametrize(
    ("host_of", "shape"), ((TWO_BY_TWO, "2 x 2 ranks"), ((1, 0, 0, 1, 0), "2 + 3 ranks"))
)
def test_collectives_are_as_gloo_has_them(host_of: tuple[int, ...], shape: str) -> None:
    with hosts(2) as network:
        ways = run_on(network, host_of, _compare, len(host_of), backend="closeranks")
    assert set(ways) == {f"hosts: {shape}, shm inside, gloo between"}


def _train(rank: int, as_view: bool) -> list[float]:
    torch.manual_seed(3)
    net = TorchDDP(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)),
        gradient_as_bucket_view=as_view,
        bucket_cap_mb=0.005,
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        net(torch.randn(8, 64, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_replicas_equal([p.detach() for p in net.parameters()])
    return torch.cat([p.detach().view(-1) for p in net.parameters()]).tolist()


def test_torchs_own_class_trains_over_it() -> None:
    with hosts(2) as network:
        ours = run_on(network, TWO_BY_TWO, _train, True, backend="closeranks")
        theirs = run_on(network, TWO_BY_TWO, _train, True)
    torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(theirs[0]))


def _lose(rank: int, folder: str) -> tuple[int | None, str]:
    note = Path(folder) / "note"
    dist.all_reduce(torch.ones(100))
    if rank == 2:
        kill_at("before crossing", note)
    try:
        for _ in range(3):
            dist.all_reduce(torch.ones(1000))
    except PeerLost as error:
        happened_at_s(note)
        return error.rank, str(error)
    raise AssertionError("nobody noticed")


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    with hosts(2) as network:
        outcomes = try_on(network, TWO_BY_TWO, _lose, str(tmp_path), backend="closeranks")
    assert outcomes[2].exitcode == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[1], outcomes[3]):
        assert not outcome.failed, outcome.trace
        rank, text = outcome.value
        assert rank == 2 and "10.77.0.2" in text, text
