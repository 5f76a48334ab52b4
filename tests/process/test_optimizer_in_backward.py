"""Optimizers that step inside the backward pass, as soon as a bucket is averaged."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from tests.process.batch import WORLDS, Batch
from tests.process.reference import (
    Chain,
    assert_weights,
    descend,
    reference_grads,
    rows,
    wrap,
)

batch = Batch()


def _step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step)).square().mean().backward()


def _descended(world: int, steps: int, only: tuple[str, ...] = ()) -> nn.Module:
    """A reference that took so many steps of SGD, with all parameters or only those named."""
    reference = Chain()
    for step in range(steps):
        grads = reference_grads(reference, world, _step, step)
        chosen = {n: g if not only or n in only else None for n, g in grads.items()}
        descend(reference, chosen)
    return reference


@batch.add
def fused(rank: int, world: int) -> None:
    for views in (False, True):
        for cap in (None, 0.00001):
            net = wrap(Chain(), gradient_as_bucket_view=views, bucket_cap_mb=cap)
            net._register_fused_optim(torch.optim.SGD, lr=0.1)
            for step in range(3):
                _step(net, rank, step)
                net.zero_grad()
            assert_weights(net, _descended(world, 3))


@batch.add
def fused_for_some_parameters(rank: int, world: int) -> None:
    net = wrap(Chain())
    chosen = ("first.weight", "last.bias")
    params = [net.module.get_parameter(name) for name in chosen]
    net._register_fused_optim(torch.optim.SGD, lr=0.1, optim_params=params)
    for step in range(3):
        _step(net, rank, step)
        net.zero_grad()
    assert_weights(net, _descended(world, 3, chosen))


@batch.add
def fused_adam(rank: int, world: int) -> None:
    net, twin = wrap(Chain()), wrap(Chain())
    net._register_fused_optim(torch.optim.Adam, 0.01, betas=(0.9, 0.99))
    optimizer = torch.optim.Adam(twin.parameters(), 0.01, betas=(0.9, 0.99))
    for step in range(3):
        _step(net, rank, step)
        net.zero_grad()
        _step(twin, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    assert_weights(net, twin.module)


@batch.add
def applied_in_backward(rank: int, world: int) -> None:
    for views in (False, True):
        for cap in (None, 0.00001):
            module = Chain()
            _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
            net = wrap(module, gradient_as_bucket_view=views, bucket_cap_mb=cap)
            for step in range(3):
                _step(net, rank, step)
                assert all(p.grad is None for p in net.parameters())
            assert_weights(net, _descended(world, 3))


@batch.add
def applied_in_backward_after_wrapping(rank: int, world: int) -> None:
    """The optimizers are found at the first forward."""
    net = wrap(Chain())
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    for step in range(3):
        _step(net, rank, step)
    assert_weights(net, _descended(world, 3))


@batch.add
def applied_in_backward_for_some_parameters(rank: int, world: int) -> None:
    chosen = ("middle.weight", "middle.bias")
    module = Chain()
    _apply_optimizer_in_backward(torch.optim.SGD, module.middle.parameters(), {"lr": 0.1})
    net = wrap(module)
    for step in range(3):
        _step(net, rank, step)
        assert net.module.middle.weight.grad is None and net.module.first.weight.grad is not None
        net.zero_grad()
    assert_weights(net, _descended(world, 3, chosen))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_optimizer_in_backward(name: str, world: int) -> None:
    batch.check(name, world)
