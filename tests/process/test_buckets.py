"""Buckets as the user meets them: their size, gradients that are views of them, and their life."""

from __future__ import annotations

import gc
import os
import resource
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from tests.process.batch import WORLDS, Batch
from tests.process.noticed import noticed
from tests.process.reference import (
    Chain,
    assert_grads,
    expected_grads,
    no_sync,
    rows,
    train_and_compare,
    wrap,
)

batch = Batch()

KIB = 1 / 1024


class Wide(nn.Module):
    """Six layers of 4 KiB each, without biases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step)).square().mean().backward()


def _wide_step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step, width=32)).square().mean().backward()


def _sizes_kib(rank: int, **options: Any) -> list[int]:
    """The bucket sizes that a hook sees in the third iteration, in order of launching."""
    seen: list[int] = []

    def hook(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        seen.append(bucket.buffer().nbytes // 1024)
        future: Future[Tensor] = Future()
        future.set_result(bucket.buffer())
        return future

    hook.__annotations__ = {}
    net = wrap(Wide(), **options)
    net.register_comm_hook(None, hook)
    for step in range(3):
        seen.clear()
        _wide_step(net, rank, step)
    return seen


@batch.add
def one_cap_for_all(rank: int, world: int) -> None:
    assert _sizes_kib(rank) == [24]
    assert _sizes_kib(rank, bucket_cap_mb=8 * KIB) == [8, 8, 8]
    assert _sizes_kib(rank, bucket_cap_mb=4 * KIB) == [4] * 6


@batch.add
def a_list_of_caps(rank: int, world: int) -> None:
    assert _sizes_kib(rank, bucket_cap_mb_list=[4 * KIB, 12 * KIB, 8 * KIB]) == [4, 12, 8]
    assert sum(_sizes_kib(rank, bucket_cap_mb_list=[4 * KIB, 8 * KIB])) == 24
    train_and_compare(
        Wide, rank, world, _wide_step, steps=3, bucket_cap_mb_list=[4 * KIB, 12 * KIB]
    )


@batch.add
def gradients_are_views_of_one_buffer(rank: int, world: int) -> None:
    net = wrap(Chain(), gradient_as_bucket_view=True)
    for step in range(3):
        _step(net, rank, step)
        storages = {p.grad.untyped_storage().data_ptr() for p in net.parameters()}
        assert len(storages) == 1, "one bucket, one storage"
        for p in net.parameters():
            p.grad.zero_()


@batch.add
def gradients_are_tensors_of_their_own(rank: int, world: int) -> None:
    net = wrap(Chain())
    _step(net, rank, 0)
    kept = [p.grad for p in net.parameters()]
    before = [grad.clone() for grad in kept]
    net.zero_grad()
    _step(net, rank, 1)
    assert all(torch.equal(k, b) for k, b in zip(kept, before, strict=True)), "kept by the user"


@batch.add
def zeroed_in_every_way(rank: int, world: int) -> None:
    def zero_in_place(net: Any) -> None:
        net.zero_grad(set_to_none=False)

    def zero_some(net: Any) -> None:
        for index, p in enumerate(net.parameters()):
            if index % 2:
                p.grad = None
            else:
                p.grad.zero_()

    def replace(net: Any) -> None:
        for p in net.parameters():
            p.grad = torch.zeros_like(p)

    for views in (False, True):
        for zero in (zero_in_place, zero_some, replace):
            net = wrap(Chain(), gradient_as_bucket_view=views)
            for _ in range(3):
                _step(net, rank, 0)
                assert_grads(net, expected_grads(Chain, world, _step))
                zero(net)


@batch.add
def accumulated_without_zeroing(rank: int, world: int) -> None:
    def three(net: nn.Module, rank: int, step: int) -> None:
        for micro in range(3):
            _step(net, rank, micro)

    for views in (False, True):
        net = wrap(Chain(), gradient_as_bucket_view=views, bucket_cap_mb=0.00001)
        three(net, rank, 0)
        assert_grads(net, expected_grads(Chain, world, three))


@batch.add
def scaled_between_backwards(rank: int, world: int) -> None:
    """What the user does to .grad between two backwards is respected."""

    def step(net: nn.Module, rank: int, step: int) -> None:
        _step(net, rank, 0)
        for p in net.parameters():
            p.grad.mul_(0.5)
        _step(net, rank, 1)

    for views in (False, True):
        net = wrap(Chain(), gradient_as_bucket_view=views)
        step(net, rank, 0)
        assert_grads(net, expected_grads(Chain, world, step))


@batch.add
def a_gradient_set_by_hand_counts(rank: int, world: int) -> None:
    """As with torch's class: the whole .grad is averaged, whoever put it there."""

    def step(net: nn.Module, rank: int, step: int) -> None:
        for p in net.parameters():
            p.grad = torch.full_like(p, float(rank))
        _step(net, rank, 0)

    for views in (False, True):
        net = wrap(Chain(), gradient_as_bucket_view=views)
        step(net, rank, 0)
        assert_grads(net, expected_grads(Chain, world, step))


