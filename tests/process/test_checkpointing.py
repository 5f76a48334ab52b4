"""Activation checkpointing, reentrant and not, inside and around the wrapped module.

A reentrant checkpoint runs a backward of its own inside the outer one. A layer in two of them fires
its hooks twice in one backward.
"""

from __future__ import annotations

import copy
import os
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from closeranks import DistributedDataParallel
from tests.process.batch import WORLDS, Batch
from tests.process.reference import Chain, no_sync, rows, train_and_compare

batch = Batch()

VIEWS = (False, True)


class Checkpointed(Chain):
    """The middle layer runs in `times` checkpoints, one after the other."""

    def __init__(self, reentrant: bool, times: int = 1) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        for _ in range(self.times):
            hidden = checkpoint(self._middle, hidden, use_reentrant=self.reentrant)
        return self.last(hidden)

    def _middle(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.middle(hidden))


class AllInside(Chain):
    """Everything runs in one checkpoint, or each layer in its own."""

    def __init__(self, reentrant: bool, apart: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.apart = apart

    def forward(self, x: Tensor) -> Tensor:
        if not self.apart:
            return checkpoint(super().forward, x, use_reentrant=self.reentrant)
        for layer in (self.first, self.middle, self.last):
            x = checkpoint(layer, torch.tanh(x), use_reentrant=self.reentrant)
        return x


class Nested(Chain):
    """A reentrant checkpoint within a reentrant checkpoint, sharing a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self._outer, self.first(x), use_reentrant=True))

    def _outer(self, x: Tensor) -> Tensor:
        return checkpoint(self._inner, self.middle(x), use_reentrant=True)

    def _inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.middle(torch.tanh(x)))


class SometimesUnused(Checkpointed):
    """The checkpointed layer takes part where `use` says so."""

    def __init__(self) -> None:
        super().__init__(reentrant=True)

    def forward(self, x: Tensor, use: bool = True) -> Tensor:
        return super().forward(x) if use else self.last(torch.tanh(self.first(x)))


def _step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step).requires_grad_()).square().mean().backward()


def _compare_all(make: Any, rank: int, world: int, *, find_unused: tuple[bool, ...]) -> None:
    for find in find_unused:
        for views in VIEWS:
            train_and_compare(
                make,
                rank,
                world,
                _step,
                steps=3,
                find_unused_parameters=find,
                gradient_as_bucket_view=views,
            )


@batch.add
def a_layer_in_one_checkpoint(rank: int, world: int) -> None:
    _compare_all(partial(Checkpointed, reentrant=False), rank, world, find_unused=(False, True))
    _compare_all(partial(Checkpointed, reentrant=True), rank, world, find_unused=(False,))


@batch.add
def a_layer_in_a_reentrant_checkpoint_with_find_unused(rank: int, world: int) -> None:
    _compare_all(partial(Checkpointed, reentrant=True), rank, world, find_unused=(True,))


@batch.add
def a_layer_in_two_checkpoints(rank: int, world: int) -> None:
    make = partial(Checkpointed, reentrant=False, times=2)
    _compare_all(make, rank, world, find_unused=(False, True))


@batch.add
def a_layer_in_two_reentrant_checkpoints(rank: int, world: int) -> None:
    make = partial(Checkpointed, reentrant=True, times=2)
    _compare_all(make, rank, world, find_unused=(False, True))


@batch.add
def a_layer_in_three_reentrant_checkpoints_with_small_buckets(rank: int, world: int) -> None:
    make = partial(Checkpointed, reentrant=True, times=3)
    train_and_compare(make, rank, world, _step, steps=3, bucket_cap_mb=0.00001)


@batch.add
def a_layer_in_two_reentrant_checkpoints_and_a_static_graph(rank: int, world: int) -> None:
    make = partial(Checkpointed, reentrant=True, times=2)
    train_and_compare(make, rank, world, _step, steps=3, static_graph=True)


@batch.add
def a_different_number_of_checkpoints_on_every_rank(rank: int, world: int) -> None:
    """Late gradients on some ranks only: rank r runs its layer in r+1 checkpoints."""

    def step(net: Any, rank: int, step: int) -> None:
        getattr(net, "module", net).times = rank + 1
        _step(net, rank, step)

    make = partial(Checkpointed, reentrant=True)
    train_and_compare(make, rank, world, step, steps=3)
    train_and_compare(make, rank, world, step, steps=3, bucket_cap_mb=0.00001)


@batch.add
def everything_in_one_checkpoint(rank: int, world: int) -> None:
    for reentrant in (False, True):
        make = partial(AllInside, reentrant=reentrant, apart=False)
        _compare_all(make, rank, world, find_unused=(False,))


@batch.add
def every_layer_in_a_checkpoint_of_its_own(rank: int, world: int) -> None:
    for reentrant in (False, True):
        make = partial(AllInside, reentrant=reentrant, apart=True)
        _compare_all(make, rank, world, find_unused=(False,))


@batch.add
def reentrant_all_over_with_find_unused(rank: int, world: int) -> None:
    for apart in (False, True):
        make = partial(AllInside, reentrant=True, apart=apart)
        _compare_all(make, rank, world, find_unused=(True,))


@batch.add
def a_checkpoint_around_the_wrapped_module(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        x = rows(rank, step).requires_grad_()
        checkpoint(net, x, use_reentrant=False).square().mean().backward()

    for views in VIEWS:
        train_and_compare(Chain, rank, world, step, steps=3, gradient_as_bucket_view=views)


@batch.add
def a_reentrant_checkpoint_around_the_wrapped_module(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        x = rows(rank, step).requires_grad_()
        checkpoint(net, x, use_reentrant=True).square().mean().backward()

    for views in VIEWS:
        train_and_compare(Chain, rank, world, step, steps=3, gradient_as_bucket_view=views)


@batch.add
def two_reentrant_checkpoints_around_the_wrapped_module(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        loss = torch.zeros(())
        for part in (step, step + 100):
            x = rows(rank, part).requires_grad_()
            loss = loss + checkpoint(net, x, use_reentrant=True).square().mean()
        loss.backward()

    train_and_compare(Chain, rank, world, step, steps=3)


@batch.add
def checkpoints_within_checkpoints(rank: int, world: int) -> None:
    train_and_compare(Nested, rank, world, _step, steps=3)
    train_and_compare(Nested, rank, world, _step, steps=2, bucket_cap_mb=0.00001)


@batch.add
def checkpointed_layers_used_on_some_ranks_only(rank: int, world: int) -> None:
    def step(net: Any, rank: int, step: int) -> None:
        out = net(rows(rank, step).requires_grad_(), (rank + step) % 2 == 0)
        out.square().mean().backward()

    for find in (False, True):
        train_and_compare(SometimesUnused, rank, world, step, steps=3, find_unused_parameters=find)


@batch.add
def a_sequential_in_segments(rank: int, world: int) -> None:
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(7)
            self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint_sequential(self.layers, 3, x, use_reentrant=True)

    train_and_compare(Segments, rank, world, _step, steps=3)


@batch.add
def accumulation_with_reentrant_checkpoints(rank: int, world: int) -> None:
    def step(net: Any, rank: int, step: int) -> None:
        with no_sync(net):
            _step(net, rank, 10 * step)
        _step(net, rank, 10 * step + 1)

    train_and_compare(partial(Checkpointed, reentrant=True), rank, world, step, steps=3)


@batch.add
def accumulation_with_a_layer_in_two_reentrant_checkpoints(rank: int, world: int) -> None:
    def step(net: Any, rank: int, step: int) -> None:
        with no_sync(net):
            _step(net, rank, 10 * step)
        _step(net, rank, 10 * step + 1)
        _step(net, rank, 10 * step + 2)

    make = partial(Checkpointed, reentrant=True, times=2)
    train_and_compare(make, rank, world, step, steps=3)


class Large(nn.Module):
    """One layer, large enough to be copied into its bucket at once, in two checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(128, 128)
        self.twice = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for _ in range(2):
            x = checkpoint(self.twice, x, use_reentrant=True)
        return x


@batch.add
def gradients_that_stay_views_are_scaled_once_by_a_group(rank: int, world: int) -> None:
    """What autograd adds to a view in the second checkpoint must not find it scaled already."""
    torch.manual_seed(0)
    plain = Large()
    with patch.dict(os.environ, {"CLOSERANKS_EXCHANGE": "group"}):
        net = DistributedDataParallel(copy.deepcopy(plain), gradient_as_bucket_view=True)
    for step in range(3):
        inputs = [rows(each, step, width=128) for each in range(world)]
        net.zero_grad(set_to_none=False)
        net(inputs[rank]).square().mean().backward()
        plain.zero_grad()
        for each in inputs:
            (plain(each).square().mean() / world).backward()
        for ours, expected in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_checkpointing(name: str, world: int) -> None:
    batch.check(name, world)
