"""_set_params_and_buffers_to_ignore_for_model: what is named there stays this rank's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.process.batch import WORLDS, Batch
from tests.process.reference import (
    Chain,
    assert_replicas_equal,
    ddp_class,
    expected_grads,
    grads_of_ranks,
    rows,
    wrap,
)

batch = Batch()


class Buffered(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mine", torch.zeros(1))
        self.register_buffer("ours", torch.zeros(1))


def _step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step)).square().mean().backward()


def _ignoring(module: nn.Module, *names: str) -> Any:
    ddp_class()._set_params_and_buffers_to_ignore_for_model(module, list(names))
    return wrap(module)


@batch.add
def a_parameter(rank: int, world: int) -> None:
    net = _ignoring(Chain(), "middle.weight")
    local = grads_of_ranks(Chain, world, _step)[rank]
    expected = expected_grads(Chain, world, _step)
    for _ in range(2):
        net.zero_grad()
        _step(net, rank, 0)
        for name, p in net.module.named_parameters():
            wanted = local if name == "middle.weight" else expected
            torch.testing.assert_close(p.grad, wanted[name], rtol=1e-4, atol=1e-6)
    assert "middle.weight" in net.parameters_to_ignore


@batch.add
def a_parameter_keeps_its_value_at_wrapping(rank: int, world: int) -> None:
    module = Chain()
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(rank)
    net = _ignoring(module, "last.bias")
    for name, p in net.module.named_parameters():
        assert (p == (rank if name == "last.bias" else 0)).all(), name


@batch.add
def a_buffer(rank: int, world: int) -> None:
    module = Buffered()
    module.mine.fill_(rank)
    module.ours.fill_(rank)
    net = _ignoring(module, "mine")
    _step(net, rank, 0)
    assert net.module.mine.item() == rank and net.module.ours.item() == 0
    assert set(net.named_module_buffers) == {"ours"}


@batch.add
def a_parameter_that_exists_on_one_rank_only(rank: int, world: int) -> None:
    """The ranks' models may differ in what is ignored."""
    module = Chain()
    if rank == 0:
        module.extra = nn.Linear(3, 3)
    net = _ignoring(module, "extra.weight", "extra.bias")
    _step(net, rank, 0)
    assert_replicas_equal([p.grad for n, p in net.module.named_parameters() if "extra" not in n])


@batch.add
def what_is_left_for_the_optimizer(rank: int, world: int) -> None:
    net = _ignoring(Chain(), "first.weight")
    managed = {id(p) for p in ddp_class()._get_data_parallel_params(net.module)}
    assert managed == {id(p) for n, p in net.module.named_parameters() if n != "first.weight"}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_ignored(name: str, world: int) -> None:
    batch.check(name, world)
