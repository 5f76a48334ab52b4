"""SyncBatchNorm on the CPU: the statistics are those of all ranks' rows together.

The reference is an ordinary BatchNorm that sees the rows of all ranks in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import closeranks
from tests.process.batch import WORLDS, Batch
from tests.process.reference import assert_grads, assert_replicas_equal, rows, unwrapped, wrap

batch = Batch()

Convert = Callable[[nn.Module], nn.Module]


def _make() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2))


def _count(rank: int, uneven: bool) -> int:
    return 3 + rank if uneven else 4


def _compare(rank: int, world: int, convert: Convert, uneven: bool, **options: Any) -> None:
    """Two steps of training, then the running statistics and an evaluation."""
    net = wrap(convert(_make()), **options)
    whole = _make()
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, whole)]
    for step in range(2):
        x = rows(rank, step, _count(rank, uneven)).requires_grad_()
        net(x).square().mean().backward()
        shares = [rows(r, step, _count(r, uneven)).requires_grad_() for r in range(world)]
        parts = whole(torch.cat(shares)).split([len(share) for share in shares])
        (sum(part.square().mean() for part in parts) / world).backward()
        assert_grads(net, {n: p.grad for n, p in whole.named_parameters()})
        torch.testing.assert_close(x.grad, shares[rank].grad * world, rtol=1e-4, atol=1e-6)
        for optimizer in sgd:
            optimizer.step()
            optimizer.zero_grad()
    _same_statistics(net, whole)
    net.eval()
    whole.eval()
    torch.testing.assert_close(net(rows(rank)), whole(rows(rank)), rtol=1e-4, atol=1e-5)


def _same_statistics(net: Any, whole: nn.Module) -> None:
    for name, buffer in whole.named_buffers():
        mine = unwrapped(net).get_buffer(name)
        torch.testing.assert_close(mine, buffer, rtol=1e-4, atol=1e-6)
    assert_replicas_equal(list(unwrapped(net).buffers()))


@batch.add
def converted_by_us(rank: int, world: int) -> None:
    for uneven in (False, True):
        _compare(rank, world, closeranks.convert_sync_batchnorm, uneven)


@batch.add
def converted_by_torch(rank: int, world: int) -> None:
    for uneven in (False, True):
        _compare(rank, world, nn.SyncBatchNorm.convert_sync_batchnorm, uneven)


@batch.add
def without_broadcast_of_buffers(rank: int, world: int) -> None:
    """The statistics are equal by themselves."""
    for convert in (closeranks.convert_sync_batchnorm, nn.SyncBatchNorm.convert_sync_batchnorm):
        _compare(rank, world, convert, True, forward_sync_buffers=False)


@batch.add
def images_and_layers_within_layers(rank: int, world: int) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(7)
            self.inner = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3))
            self.outer = nn.BatchNorm2d(3, affine=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(torch.relu(self.inner(x)))

    net = wrap(closeranks.convert_sync_batchnorm(Block()))
    assert isinstance(net.module.outer, nn.SyncBatchNorm)
    whole = Block()
    images = [rows(r, 0, 2, 2 * 5 * 5).view(2, 2, 5, 5) for r in range(world)]
    net(images[rank]).pow(3).mean().backward()
    whole(torch.cat(images)).pow(3).mean().backward()
    assert_grads(net, {n: p.grad for n, p in whole.named_parameters()})
    _same_statistics(net, whole)


@batch.add
def conversion_keeps_what_was_there(rank: int, world: int) -> None:
    module = _make()
    module(rows(0))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module[1].weight.requires_grad_(False)
    converted = closeranks.convert_sync_batchnorm(module)
    assert {n: t.tolist() for n, t in converted.state_dict().items()} == {
        n: t.tolist() for n, t in before.items()
    }
    assert not converted[1].weight.requires_grad and converted[1].bias.requires_grad


@batch.add
def logged(rank: int, world: int) -> None:
    data = wrap(closeranks.convert_sync_batchnorm(_make()))._get_ddp_logging_data()
    assert data["has_sync_bn"]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_sync_batchnorm(name: str, world: int) -> None:
    batch.check(name, world)
