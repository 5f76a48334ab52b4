"""When collectives of a "closeranks" group are done, whoever waits, for what, in which order."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.futures import Future

from tests.process.batch import WORLDS, Batch
from tests.ranks import run_ranks

batch = Batch(backend="closeranks")


@batch.add
def waits_in_another_order(rank: int, world: int) -> None:
    groups = [dist.new_group() for _ in range(2)]
    for _ in range(20):
        tensors = [torch.ones(1000), torch.ones(400_000)]
        works = [
            dist.all_reduce(t, group=g, async_op=True) for t, g in zip(tensors, groups, strict=True)
        ]
        for work in works if rank else reversed(works):
            work.wait()
        assert all(t[0] == t[-1] == world for t in tensors)


@batch.add
def starts_in_another_order_in_two_groups(rank: int, world: int) -> None:
    groups = [dist.new_group() for _ in range(2)]
    for _ in range(20):
        tensors = [torch.ones(1000), torch.ones(400_000)]
        pairs = list(zip(tensors, groups, strict=True))
        works = [
            dist.all_reduce(t, group=g, async_op=True)
            for t, g in (pairs if rank else reversed(pairs))
        ]
        works[0].wait()
        works[1].wait()
        assert all(t[0] == t[-1] == world for t in tensors)


@batch.add
def somebody_is_in_gloo_in_between(rank: int, world: int) -> None:
    """Rank 0 waits in gloo for ranks that wait for its share of the sum."""
    gloo = dist.new_group(backend="gloo")
    tensor = torch.full((600_000,), 1.0)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        dist.barrier(group=gloo)
        work.wait()
    else:
        dist.all_reduce(tensor)
        dist.barrier(group=gloo)
    assert tensor[0] == tensor[-1] == world


@batch.add
def one_group_keeps_the_order_of_calls(rank: int, world: int) -> None:
    tensor = torch.ones(50_000)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(5)]
    dist.all_reduce(tensor)  # this one waits, after five that do not
    assert tensor[0] == world**6
    assert all(work.is_completed() and work.is_success() for work in works)
    works[0].wait()
    assert works[0].exception() is None


@batch.add
def what_comes_before_is_seen_by_what_comes_after(rank: int, world: int) -> None:
    """Also if it has to be copied: the copy is made in its turn."""
    matrix = torch.ones(300, 400)
    first = dist.all_reduce(matrix, async_op=True)
    second = dist.all_reduce(matrix.t(), async_op=True)
    second.wait()
    first.wait()
    assert matrix.eq(world**2).all()


@batch.add
def futures(rank: int, world: int) -> None:
    tensor = torch.ones(100_000)
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    assert future is work.get_future() and isinstance(future, torch._C.Future)
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert doubled.wait()[0] == 2 * world
    assert future.wait()[0].data_ptr() == tensor.data_ptr()
    late = dist.all_reduce(tensor, async_op=True)
    late.wait()
    assert late.get_future().wait()[0][0] == world**2
    rows = [torch.zeros(3) for _ in range(world)]
    gathered = dist.all_gather(rows, torch.ones(3), async_op=True).get_future().wait()
    assert gathered[0][world - 1].tolist() == [1.0] * 3
    dist.barrier(async_op=True).get_future().wait()


@batch.add
def nobody_waits(rank: int, world: int) -> None:
    tensors = [torch.ones(10) for _ in range(50)]
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    dist.barrier()
    assert all(tensor[0] == world for tensor in tensors)


@batch.add
def several_threads(rank: int, world: int) -> None:
    """Each thread has a group of its own, as c10d asks for."""
    groups = [dist.new_group() for _ in range(3)]
    results = [torch.ones(100_000) for _ in groups]

    def work(number: int) -> None:
        for _ in range(10):
            dist.all_reduce(results[number], dist.ReduceOp.MAX, group=groups[number])
            dist.barrier(group=groups[number])
        dist.all_reduce(results[number], group=groups[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(result[-1] == world for result in results)


@batch.add
def functional_collectives(rank: int, world: int) -> None:
    group = dist.group.WORLD
    summed = functional.all_reduce(torch.ones(5), "sum", group)
    assert (summed + 1).tolist() == [world + 1.0] * 5
    gathered = functional.all_gather_tensor(torch.full((2,), float(rank)), 0, group)
    assert (gathered * 1).tolist() == [float(r) for r in range(world) for _ in range(2)]
    part = functional.reduce_scatter_tensor(torch.ones(2 * world), "sum", 0, group)
    assert (part * 1).tolist() == [world] * 2
    several = functional.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "sum", group)
    assert (several[1] * 1).tolist() == [world] * 3
    assert (functional.broadcast(torch.full((2,), float(rank)), 1, group) * 1).tolist() == [1.0] * 2
    swapped = functional.all_to_all_single(torch.full((world,), float(rank)), None, None, group)
    assert (swapped * 1).tolist() == [float(r) for r in range(world)]


@batch.add
def a_callback_that_waits_for_another_collective(rank: int, world: int) -> None:
    """Callbacks run where the collective ends, which may be the only thread that begins others."""
    first = torch.full((300_000,), float(rank))

    def then(future: Future[Any]) -> Tensor:
        second: Tensor = future.value()[0][:5].clone()
        dist.all_reduce(second, async_op=True).get_future().wait()
        return second

    chained = dist.all_reduce(first, async_op=True).get_future().then(then)
    chained.wait()
    assert chained.value().tolist() == [world * world * (world - 1) / 2] * 5


@batch.add
def groups_of_some_ranks(rank: int, world: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([world - 1, 0])]
    alone = dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(torch.ones(3), group=alone)
    for pair, members in zip(pairs, ([0, 1], [0, world - 1]), strict=True):
        if rank in members:
            tensor = torch.full((3,), float(rank))
            dist.all_reduce(tensor, group=pair)
            assert tensor[0] == sum(members)
            dist.broadcast(tensor, members[-1], group=pair)
    for pair in pairs:
        if rank in dist.get_process_group_ranks(pair):
            dist.destroy_process_group(pair)


@pytest.mark.parametrize("name", batch.names())
@pytest.mark.parametrize("world", WORLDS)
def test_order(name: str, world: int) -> None:
    batch.check(name, world)


def _impatient(rank: int) -> str:
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        with pytest.raises(RuntimeError, match=r"not there within 0\.2 s"):
            work.wait(timedelta(seconds=0.2))
        assert not work.is_completed()
        dist.distributed_c10d._get_default_store().set("go", "1")
        assert work.wait()
    else:
        dist.distributed_c10d._get_default_store().wait(["go"])
        dist.all_reduce(torch.ones(3))
    return "done"


def test_an_impatient_wait_leaves_the_collective_alone() -> None:
    assert run_ranks(2, _impatient, backend="closeranks") == ["done"] * 2
