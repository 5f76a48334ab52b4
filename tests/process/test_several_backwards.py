"""Forwards and backwards in every number and order, each backward exchanged once and rightly.

What must be local stays local: autograd.grad, and a backward to which no_sync applies.
"""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from tests.process.batch import WORLDS, Batch
from tests.process.reference import (
    Branches,
    Chain,
    assert_grads,
    assert_replicas_equal,
    rows,
    train_and_compare,
    unwrapped,
    wrap,
)

batch = Batch()


class Methods(Chain):
    """A module with another way in than forward."""

    def loss(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def _loss(net: nn.Module, rank: int, step: int) -> Tensor:
    return net(rows(rank, step)).square().mean()


@batch.add
def two_forwards_one_backward(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        (_loss(net, rank, step) + _loss(net, rank, step + 100)).backward()

    train_and_compare(Chain, rank, world, step, steps=2)


@batch.add
def two_forwards_two_backwards(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        first, second = _loss(net, rank, step), _loss(net, rank, step + 100)
        first.backward()
        second.backward()

    for views in (False, True):
        train_and_compare(Chain, rank, world, step, steps=3, gradient_as_bucket_view=views)


@batch.add
def two_forwards_two_backwards_the_other_way_round(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        first = net(rows(rank, step), (0,)).square().mean()
        second = net(rows(rank, step + 100), (1 + rank % 2,)).square().mean()
        second.backward()
        first.backward()

    train_and_compare(Branches, rank, world, step, steps=2)


@batch.add
def the_same_graph_twice(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        loss = _loss(net, rank, step)
        loss.backward(retain_graph=True)
        loss.backward()

    for views in (False, True):
        train_and_compare(Chain, rank, world, step, steps=2, gradient_as_bucket_view=views)


@batch.add
def the_same_graph_three_times_with_small_buckets(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        loss = _loss(net, rank, step)
        for last in (False, False, True):
            loss.backward(retain_graph=not last)

    train_and_compare(Chain, rank, world, step, steps=2, bucket_cap_mb=0.00001)


@batch.add
def accumulation_over_synchronised_backwards(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        for micro in range(3):
            _loss(net, rank, 10 * step + micro).backward()

    train_and_compare(Chain, rank, world, step, steps=2)


@batch.add
def one_backward_for_each_output(rank: int, world: int) -> None:
    class Two(Branches):
        def forward(self, x: Tensor, uses: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
            return super().forward(x, (0,)), super().forward(x, (1, 2))

    def step(net: nn.Module, rank: int, step: int) -> None:
        first, second = net(rows(rank, step))
        first.square().mean().backward()
        second.square().mean().backward()

    train_and_compare(Two, rank, world, step, steps=2)


@batch.add
def backward_to_some_parameters_only(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        inner = unwrapped(net)
        _loss(net, rank, step).backward(inputs=[inner.middle.weight, inner.last.bias])

    net = train_and_compare(Chain, rank, world, step, steps=2)
    assert net.module.first.weight.grad is None


@batch.add
def backward_to_other_parameters_on_every_rank(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        inner = unwrapped(net)
        layers = [inner.first, inner.middle, inner.last]
        _loss(net, rank, step).backward(inputs=[layers[rank % 3].weight])

    train_and_compare(Chain, rank, world, step, steps=2)


@batch.add
def backward_to_some_parameters_then_to_all(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        loss = _loss(net, rank, step)
        loss.backward(inputs=[unwrapped(net).first.weight], retain_graph=True)
        loss.backward()

    train_and_compare(Chain, rank, world, step)


@batch.add
def forward_through_the_wrapped_module(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        _loss(unwrapped(net), rank, step).backward()

    for views in (False, True):
        train_and_compare(Chain, rank, world, step, steps=3, gradient_as_bucket_view=views)


@batch.add
def forward_through_the_wrapped_module_on_one_rank(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        _loss(unwrapped(net) if rank == 0 else net, rank, step).backward()

    train_and_compare(Chain, rank, world, step, steps=2)


@batch.add
def forward_through_another_method(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        unwrapped(net).loss(rows(rank, step)).backward()

    train_and_compare(Methods, rank, world, step, steps=2)


@batch.add
def forward_through_a_part_of_the_module(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        unwrapped(net).first(rows(rank, step)).square().mean().backward()

    train_and_compare(Chain, rank, world, step, steps=2)


@batch.add
def an_old_backward_of_the_wrapped_module_then_a_new_one(rank: int, world: int) -> None:
    """A forward through the class, its backward after one through the bare module."""

    def step(net: nn.Module, rank: int, step: int) -> None:
        first = _loss(net, rank, step)
        _loss(unwrapped(net), rank, step + 100).backward()
        first.backward()

    train_and_compare(Chain, rank, world, step, steps=2)


@batch.add
def a_forward_without_backward_does_no_harm(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        _loss(net, rank, step + 50)
        if rank == 0 or not step:
            _loss(net, rank, step + 60)
        _loss(net, rank, step).backward()

    train_and_compare(Chain, rank, world, step, steps=3, broadcast_buffers=False)


@batch.add
def two_wrapped_modules_in_one_backward(rank: int, world: int) -> None:
    front, back = wrap(Chain()), wrap(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    for step in range(2):
        back(front(rows(rank, step))).square().mean().backward()
    assert_replicas_equal([p.grad for net in (front, back) for p in net.parameters()])
    plain_front, plain_back = Chain(), nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    plain_back.load_state_dict(back.module.state_dict())
    for other in range(world):
        for step in range(2):
            plain_back(plain_front(rows(other, step))).square().mean().backward()
    for net, plain in ((front, plain_front), (back, plain_back)):
        assert_grads(net, {n: p.grad / world for n, p in plain.named_parameters()})


@batch.add
def a_backward_that_raised_on_every_rank(rank: int, world: int) -> None:
    """A user who catches an error and skips the batch goes on with right gradients."""
    net = wrap(Chain())

    def fail(grad: Tensor) -> Tensor:
        raise MemoryError("of the user's own")

    loss = _loss(net, rank, 0)
    handle = net.module.first.weight.register_hook(fail)
    with pytest.raises(MemoryError):
        loss.backward()
    handle.remove()
    net.zero_grad()
    train_and_compare(
        Chain, rank, world, lambda n, r, s: _loss(n, r, s).backward(), steps=2, net=net
    )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_several_backwards(name: str, world: int) -> None:
    batch.check(name, world)
