"""static_graph=True: the promise that the graph stays, with no_sync first, unused parameters, and
several backwards; and the error of a graph that changes all the same.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from tests.process.batch import WORLDS, Batch
from tests.process.noticed import noticed
from tests.process.reference import Branches, Chain, no_sync, rows, train_and_compare, wrap

batch = Batch()


def _step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step)).square().mean().backward()


def _one_head(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step), (0,)).square().mean().backward()


def _compare(make: Any, rank: int, world: int, step: Any, **options: Any) -> None:
    for views in (False, True):
        for find in (False, True):
            train_and_compare(
                make,
                rank,
                world,
                step,
                steps=4,
                static_graph=True,
                gradient_as_bucket_view=views,
                find_unused_parameters=find,
                **options,
            )


@batch.add
def a_plain_loop(rank: int, world: int) -> None:
    _compare(Chain, rank, world, _step)


@batch.add
def parameters_unused_everywhere(rank: int, world: int) -> None:
    _compare(Branches, rank, world, _one_head)


@batch.add
def parameters_unused_by_rank(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        net(rows(rank, step), (rank,)).square().mean().backward()

    _compare(Branches, rank, world, step)


@batch.add
def no_sync_first(rank: int, world: int) -> None:
    def step(net: Any, rank: int, step: int) -> None:
        with no_sync(net):
            for micro in range(2):
                _step(net, rank, 10 * step + micro)
        _step(net, rank, 10 * step + 2)

    _compare(Chain, rank, world, step)


@batch.add
def no_sync_first_with_unused_parameters(rank: int, world: int) -> None:
    def step(net: Any, rank: int, step: int) -> None:
        with no_sync(net):
            _one_head(net, rank, 10 * step)
        _one_head(net, rank, 10 * step + 1)

    _compare(Branches, rank, world, step)


@batch.add
def no_sync_later(rank: int, world: int) -> None:
    def step(net: Any, rank: int, step: int) -> None:
        if step % 2:
            with no_sync(net):
                _step(net, rank, 10 * step)
        _step(net, rank, 10 * step + 1)

    _compare(Chain, rank, world, step)


@batch.add
def two_forwards_one_backward(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        first = net(rows(rank, step)).square().mean()
        (first + net(rows(rank, step + 100)).square().mean()).backward()

    _compare(Chain, rank, world, step)


@batch.add
def a_shared_layer(rank: int, world: int) -> None:
    class Shared(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.middle(self.middle(self.first(x))))

    _compare(Shared, rank, world, _step)


@batch.add
def one_backward_for_each_output(rank: int, world: int) -> None:
    class Two(Branches):
        def forward(self, x: Tensor, uses: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
            return super().forward(x, (0,)), super().forward(x, (1, 2))

    def step(net: nn.Module, rank: int, step: int) -> None:
        first, second = net(rows(rank, step))
        first.square().mean().backward()
        second.square().mean().backward()

    _compare(Two, rank, world, step)


@batch.add
def two_forwards_two_backwards(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        first = net(rows(rank, step)).square().mean()
        second = net(rows(rank, step + 100)).square().mean()
        first.backward()
        second.backward()

    _compare(Chain, rank, world, step)


@batch.add
def set_after_construction(rank: int, world: int) -> None:
    net = wrap(Chain())
    net._set_static_graph()
    assert net.static_graph
    with noticed() as said:
        net._set_static_graph()
    assert any("no need to set it again" in text for text in said)
    train_and_compare(Chain, rank, world, _step, steps=3, net=net)


@batch.add
def set_too_late(rank: int, world: int) -> None:
    net = wrap(Chain())
    _step(net, rank, 0)
    with pytest.raises(RuntimeError, match="should be called before training loop starts"):
        net._set_static_graph()


@batch.add
def a_graph_that_grows_is_an_error(rank: int, world: int) -> None:
    net = wrap(Branches(), static_graph=True)
    for step in range(2):
        _one_head(net, rank, step)
        net.zero_grad()
    with pytest.raises(RuntimeError, match="Your training graph has changed in this iteration"):
        net(rows(rank), (0, 1)).square().mean().backward()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_static_graph(name: str, world: int) -> None:
    batch.check(name, world)
