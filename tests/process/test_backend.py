"""The collectives of a "closeranks" group, beside those of a gloo group with the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.backend.group import CloseranksGroup
from closeranks.exchange.passage import Passage
from tests.process.batch import Batch

SIZES = (0, 1, 63, 64, 65, 4099)
LONG = 1_000_003  # several pieces, the last one short
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
NOT_FOR_FLOATS, NOT_FOR_INTEGERS = ("BAND", "BOR", "BXOR"), ("AVG",)
OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")

BATCHES = {
    (world, kernels): Batch(backend="closeranks", env={"CLOSERANKS_KERNELS": kernels})
    for world in (2, 3, 5)
    for kernels in ("c", "python")
}


def scenario(fn: Callable[[int, int], None]) -> Callable[[int, int], None]:
    for batch in BATCHES.values():
        batch.add(fn)
    return fn


def gloo() -> Any:
    """A gloo group beside ours, made once."""
    global _gloo
    if _gloo is None:
        _gloo = dist.new_group(backend="gloo")
    return _gloo


_gloo: Any = None


def numbers(size: int, dtype: torch.dtype, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * size + rank)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-4 if dtype.is_signed else 0, 5, (size,), generator=generator).to(dtype)


def assert_like(ours: Tensor, theirs: Tensor, world: int) -> None:
    """As gloo's, to the bit at two ranks but for types that gloo rounds more often."""
    if ours.dtype in (torch.float16, torch.bfloat16):
        coarse = 4e-2 if ours.dtype is torch.bfloat16 else 4e-3
        torch.testing.assert_close(ours, theirs, rtol=coarse, atol=coarse)
    elif world == 2 or not ours.dtype.is_floating_point:
        assert torch.equal(ours, theirs), (ours.dtype, ours, theirs)
    else:
        torch.testing.assert_close(ours, theirs)


def assert_same_everywhere(tensor: Tensor, world: int) -> None:
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    copies = [torch.empty_like(raw) for _ in range(world)]
    dist.all_gather(copies, raw, group=gloo())
    assert all(torch.equal(copy, raw) for copy in copies), "the ranks hold different bits"


@scenario
def memory_is_used(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert isinstance(group, CloseranksGroup)
    assert group.way.startswith(f"shm: {world} ranks on one host")
    assert dist.get_backend() == "closeranks"
    seen = []
    run = Passage._pass
    Passage._pass = lambda self, what, *rest: (seen.append(what.kind), run(self, what, *rest))[1]
    try:
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(3), 0)
        dist.barrier()
        dist.all_gather([torch.ones(3) for _ in range(world)], torch.ones(3))
        dist.all_gather_single(torch.ones(3 * world), torch.ones(3))
        dist.reduce_scatter(torch.ones(3), [torch.ones(3) for _ in range(world)])
        dist.reduce_scatter_single(torch.ones(3), torch.ones(3 * world))
    finally:
        Passage._pass = run
    gathers, scatters = ["all_gather"] * 2, ["reduce_scatter"] * 2
    assert seen == ["all_reduce", "broadcast", "barrier", *gathers, *scatters]


@scenario
def all_reduce_of_every_type_and_operation(rank: int, world: int) -> None:
    for dtype in (*FLOATS, *INTEGERS):
        for name in OPERATIONS:
            bitwise = name in ("BAND", "BOR", "BXOR")
            if (dtype.is_floating_point and bitwise) or (
                not dtype.is_floating_point and name == "AVG"
            ):
                continue
            operation = getattr(dist.ReduceOp, name)
            ours = numbers(65, dtype, rank)
            theirs = ours.clone()
            dist.all_reduce(ours, operation)
            dist.all_reduce(theirs, operation, group=gloo())
            assert_like(ours, theirs, world)
            assert_same_everywhere(ours, world)


@scenario
def all_reduce_of_every_size(rank: int, world: int) -> None:
    for size in (*SIZES, LONG):
        ours = numbers(size, torch.float32, rank)
        theirs = ours.clone()
        dist.all_reduce(ours)
        dist.all_reduce(theirs, group=gloo())
        assert_like(ours, theirs, world)
    assert_same_everywhere(ours, world)


@scenario
def truth_values(rank: int, world: int) -> None:
    for name, expected in (("SUM", True), ("MAX", True), ("MIN", False), ("PRODUCT", False)):
        tensor = torch.tensor([rank == 0, True, False])
        dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
        assert tensor.tolist() == [expected, True, False]
        assert set(tensor.view(torch.uint8).tolist()) <= {0, 1}


