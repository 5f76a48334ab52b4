"""delay_all_reduce_named_params: parameters exchanged in one piece when another's is ready."""

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
    reference_grads,
    rows,
    wrap,
)

batch = Batch()


def _step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step)).square().mean().backward()


def _wrapped(names: tuple[str, ...], hook: str, **options: Any) -> Any:
    module = Chain()
    named = dict(module.named_parameters())
    return wrap(
        module,
        delay_all_reduce_named_params=[(name, named[name]) for name in names],
        param_to_hook_all_reduce=named[hook],
        **options,
    )


@batch.add
def some_parameters(rank: int, world: int) -> None:
    """The gradient of the first layer comes last: the others' are complete by then."""
    for views in (False, True):
        net = _wrapped(("last.weight", "last.bias"), "first.weight", gradient_as_bucket_view=views)
        _step(net, rank, 0)
        assert_grads(net, expected_grads(Chain, world, _step))


@batch.add
def over_several_steps(rank: int, world: int) -> None:
    net = _wrapped(("last.weight", "middle.weight"), "first.weight")
    reference = Chain()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        _step(net, rank, step)
        expected = reference_grads(reference, world, _step, step)
        assert_grads(net, expected)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, p in reference.named_parameters():
                p -= 0.1 * expected[name]
    assert_replicas_equal(list(net.parameters()))


@batch.add
def all_parameters(rank: int, world: int) -> None:
    """The one that is waited for, too; and rank 0's values are everybody's, as ever."""
    module = Chain()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(rank)
    net = wrap(
        module,
        delay_all_reduce_named_params=list(module.named_parameters()),
        param_to_hook_all_reduce=module.first.weight,
    )
    assert_replicas_equal(list(net.parameters()))
    for step in range(2):
        _step(net, rank, step)
        reference = Chain()
        assert_grads(net, reference_grads(reference, world, _step, step))
        net.zero_grad()


@batch.add
def only_one_of_the_two_arguments(rank: int, world: int) -> None:
    module = Chain()
    both = "need to be set at the same time"
    with pytest.raises(ValueError, match=both):
        wrap(module, delay_all_reduce_named_params=[("last.bias", module.last.bias)])
    with pytest.raises(ValueError, match=both):
        wrap(module, param_to_hook_all_reduce=module.last.bias)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_delayed(name: str, world: int) -> None:
    batch.check(name, world)
