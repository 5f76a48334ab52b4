"""Freezing and unfreezing after wrapping, also on one rank only.

A parameter that a rank has frozen counts as zero there, like one it does not use. Its mean over the
ranks lands in `.grad` on every rank, so that replicas stay equal whatever the optimizer holds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.process.batch import WORLDS, Batch
from tests.process.reference import (
    Chain,
    assert_grads,
    assert_replicas_equal,
    expected_grads,
    no_sync,
    rows,
    train_and_compare,
    unwrapped,
    wrap,
)

batch = Batch()


class PartlyFrozen(Chain):
    """Its middle layer is frozen when it is wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.middle.requires_grad_(False)


def _step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step)).square().mean().backward()


def _layer(net: Any, name: str) -> nn.Module:
    return unwrapped(net).get_submodule(name)


def _compare(make: Any, rank: int, world: int, step: Any, **options: Any) -> None:
    for views in (False, True):
        train_and_compare(make, rank, world, step, gradient_as_bucket_view=views, **options)


@batch.add
def frozen_right_after_wrapping(rank: int, world: int) -> None:
    def step(net: Any, rank: int, step: int) -> None:
        _layer(net, "first").requires_grad_(False)
        _step(net, rank, step)

    _compare(Chain, rank, world, step, steps=3)


@batch.add
def frozen_later(rank: int, world: int) -> None:
    def step(net: Any, rank: int, step: int) -> None:
        _layer(net, "middle").requires_grad_(step < 2)
        _step(net, rank, step)

    _compare(Chain, rank, world, step, steps=4)


@batch.add
def frozen_and_unfrozen_in_turn(rank: int, world: int) -> None:
    def step(net: Any, rank: int, step: int) -> None:
        _layer(net, "middle").requires_grad_(step % 2 == 0)
        _layer(net, "last").requires_grad_(step % 3 != 1)
        _step(net, rank, step)

    _compare(Chain, rank, world, step, steps=6)
    train_and_compare(Chain, rank, world, step, steps=6, bucket_cap_mb=0.00001)


@batch.add
def unfrozen_layer_by_layer(rank: int, world: int) -> None:
    """As in fine-tuning: the head first, then layer after layer towards the input."""

    def step(net: Any, rank: int, step: int) -> None:
        for index, name in enumerate(("last", "middle", "first")):
            _layer(net, name).requires_grad_(index <= step)
        _step(net, rank, step)

    _compare(Chain, rank, world, step, steps=4)


@batch.add
def unfrozen_although_frozen_at_wrapping(rank: int, world: int) -> None:
    def step(net: Any, rank: int, step: int) -> None:
        if step == 1:
            _layer(net, "middle").requires_grad_(True)
        if step == 3:
            _layer(net, "middle").requires_grad_(False)
        _step(net, rank, step)

    for find in (False, True):
        _compare(PartlyFrozen, rank, world, step, steps=5, find_unused_parameters=find)


@batch.add
def frozen_on_one_rank_only(rank: int, world: int) -> None:
    def step(net: Any, rank: int, step: int) -> None:
        _layer(net, "middle").requires_grad_(not (rank == 0 and step >= 1))
        _step(net, rank, step)

    _compare(Chain, rank, world, step, steps=3)
    train_and_compare(Chain, rank, world, step, steps=3, bucket_cap_mb=0.00001)


@batch.add
def frozen_on_another_rank_each_time(rank: int, world: int) -> None:
    def step(net: Any, rank: int, step: int) -> None:
        for index, name in enumerate(("first", "middle", "last")):
            _layer(net, name).requires_grad_((rank + step + index) % 3 != 0)
        _step(net, rank, step)

    _compare(Chain, rank, world, step, steps=4)


@batch.add
def unfrozen_on_one_rank_only(rank: int, world: int) -> None:
    def step(net: Any, rank: int, step: int) -> None:
        _layer(net, "middle").requires_grad_(rank == world - 1 and step >= 1)
        _step(net, rank, step)

    _compare(PartlyFrozen, rank, world, step, steps=3)


@batch.add
def all_frozen_on_one_rank(rank: int, world: int) -> None:
    """Its output does not require grad by itself; it takes part with zeros."""

    def step(net: Any, rank: int, step: int) -> None:
        unwrapped(net).requires_grad_(rank != 0)
        out = net(rows(rank, step)).square().mean()
        if out.requires_grad:
            out.backward()
        else:
            assert net is unwrapped(net), "the wrapped module's output must allow backward()"

    _compare(Chain, rank, world, step, steps=2)


@batch.add
def all_frozen_everywhere_then_unfrozen(rank: int, world: int) -> None:
    net = wrap(Chain())
    net.module.requires_grad_(False)
    net(rows(rank)).square().mean().backward()
    assert all(p.grad is None for p in net.parameters())
    net.module.requires_grad_(True)
    train_and_compare(Chain, rank, world, _step, steps=2, net=net)


@batch.add
def an_old_gradient_of_a_frozen_parameter_is_kept(rank: int, world: int) -> None:
    net = wrap(Chain())
    _step(net, rank, 0)
    before = net.module.middle.weight.grad.clone()
    net.module.middle.requires_grad_(False)
    _step(net, rank, 1)
    assert torch.equal(net.module.middle.weight.grad, before)
    assert_replicas_equal([p.grad for p in net.parameters()])


@batch.add
def frozen_between_the_micro_batches(rank: int, world: int) -> None:
    """What a parameter collected before it was frozen is exchanged all the same."""

    def step(net: Any, rank: int, step: int) -> None:
        _layer(net, "middle").requires_grad_(True)
        with no_sync(net):
            _step(net, rank, 10 * step)
        _layer(net, "middle").requires_grad_(False)
        _step(net, rank, 10 * step + 1)

    net = wrap(Chain())
    step(net, rank, 0)
    assert_grads(net, expected_grads(Chain, world, step))


@batch.add
def frozen_between_forward_and_backward(rank: int, world: int) -> None:
    """Autograd gives a parameter nothing that is frozen when its backward runs."""

    def step(net: Any, rank: int, step: int) -> None:
        loss = net(rows(rank, step)).square().mean()
        _layer(net, "middle").requires_grad_(step % 2 == 0)
        loss.backward()
        _layer(net, "middle").requires_grad_(True)

    train_and_compare(Chain, rank, world, step, steps=3)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_freezing(name: str, world: int) -> None:
    batch.check(name, world)
