"""join: ranks with fewer batches shadow the others until the last is done, and take its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from tests.process.batch import WORLDS, Batch
from tests.process.reference import (
    FIND_UNUSED,
    Branches,
    Chain,
    assert_replicas_equal,
    assert_weights,
    descend,
    local_grads,
    mean_grads,
    no_sync,
    rows,
    train_and_compare,
    wrap,
)

batch = Batch()

Step = Callable[[Any, int, int], None]


def _step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step)).square().mean().backward()


def _own_head(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step), ((rank + step) % 3,)).square().mean().backward()


def _steps_of(rank: int) -> int:
    """Rank 0 has two batches, every further rank one more."""
    return 2 + rank


def _reference(
    make: Callable[[], nn.Module], world: int, step: Step, *, by_active: bool = False
) -> nn.Module:
    """The weights after the ranks ran out one by one."""
    module = make()
    for i in range(_steps_of(world - 1)):
        active = [rank for rank in range(world) if i < _steps_of(rank)]
        per_rank = []
        for rank in active:
            step(module, rank, i)
            per_rank.append(local_grads(module))
            module.zero_grad()
        descend(module, mean_grads(per_rank, divisor=len(active) if by_active else world))
    return module


def _train(net: Any, rank: int, step: Step, context: Any) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with context:
        for i in range(_steps_of(rank)):
            step(net, rank, i)
            optimizer.step()
            optimizer.zero_grad()


@batch.add
def divided_by_the_initial_world_size(rank: int, world: int) -> None:
    for views in (False, True):
        for cap in (None, 0.00001):
            net = wrap(Chain(), gradient_as_bucket_view=views, bucket_cap_mb=cap)
            _train(net, rank, _step, net.join())
            assert_weights(net, _reference(Chain, world, _step))


@batch.add
def divided_by_the_ranks_still_active(rank: int, world: int) -> None:
    net = wrap(Chain())
    _train(net, rank, _step, net.join(divide_by_initial_world_size=False))
    assert_weights(net, _reference(Chain, world, _step, by_active=True))


@batch.add
def with_parameters_unused_by_rank_and_step(rank: int, world: int) -> None:
    for find in FIND_UNUSED:
        net = wrap(Branches(), find_unused_parameters=find)
        _train(net, rank, _own_head, net.join())
        assert_weights(net, _reference(Branches, world, _own_head))


@batch.add
def training_goes_on_afterwards(rank: int, world: int) -> None:
    net = wrap(Chain())
    reference = _reference(Chain, world, _step)
    _train(net, rank, _step, net.join())

    def make() -> nn.Module:
        module = Chain()
        module.load_state_dict(reference.state_dict())
        return module

    train_and_compare(make, rank, world, _step, steps=2, net=net)


@batch.add
def one_join_for_each_epoch(rank: int, world: int) -> None:
    net = wrap(Chain())
    for _ in range(3):
        _train(net, rank, _step, net.join())
        assert_replicas_equal(list(net.parameters()))


@batch.add
def a_rank_without_any_batch(rank: int, world: int) -> None:
    net, alone = wrap(Chain()), Chain()
    with net.join():
        if rank == world - 1:
            _step(net, rank, 0)
    _step(alone, world - 1, 0)
    if rank == world - 1:
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad / world)


@batch.add
def thrown_on_early_termination(rank: int, world: int) -> None:
    net = wrap(Chain())
    with pytest.raises(RuntimeError, match="exhausted"):
        _train(net, rank, _step, net.join(throw_on_early_termination=True))


@batch.add
def not_enabled(rank: int, world: int) -> None:
    net = wrap(Chain())
    with net.join(enable=False):
        train_and_compare(Chain, rank, world, _step, steps=3, net=net)


@batch.add
def even_inputs(rank: int, world: int) -> None:
    net = wrap(Chain())
    reference = Chain()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with net.join():
        for i in range(3):
            _step(net, rank, i)
            optimizer.step()
            optimizer.zero_grad()
    for i in range(3):
        per_rank = []
        for other in range(world):
            _step(reference, other, i)
            per_rank.append(local_grads(reference))
            reference.zero_grad()
        descend(reference, mean_grads(per_rank))
    assert_weights(net, reference)


@batch.add
def with_no_sync(rank: int, world: int) -> None:
    def step(net: Any, rank: int, step: int) -> None:
        with no_sync(net):
            _step(net, rank, 10 * step)
        _step(net, rank, 10 * step + 1)

    net = wrap(Chain())
    _train(net, rank, step, net.join())
    assert_weights(net, _reference(Chain, world, step))


@batch.add
def with_a_hook(rank: int, world: int) -> None:
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        net = wrap(Chain())
        net.register_comm_hook(None, hook)
        _train(net, rank, _step, net.join())
        assert_weights(net, _reference(Chain, world, _step), rtol=2e-2, atol=1e-3)


@batch.add
def with_a_hook_and_no_sync(rank: int, world: int) -> None:
    def step(net: Any, rank: int, step: int) -> None:
        with no_sync(net):
            _step(net, rank, 10 * step)
        _step(net, rank, 10 * step + 1)

    net = wrap(Chain())
    net.register_comm_hook(None, default_hooks.allreduce_hook)
    _train(net, rank, step, net.join())
    assert_weights(net, _reference(Chain, world, step))


@batch.add
def with_a_static_graph(rank: int, world: int) -> None:
    net = wrap(Chain(), static_graph=True)
    _train(net, rank, _step, net.join())
    assert_weights(net, _reference(Chain, world, _step))


@batch.add
def with_buffers(rank: int, world: int) -> None:
    """The buffers are those of the rank that trained longest, and the same everywhere."""
    torch.manual_seed(7)
    net = wrap(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))
    _train(net, rank, _step, net.join())
    assert_replicas_equal(list(net.state_dict().values()))
    seen = net.module[1].num_batches_tracked.item()
    assert seen == _steps_of(world - 1), f"{seen} batches tracked"


@batch.add
def with_a_zero_redundancy_optimizer(rank: int, world: int) -> None:
    """It ends, and with equal replicas. As with torch's class, a rank that has joined steps its
    shard with the gradients it had last, since joining fills no `.grad`."""
    net = wrap(Chain())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    with Join([net, optimizer]):
        for i in range(_steps_of(rank)):
            _step(net, rank, i)
            optimizer.step()
            optimizer.zero_grad()
    assert_replicas_equal(list(net.parameters()))


@batch.add
def two_modules_in_one_join(rank: int, world: int) -> None:
    first, second = wrap(Chain()), wrap(Chain())
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (first, second)]
    with Join([first, second]):
        for i in range(_steps_of(rank)):
            for net, optimizer in zip((first, second), optimizers, strict=True):
                _step(net, rank, i)
                optimizer.step()
                optimizer.zero_grad()
    for net in (first, second):
        assert_weights(net, _reference(Chain, world, _step))


@batch.add
def left_by_an_exception(rank: int, world: int) -> None:
    net = wrap(Chain())
    with contextlib.suppress(KeyError), net.join():
        raise KeyError("of the user's own")
    dist.barrier()
    train_and_compare(Chain, rank, world, _step, net=net)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_join(name: str, world: int) -> None:
    batch.check(name, world)
