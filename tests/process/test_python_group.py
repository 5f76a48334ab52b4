"""Process groups written in Python: with allreduce, broadcast and barrier they have all we need."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from tests.process.batch import WORLDS, Batch
from tests.process.reference import (
    Branches,
    Chain,
    no_sync,
    reference_grads,
    rows,
    train_and_compare,
    wrap,
)
from tests.ranks import run_ranks

batch = Batch()


class PythonWork(dist._Work):
    """Waits for the work of an inner group; its future is made when somebody asks for it."""

    def __init__(self, inner: Any, result: list[Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.result_ = result

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        self.inner.wait()
        return True

    def is_completed(self) -> bool:
        return bool(self.inner.is_completed())

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        self.inner.wait()
        future.set_result(self.result_)
        return future


class WaitOnlyWork(dist._Work):
    """The least that a Work can be."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        self.inner.wait()
        return True


class PythonGroup(dist.ProcessGroup):
    """Hands its three collectives to an inner gloo group, and counts them."""

    def __init__(self, rank: int, size: int, inner: Any, wait_only: bool = False) -> None:
        super().__init__(rank, size)
        self.inner = inner
        self.wait_only = wait_only
        self.calls: dict[str, int] = {}

    def _work(self, name: str, inner: Any, tensors: list[Tensor]) -> dist._Work:
        self.calls[name] = self.calls.get(name, 0) + 1
        return WaitOnlyWork(inner) if self.wait_only else PythonWork(inner, tensors)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist._Work:
        opts = dist.AllreduceOptions() if opts is None else opts
        return self._work("allreduce", self.inner.allreduce(tensors, opts), tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist._Work:
        opts = dist.BroadcastOptions() if opts is None else opts
        return self._work("broadcast", self.inner.broadcast(tensors, opts), tensors)

    def barrier(self, opts: Any = None) -> dist._Work:
        return self._work("barrier", self.inner.barrier(), [])

    def getBackendName(self) -> str:
        return "python"

    def getSize(self) -> int:
        return int(self.size())


def _group(rank: int, world: int, wait_only: bool = False) -> PythonGroup:
    return PythonGroup(rank, world, dist.group.WORLD, wait_only)


def _step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step)).square().mean().backward()


@batch.add
def given_to_the_constructor(rank: int, world: int) -> None:
    for views in (False, True):
        group = _group(rank, world)
        net = wrap(Chain(), process_group=group, gradient_as_bucket_view=views)
        train_and_compare(Chain, rank, world, _step, steps=3, net=net)
        assert group.calls["allreduce"] >= 3, "gradients must go through the group"


@batch.add
def whose_work_can_only_be_waited_for(rank: int, world: int) -> None:
    net = wrap(Chain(), process_group=_group(rank, world, wait_only=True))
    train_and_compare(Chain, rank, world, _step, steps=3, net=net)


@batch.add
def with_accumulation_and_small_buckets(rank: int, world: int) -> None:
    def step(net: Any, rank: int, step: int) -> None:
        with no_sync(net):
            _step(net, rank, 10 * step)
        _step(net, rank, 10 * step + 1)

    net = wrap(Chain(), process_group=_group(rank, world), bucket_cap_mb=0.00001)
    train_and_compare(Chain, rank, world, step, steps=3, net=net)


@batch.add
def with_unused_parameters(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        net(rows(rank, step), ((rank + step) % 3,)).square().mean().backward()

    net = wrap(Branches(), process_group=_group(rank, world), find_unused_parameters=True)
    train_and_compare(Branches, rank, world, step, steps=4, net=net)


@batch.add
def with_buffers(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    net = wrap(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), process_group=_group(rank, world))
    for step in range(2):
        _step(net, rank, step)
    means = [torch.empty(3) for _ in range(world)]
    net(rows(rank, 5))
    with torch.no_grad():
        net.eval()
        net(rows(rank, 6))
    dist.all_gather(means, net.module[1].running_mean)
    assert all(torch.equal(mean, means[0]) for mean in means)


@batch.add
def with_a_hook_over_it(rank: int, world: int) -> None:
    group = _group(rank, world)

    def hook(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        work = state.allreduce([bucket.buffer().div_(world)])
        return work.get_future().then(lambda future: future.value()[0])

    net = wrap(Chain(), process_group=group)
    net.register_comm_hook(group, hook)
    train_and_compare(Chain, rank, world, _step, steps=2, net=net)


@batch.add
def what_it_is_called(rank: int, world: int) -> None:
    assert "python" in wrap(Chain(), process_group=_group(rank, world)).exchange
    assert wrap(Chain()).exchange.startswith(f"shm: {world} ranks on one host, ")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_python_group(name: str, world: int) -> None:
    batch.check(name, world)


def _make_backend(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> PythonGroup:
    inner = dist.ProcessGroupGloo(store, rank, size, timeout)
    return PythonGroup(rank, size, inner)


def _as_default_group(rank: int, world: int, store: str) -> None:
    dist.Backend.register_backend("python", _make_backend, devices=["cpu"])
    dist.init_process_group(
        "python",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=20),
    )
    net = wrap(Chain())
    reference = Chain()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        _step(net, rank, step)
        expected = reference_grads(reference, world, _step, step)
        for name, p in net.module.named_parameters():
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, p in reference.named_parameters():
                p -= 0.1 * expected[name]


@pytest.mark.parametrize("world", WORLDS)
def test_a_registered_backend(world: int, tmp_path: Path) -> None:
    run_ranks(world, _as_default_group, world, str(tmp_path / "store"), init_group=False)