@scenario
def not_a_number_and_infinity(rank: int, world: int) -> None:
    nan, inf = float("nan"), float("inf")
    for dtype in FLOATS:
        tensor = torch.tensor([nan if rank == 0 else 1.0, inf, inf if rank else -inf], dtype=dtype)
        dist.all_reduce(tensor)
        assert torch.isnan(tensor[0]) and tensor[1] == inf and torch.isnan(tensor[2])


@scenario
def tensors_with_gaps_and_turns(rank: int, world: int) -> None:
    """gloo would take the first elements of the memory, gaps included, so it gets a copy."""
    for cut in (
        lambda whole: whole.view(20, 30).t(),
        lambda whole: whole.view(20, 30)[:, 3],
        lambda whole: whole.view(20, 30)[::2, ::3],
        lambda whole: whole.view(2, 10, 10, 3).permute(0, 3, 1, 2),  # channels last
    ):
        whole = numbers(600, torch.float32, rank)
        untouched, part = whole.clone(), cut(whole)
        expected = part.contiguous()
        dist.all_reduce(expected, group=gloo())
        dist.all_reduce(part)
        assert_like(part, expected, world)
        cut(untouched).copy_(part)
        assert torch.equal(whole, untouched), "what lies between was changed"
        dist.broadcast(part, world - 1)
        assert_same_everywhere(part, world)


@scenario
def layouts_that_differ_between_ranks(rank: int, world: int) -> None:
    tensor = torch.arange(12.0).view(3, 4)
    tensor = tensor.t().contiguous().t() if rank == 0 else tensor.clone()
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.arange(12.0).view(3, 4) * world)


@scenario
def broadcast(rank: int, world: int) -> None:
    for source in range(world):
        for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.int16, torch.complex64):
            for size in (0, 1, 65):
                tensor = numbers(size, torch.float32, rank).to(dtype)
                dist.broadcast(tensor, source)
                assert torch.equal(tensor, numbers(size, torch.float32, source).to(dtype))
    tensor = numbers(LONG, torch.float32, rank)
    dist.broadcast(tensor, world - 1)
    assert torch.equal(tensor, numbers(LONG, torch.float32, world - 1))


@scenario
def all_gather(rank: int, world: int) -> None:
    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64):
        for size in (0, 1, 65):
            own = numbers(size, torch.float32, rank).to(dtype)
            everyones = [torch.empty_like(own) for _ in range(world)]
            dist.all_gather(everyones, own)
            whole = own.new_empty(size * world)
            dist.all_gather_single(whole, own)
            for other, tensor in enumerate(everyones):
                assert torch.equal(tensor, numbers(size, torch.float32, other).to(dtype))
            assert torch.equal(whole, torch.cat(everyones))
    own = numbers(LONG, torch.float32, rank)
    whole = own.new_empty(world, LONG)
    dist.all_gather_single(whole, own)
    for other in range(world):
        assert torch.equal(whole[other], numbers(LONG, torch.float32, other))
    in_place = torch.zeros(world, 7)
    in_place[rank] = rank
    dist.all_gather_single(in_place, in_place[rank])
    assert torch.equal(in_place, torch.arange(float(world)).unsqueeze(1).expand(world, 7))


@scenario
def all_gather_of_uneven_sizes(rank: int, world: int) -> None:
    everyones = [torch.zeros(300_000 * other, dtype=torch.int64) for other in range(world)]
    dist.all_gather(everyones, torch.full((300_000 * rank,), rank))
    assert all(torch.equal(t, torch.full_like(t, other)) for other, t in enumerate(everyones))


@scenario
def reduce_scatter(rank: int, world: int) -> None:
    for dtype in (*FLOATS, *INTEGERS):
        for size in (0, 1, 65):
            parts = [numbers(size, dtype, world * rank + other) for other in range(world)]
            ours, theirs = torch.empty_like(parts[0]), torch.empty_like(parts[0])
            dist.reduce_scatter(ours, [part.clone() for part in parts])
            dist.reduce_scatter(theirs, [part.clone() for part in parts], group=gloo())
            assert_like(ours, theirs, world)
            whole = torch.cat(parts)
            dist.reduce_scatter_single(theirs, whole)
            assert torch.equal(ours, theirs)
    ours, theirs = torch.empty(LONG), torch.empty(LONG)
    whole = numbers(LONG * world, torch.float32, rank)
    dist.reduce_scatter_single(ours, whole.clone(), dist.ReduceOp.AVG)
    dist.reduce_scatter_single(theirs, whole, dist.ReduceOp.AVG, group=gloo())
    assert_like(ours, theirs, world)


