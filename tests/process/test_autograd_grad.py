"""autograd.grad stays local; a backward over its result is exchanged like any other."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from tests.process.batch import WORLDS, Batch
from tests.process.reference import (
    Chain,
    assert_grads,
    expected_grads,
    rows,
    train_and_compare,
    wrap,
)

batch = Batch()


def _loss(net: nn.Module, rank: int, step: int) -> Tensor:
    return net(rows(rank, step)).square().mean()


@batch.add
def autograd_grad_stays_local(rank: int, world: int) -> None:
    net, alone = wrap(Chain()), Chain()
    for step in range(2):
        got = torch.autograd.grad(_loss(net, rank, step), list(net.parameters()))
        wanted = torch.autograd.grad(_loss(alone, rank, step), list(alone.parameters()))
        torch.testing.assert_close(got, wanted)
        assert all(p.grad is None for p in net.parameters())
    train_and_compare(Chain, rank, world, lambda n, r, s: _loss(n, r, s).backward(), net=net)


@batch.add
def autograd_grad_on_one_rank_only(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        loss = _loss(net, rank, step)
        if rank == 0:
            torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
        loss.backward()

    train_and_compare(Chain, rank, world, step, steps=2)


@batch.add
def autograd_grad_leaves_exchanged_gradients_alone(rank: int, world: int) -> None:
    """Also where increments are told apart, which takes a hook before accumulation."""
    for average in (True, False):
        net = wrap(Chain(), average=average)
        _loss(net, rank, 0).backward()
        before = [p.grad.clone() for p in net.parameters()]
        torch.autograd.grad(_loss(net, rank, 1), list(net.parameters()))
        after = [p.grad for p in net.parameters()]
        assert all(torch.equal(b, a) for b, a in zip(before, after, strict=True))


@batch.add
def a_gradient_penalty_is_averaged(rank: int, world: int) -> None:
    """The inner gradient is local, the backward of the penalty is exchanged."""

    def step(net: nn.Module, rank: int, step: int) -> None:
        x = rows(rank, step).requires_grad_()
        (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        penalty = (grad.norm(dim=1) - 1).square().mean()
        (penalty + _loss(net, rank, step)).backward()

    train_and_compare(Chain, rank, world, step, steps=2)


@batch.add
def a_backward_that_creates_a_graph_averages_the_gradients(rank: int, world: int) -> None:
    net = wrap(Chain())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of the reference cycle
        _loss(net, rank, 0).backward(create_graph=True)
    wanted = expected_grads(Chain, world, lambda n, r, s: _loss(n, r, s).backward())
    assert_grads(net, wanted)
    for p in net.parameters():
        p.grad = None


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_autograd_grad(name: str, world: int) -> None:
    batch.check(name, world)
