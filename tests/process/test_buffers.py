"""Buffers: rank 0's are everybody's before a forward, unless told otherwise or by a hook."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

from tests.process.batch import WORLDS, Batch
from tests.process.noticed import noticed
from tests.process.reference import Chain, assert_replicas_equal, no_sync, rows, wrap

batch = Batch()


class Counting(Chain):
    """Its buffer grows in every forward by this rank's number plus one."""

    def __init__(self, rank: int, start: float = 0.0) -> None:
        super().__init__()
        self.rank = rank
        self.register_buffer("count", torch.tensor([start]))
        self.register_buffer("steps", torch.tensor([7 * rank]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(self.rank + 1)
        return super().forward(x)


def _forward(net: nn.Module, rank: int, step: int = 0) -> Tensor:
    return net(rows(rank, step)).square().mean()


def _count(net: Any) -> float:
    return net.module.count.item()


@batch.add
def those_of_rank_0_at_wrapping_and_at_every_forward(rank: int, world: int) -> None:
    net = wrap(Counting(rank, start=float(100 + rank)))
    assert _count(net) == 100 and net.module.steps.item() == 0
    for step in range(3):
        _forward(net, rank, step).backward()
        assert _count(net) == 100 + step + rank + 1


@batch.add
def also_in_eval_mode_and_without_grad(rank: int, world: int) -> None:
    net = wrap(Counting(rank))
    _forward(net, rank)
    net.eval()
    with torch.no_grad():
        _forward(net, rank)
    assert _count(net) == 1 + rank + 1


@batch.add
def left_alone_if_told_so(rank: int, world: int) -> None:
    net = wrap(Counting(rank), forward_sync_buffers=False)
    assert not net.broadcast_buffers
    for _ in range(3):
        _forward(net, rank).backward()
    assert _count(net) == 3 * (rank + 1)


@batch.add
def left_alone_if_told_so_by_the_old_name(rank: int, world: int) -> None:
    with noticed() as said:
        net = wrap(Counting(rank, start=float(rank)), broadcast_buffers=False)
    assert any("broadcast_buffers" in text for text in said), said
    assert _count(net) == rank, "the old name also excludes buffers from the first broadcast"
    _forward(net, rank).backward()
    assert _count(net) == 2 * rank + 1


@batch.add
def switched_by_the_property(rank: int, world: int) -> None:
    net = wrap(Counting(rank))
    net.broadcast_buffers = False
    for _ in range(2):
        _forward(net, rank).backward()
    assert _count(net) == 2 * (rank + 1)
    net.broadcast_buffers = True
    _forward(net, rank).backward()
    assert _count(net) == 2 + rank + 1


@batch.add
def not_after_a_forward_without_sync(rank: int, world: int) -> None:
    """torch's rule: the forward after one inside no_sync does not broadcast."""
    net = wrap(Counting(rank))
    with no_sync(net):
        _forward(net, rank).backward()
        _forward(net, rank).backward()
    _forward(net, rank).backward()
    assert _count(net) == 3 * (rank + 1)
    _forward(net, rank).backward()
    assert _count(net) == 3 + rank + 1


@batch.add
def reassigned_ones_are_followed(rank: int, world: int) -> None:
    net = wrap(Counting(rank))
    _forward(net, rank).backward()
    net.module.count = torch.tensor([50.0 + rank])
    _forward(net, rank).backward()
    assert _count(net) == 50 + rank + 1


@batch.add
def two_forwards_of_a_batch_norm_before_one_backward(rank: int, world: int) -> None:
    """As in a GAN: the broadcast of the second forward must not spoil the first one's graph."""
    torch.manual_seed(7)
    net = wrap(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))
    for step in range(2):
        (_forward(net, rank, step) + _forward(net, rank, step + 100)).backward()
    first = _forward(net, rank, 5)
    second = _forward(net, rank, 6)
    first.backward()
    second.backward()
    assert_replicas_equal([p.grad for p in net.parameters()])


@batch.add
def a_buffer_in_the_graph_keeps_its_version(rank: int, world: int) -> None:
    class Scaled(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((2,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    net = wrap(Scaled())
    (_forward(net, rank) + _forward(net, rank, 1)).backward()
    assert_replicas_equal([p.grad for p in net.parameters()])


@batch.add
def of_every_dtype_and_layout(rank: int, world: int) -> None:
    class Many(Chain):
        def __init__(self) -> None:
            super().__init__()
            kinds = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8)
            for index, dtype in enumerate((*kinds, torch.bool, torch.complex64)):
                self.register_buffer(f"b{index}", torch.full((2, 3), rank).to(dtype))
            self.register_buffer("empty", torch.zeros(0))
            self.register_buffer("scalar", torch.tensor(float(rank)))
            self.register_buffer("transposed", torch.full((3, 2), float(rank)).t())

    net = wrap(Many())
    with torch.no_grad():
        for buffer in net.module.buffers():
            buffer.copy_(torch.full(buffer.shape, rank).to(buffer.dtype))
    _forward(net, rank).backward()
    assert all((buffer == 0).all() for buffer in net.module.buffers())


def _mean_of_buffers(state: list[str], buffers: dict[str, Tensor]) -> Any:
    state.append("called")
    assert set(buffers) == {"count", "steps"}
    buffers["count"].div_(dist.get_world_size())
    dist.all_reduce(buffers["count"])


@batch.add
def a_hook_before_the_forward(rank: int, world: int) -> None:
    net = wrap(Counting(rank))
    calls: list[str] = []
    net._register_buffer_comm_hook(calls, _mean_of_buffers, _BufferCommHookLocation.PRE_FORWARD)
    mean = 0.0
    for step in range(3):
        _forward(net, rank, step).backward()
        assert _count(net) == pytest.approx(mean + rank + 1)
        mean += (world + 1) / 2
    assert len(calls) == 3


@batch.add
def a_hook_after_the_forward(rank: int, world: int) -> None:
    net = wrap(Counting(rank))
    calls: list[str] = []
    net._register_buffer_comm_hook(calls, _mean_of_buffers, _BufferCommHookLocation.POST_FORWARD)
    for step in range(3):
        _forward(net, rank, step).backward()
        assert _count(net) == pytest.approx((step + 1) * (world + 1) / 2)
    assert len(calls) == 3


@batch.add
def a_hook_whose_futures_end_with_the_backward(rank: int, world: int) -> None:
    def hook(state: Any, buffers: dict[str, Tensor]) -> list[Any]:
        work = dist.all_reduce(buffers["count"], async_op=True)
        return [work.get_future()]

    net = wrap(Counting(rank))
    net._register_buffer_comm_hook(None, hook)
    _forward(net, rank).backward()
    assert _count(net) == sum(range(1, world + 1))


@batch.add
def the_forward_decides_when_it_says_so(rank: int, world: int) -> None:
    net = wrap(Counting(rank))
    assert net.will_sync_module_buffers()
    with no_sync(net):
        _forward(net, rank).backward()
    assert not net.will_sync_module_buffers()
    assert not wrap(Chain()).will_sync_module_buffers(), "it has no buffers"


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_buffers(name: str, world: int) -> None:
    batch.check(name, world)