@scenario
def reduce_scatter_of_uneven_sizes(rank: int, world: int) -> None:
    parts = [torch.full((100_000 * other,), float(rank)) for other in range(world)]
    result = torch.empty(100_000 * rank)
    dist.reduce_scatter(result, parts)
    assert torch.equal(result, torch.full_like(result, sum(range(world))))


@scenario
def several_tensors_at_once(rank: int, world: int) -> None:
    tensors = [torch.full((n,), float(rank)) for n in (3, 0, 70)]
    dist.all_reduce_coalesced(tensors)
    assert all(torch.equal(t, torch.full_like(t, sum(range(world)))) for t in tensors)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(tensors[0])
        dist.all_reduce(tensors[2])
    manager.wait()
    assert tensors[2][0] == world * sum(range(world))
    outputs = [torch.empty(2 * world), torch.empty(5 * world)]
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_gather_single(outputs[0], torch.full((2,), float(rank)))
        dist.all_gather_single(outputs[1], torch.full((5,), float(rank)))
    manager.wait()
    assert outputs[1][-1] == world - 1 and outputs[0][0] == 0
    results = [torch.empty(2), torch.empty(5)]
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.reduce_scatter_single(results[0], torch.ones(2 * world))
        dist.reduce_scatter_single(results[1], torch.ones(5 * world))
    manager.wait()
    assert results[0][0] == results[1][4] == world


@scenario
def the_rest_goes_to_gloo(rank: int, world: int) -> None:
    after, before = (rank + 1) % world, (rank - 1) % world
    received = torch.zeros(3)
    works = [dist.isend(torch.full((3,), float(rank)), after), dist.irecv(received, before)]
    for work in works:
        work.wait()
    assert received[0] == before
    gathered = [torch.zeros(2) for _ in range(world)] if rank == 0 else None
    dist.gather(torch.full((2,), float(rank)), gathered)
    assert rank != 0 or [t[0].item() for t in gathered] == list(range(world))
    part = torch.zeros(2)
    parts = [torch.full((2,), float(other)) for other in range(world)] if rank == 0 else None
    dist.scatter(part, parts)
    assert part[0] == rank
    out = torch.empty(world)
    dist.all_to_all_single(out, torch.full((world,), float(rank)))
    assert out.tolist() == list(range(world))
    total = torch.ones(2)
    dist.reduce(total, 0)
    assert rank != 0 or total[0] == world
    sparse = torch.eye(3).to_sparse()
    dist.all_reduce(sparse)
    assert torch.equal(sparse.to_dense(), torch.eye(3) * world)
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects[world - 1] == {"rank": world - 1}
    told = [rank]
    dist.broadcast_object_list(told, src=world - 1)
    assert told == [world - 1]
    dist.group.WORLD.monitored_barrier()


@scenario
def what_gloo_refuses_is_refused(rank: int, world: int) -> None:
    for call in (
        lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND),
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.int16)),
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.int32), dist.ReduceOp.AVG),
        lambda: dist.all_gather_single(torch.ones(3 * world + 1), torch.ones(3)),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            call()
    dist.all_reduce(torch.ones(3))  # and the group goes on


@scenario
def parameters_and_subclasses(rank: int, world: int) -> None:
    class Named(Tensor):
        pass

    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    version = parameter._version
    dist.broadcast(parameter, 1)
    assert parameter.tolist() == [1.0] * 3 and parameter._version == version
    named = torch.full((3,), float(rank)).as_subclass(Named)
    dist.all_reduce(named)
    assert named.tolist() == [float(sum(range(world)))] * 3
    with torch.inference_mode():
        inference = torch.ones(3)
    dist.all_reduce(inference)
    work = dist.all_reduce(inference, async_op=True)
    work.wait()
    assert inference.tolist() == [float(world**2)] * 3


@scenario
def names_of_the_group_object(rank: int, world: int) -> None:
    """The methods as they are called without torch.distributed in between."""
    group = dist.group.WORLD
    tensor = torch.ones(2)
    group.allreduce(tensor).wait()
    group.allreduce([tensor], dist.ReduceOp.MAX).wait()
    assert tensor[0] == world
    group.broadcast(tensor, 0).wait()
    group.barrier().wait()
    group.allgather([torch.zeros(2) for _ in range(world)], tensor).wait()
    result = torch.zeros(2)
    group.reduce_scatter(result, [torch.ones(2) for _ in range(world)]).wait()
    assert result[0] == world
    assert group.rank() == rank and group.size() == world


@pytest.mark.parametrize("name", BATCHES[2, "c"].names())
@pytest.mark.parametrize("kernels", ["c", "python"])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_collectives(world: int, kernels: str, name: str) -> None:
    BATCHES[world, kernels].check(name, world)