@batch.add
def copied_in_one_go(rank: int, world: int) -> None:
    for views in (False, True):
        train_and_compare(
            Wide,
            rank,
            world,
            _wide_step,
            steps=3,
            batched_grad_copy=True,
            gradient_as_bucket_view=views,
            bucket_cap_mb=8 * KIB,
        )


@batch.add
def views_and_no_sync(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        with no_sync(net):
            _step(net, rank, 10 * step)
        _step(net, rank, 10 * step + 1)

    net = wrap(Chain(), gradient_as_bucket_view=True, bucket_cap_mb=0.00001)
    train_and_compare(Chain, rank, world, step, steps=3, net=net)


@batch.add
def it_goes_when_nobody_holds_it(rank: int, world: int) -> None:
    """Neither hooks on parameters nor the registry of modules keep a wrapper alive."""
    module = Chain()
    net = wrap(module)
    _step(net, rank, 0)
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
    module.zero_grad()
    train_and_compare(Chain, rank, world, _step, net=wrap(module))


@batch.add
def wrapped_again_the_old_one_is_silent(rank: int, world: int) -> None:
    """The gradients are averaged once, not twice."""
    module = Chain()
    for _ in range(3):
        net = wrap(module)
        _step(net, rank, 0)
        assert_grads(net, expected_grads(Chain, world, _step))
        net.zero_grad()
        net._remove_autograd_hooks()


@batch.add
def gradients_as_views_are_there_once(rank: int, world: int) -> None:
    """What autograd has made is let go of as soon as it is in the bucket."""
    if not wrap(Chain()).exchange.startswith("shm"):
        return  # There gradients are scaled on their way, and what comes late must be told apart.
    layers = [nn.Linear(200, 200, bias=False) for _ in range(4)]
    net = wrap(nn.Sequential(*layers), gradient_as_bucket_view=True)
    made: list[int] = []
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: made.append(p.grad.data_ptr()))
    held: list[int] = []

    def look(_grad: Tensor) -> None:
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        held.append(sum(grad.data_ptr() in made for grad in grads))

    layers[0].weight.register_hook(look)
    for step in range(3):
        made.clear()
        net(torch.ones(2, 200) * (rank + step)).square().mean().backward()
        assert len(made) == 4 and held[-1] == 0, held
        net.zero_grad()


@batch.add
def buckets_take_no_descriptors(rank: int, world: int) -> None:
    """A process has a thousand of them, and a model may have more buckets."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(80)])

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack(list(self.each)).sum() * x

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    net = wrap(Many(), bucket_cap_mb=1e-6)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, limits[1]))
    try:
        with noticed() as said:
            for _ in range(2):
                net.zero_grad()
                net(torch.tensor(rank + 1.0)).backward()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(net.reducer.fleet.plan) == 80 and not said, said
    assert {p.grad.item() for p in net.parameters()} == {(world + 1) / 2}


@batch.add
def modules_take_no_descriptors(rank: int, world: int) -> None:
    """However many models ranks train together, one descriptor tells them that another lives."""
    nets = [wrap(Chain())]
    before = len(os.listdir("/proc/self/fd"))
    nets += [wrap(Chain()) for _ in range(20)]
    for net in nets:
        net(rows(rank)).sum().backward()
    assert len(os.listdir("/proc/self/fd")) <= before + 3


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_buckets(name: str, world: int) -> None:
    batch.check(name, world)
