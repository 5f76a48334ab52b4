"""no_sync, and what else makes a backward local: what is kept back is exchanged with the next.

A backward is local if it runs inside no_sync, or if every forward since the last backward did.
Where the two differ there is one warning.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn

from tests.process.batch import WORLDS, Batch
from tests.process.noticed import noticed
from tests.process.reference import (
    Chain,
    assert_grads,
    expected_grads,
    local_grads,
    no_sync,
    rows,
    train_and_compare,
    wrap,
)

batch = Batch()


def _loss(net: nn.Module, rank: int, step: int) -> Tensor:
    return net(rows(rank, step)).square().mean()


@batch.add
def no_sync_accumulates_locally(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        with no_sync(net):
            for micro in range(2):
                _loss(net, rank, 10 * step + micro).backward()
        _loss(net, rank, 10 * step + 5).backward()

    for views in (False, True):
        net = train_and_compare(Chain, rank, world, step, steps=3, gradient_as_bucket_view=views)
    with net.no_sync():
        _loss(net, rank, 0).backward()
    alone = Chain()
    alone.load_state_dict(net.module.state_dict())
    _loss(alone, rank, 0).backward()
    for name, grad in local_grads(alone).items():
        torch.testing.assert_close(net.module.get_parameter(name).grad, grad)


def _no_sync_around(net: nn.Module, rank: int, forward: bool) -> None:
    """One backward with no_sync around its forward only, or around itself only."""
    with no_sync(net) if forward else contextlib.nullcontext():
        loss = _loss(net, rank, 0)
    with contextlib.nullcontext() if forward else no_sync(net):
        loss.backward()


def _is_local_and_warned_of_once(forward: bool, rank: int, world: int) -> None:
    net, alone = wrap(Chain()), Chain()
    with noticed() as said:
        for _ in range(2):
            _no_sync_around(net, rank, forward)
            _no_sync_around(alone, rank, forward)
    for name, grad in local_grads(alone).items():
        torch.testing.assert_close(net.module.get_parameter(name).grad, grad)
    about = [text for text in said if "no_sync" in text]
    assert len(about) == 1, f"one warning wanted, got {said}"
    # What was kept back is exchanged with the next backward that is not local.
    _loss(net, rank, 1).backward()

    def all_of_it(module: nn.Module, r: int, step: int) -> None:
        _no_sync_around(module, r, forward)
        _no_sync_around(module, r, forward)
        _loss(module, r, 1).backward()

    assert_grads(net, expected_grads(Chain, world, all_of_it))


@batch.add
def no_sync_around_the_forward_only(rank: int, world: int) -> None:
    _is_local_and_warned_of_once(True, rank, world)


@batch.add
def no_sync_around_the_backward_only(rank: int, world: int) -> None:
    _is_local_and_warned_of_once(False, rank, world)


@batch.add
def no_sync_is_left_when_an_exception_passes(rank: int, world: int) -> None:
    net = wrap(Chain())
    with pytest.raises(KeyError), net.no_sync():
        raise KeyError("passing")
    assert net.require_backward_grad_sync
    train_and_compare(Chain, rank, world, lambda n, r, s: _loss(n, r, s).backward(), net=net)


@batch.add
def require_backward_grad_sync_set_by_hand(rank: int, world: int) -> None:
    """What Accelerate and others do in place of no_sync."""
    net = wrap(Chain())
    net.require_backward_grad_sync = False
    _loss(net, rank, 0).backward()
    alone = Chain()
    _loss(alone, rank, 0).backward()
    torch.testing.assert_close(net.module.first.weight.grad, alone.first.weight.grad)
    net.require_backward_grad_sync = True
    _loss(net, rank, 1).backward()

    def both(module: nn.Module, r: int, step: int) -> None:
        _loss(module, r, 0).backward()
        _loss(module, r, 1).backward()

    assert_grads(net, expected_grads(Chain, world, both))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_no_sync(name: str, world: int) -> None:
    batch.check(name, world)
