"""torch's communication hooks on our buckets: what each of them makes of the gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    register_ddp_comm_hook,
)

from tests.process.batch import WORLDS, Batch
from tests.process.reference import (
    Branches,
    Chain,
    grads_of_ranks,
    no_sync,
    rows,
    train_and_compare,
    wrap,
)

batch = Batch()

# How near half precision comes to a gradient of a tenth.
FP16 = {"rtol": 2e-2, "atol": 1e-4}
BF16 = {"rtol": 5e-2, "atol": 1e-3}


def _step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step)).square().mean().backward()


def _accumulating(net: Any, rank: int, step: int) -> None:
    with no_sync(net):
        _step(net, rank, 10 * step)
    _step(net, rank, 10 * step + 1)


def _own_head(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step), ((rank + step) % 3,)).square().mean().backward()


def _compare(rank: int, world: int, state: Any, hook: Any, **options: Any) -> None:
    for views in (False, True):
        for cap in (None, 0.00001):
            net = wrap(Chain(), gradient_as_bucket_view=views, bucket_cap_mb=cap)
            net.register_comm_hook(state, hook)
            train_and_compare(Chain, rank, world, _step, steps=3, net=net, **options)


@batch.add
def allreduce(rank: int, world: int) -> None:
    _compare(rank, world, None, default_hooks.allreduce_hook)
    _compare(rank, world, dist.group.WORLD, default_hooks.allreduce_hook)


@batch.add
def fp16_compress(rank: int, world: int) -> None:
    _compare(rank, world, None, default_hooks.fp16_compress_hook, **FP16)


@batch.add
def bf16_compress(rank: int, world: int) -> None:
    _compare(rank, world, None, default_hooks.bf16_compress_hook, **BF16)


@batch.add
def fp16_compress_wrapper(rank: int, world: int) -> None:
    hook = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    _compare(rank, world, None, hook, **FP16)


@batch.add
def bf16_compress_wrapper(rank: int, world: int) -> None:
    hook = default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)
    _compare(rank, world, None, hook, **BF16)


def _full_rank_power_sgd(**options: Any) -> powerSGD_hook.PowerSGDState:
    """Of so high a rank that what it transmits is the gradient itself."""
    return powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=6,
        start_powerSGD_iter=2,
        min_compression_rate=0.001,
        **options,
    )


def _power_sgd(rank: int, world: int, hook: Any, **options: Any) -> None:
    for views in (False, True):
        net = wrap(Chain(), gradient_as_bucket_view=views)
        state = _full_rank_power_sgd(**options)
        net.register_comm_hook(state, hook)
        train_and_compare(Chain, rank, world, _step, steps=5, net=net, rtol=1e-2)
        assert state.iter == 5, "it counts iterations by bucket.is_last()"


@batch.add
def power_sgd(rank: int, world: int) -> None:
    _power_sgd(rank, world, powerSGD_hook.powerSGD_hook)


@batch.add
def power_sgd_without_error_feedback(rank: int, world: int) -> None:
    _power_sgd(rank, world, powerSGD_hook.powerSGD_hook, use_error_feedback=False)


@batch.add
def a_wrapper_around_power_sgd(rank: int, world: int) -> None:
    net = wrap(Chain())
    hook = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    net.register_comm_hook(_full_rank_power_sgd(), hook)
    for step in range(5):
        _step(net, rank, step)
        net.zero_grad()
    assert all(torch.isfinite(p).all() for p in net.parameters())


@batch.add
def post_local_sgd(rank: int, world: int) -> None:
    """Averaged over all ranks at first, later over the subgroup: here each rank by itself."""
    groups = [dist.new_group([r]) for r in range(world)]
    state = post_localSGD_hook.PostLocalSGDState(None, groups[rank], start_localSGD_iter=2)
    net = wrap(Chain())
    net.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    train_and_compare(Chain, rank, world, _step, steps=2, net=net)
    local = Chain()
    local.load_state_dict(net.module.state_dict())
    _step(net, rank, 2)
    _step(local, rank, 2)
    for p, q in zip(net.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@batch.add
def noop(rank: int, world: int) -> None:
    net = wrap(Chain())
    net.register_comm_hook(None, debugging_hooks.noop_hook)
    _step(net, rank, 0)
    local = grads_of_ranks(Chain, world, _step)[rank]
    for name, p in net.module.named_parameters():
        torch.testing.assert_close(p.grad, local[name])


@batch.add
def builtin(rank: int, world: int) -> None:
    for kind, tolerance in (
        (dist.BuiltinCommHookType.ALLREDUCE, {}),
        (dist.BuiltinCommHookType.FP16_COMPRESS, FP16),
    ):
        for views in (False, True):
            net = wrap(Chain(), gradient_as_bucket_view=views)
            net._register_builtin_comm_hook(kind)
            train_and_compare(Chain, rank, world, _step, steps=3, net=net, **tolerance)


@batch.add
def by_type(rank: int, world: int) -> None:
    for kind in (
        DDPCommHookType.ALLREDUCE,
        DDPCommHookType.FP16_COMPRESS,
        DDPCommHookType.BF16_COMPRESS,
    ):
        net = wrap(Chain())
        register_ddp_comm_hook(kind, net, None)
        train_and_compare(Chain, rank, world, _step, steps=2, net=net, **BF16)


@batch.add
def with_no_sync(rank: int, world: int) -> None:
    for views in (False, True):
        net = wrap(Chain(), gradient_as_bucket_view=views)
        net.register_comm_hook(None, default_hooks.allreduce_hook)
        train_and_compare(Chain, rank, world, _accumulating, steps=3, net=net)


@batch.add
def with_unused_parameters(rank: int, world: int) -> None:
    net = wrap(Branches(), find_unused_parameters=True)
    net.register_comm_hook(None, default_hooks.allreduce_hook)
    train_and_compare(Branches, rank, world, _own_head, steps=4, net=net)


@batch.add
def with_a_static_graph(rank: int, world: int) -> None:
    net = wrap(Chain(), static_graph=True)
    net.register_comm_hook(None, default_hooks.allreduce_hook)
    train_and_compare(Chain, rank, world, _step, steps=3, net=net)


@batch.add
def with_two_backwards(rank: int, world: int) -> None:
    """A lossy hook sees each increment once: what was reduced before is not sent again."""

    def step(net: nn.Module, rank: int, step: int) -> None:
        first = net(rows(rank, step)).square().mean()
        second = net(rows(rank, step + 100)).square().mean()
        first.backward()
        second.backward()

    for hook, tolerance in (
        (default_hooks.allreduce_hook, {}),
        (default_hooks.fp16_compress_hook, FP16),
    ):
        net = wrap(Chain())
        net.register_comm_hook(None, hook)
        train_and_compare(Chain, rank, world, step, steps=2, net=net, **tolerance)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_hooks(name: str, world: int) -> None:
    batch.check(name, world)
