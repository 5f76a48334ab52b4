"""deepcopy, pickle and state_dict of the wrapped module.

A pickle names the ranks of its group. It loads into the live group with the same ranks, else into
the default group, with a warning.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from tests.process.batch import WORLDS, Batch
from tests.process.noticed import noticed
from tests.process.reference import Chain, assert_replicas_equal, rows, train_and_compare, wrap

batch = Batch()


def _step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step)).square().mean().backward()


@batch.add
def deepcopy(rank: int, world: int) -> None:
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        net = wrap(Chain(), **options)
        twin = copy.deepcopy(net)
        assert twin.module is not net.module
        train_and_compare(Chain, rank, world, _step, steps=2, net=twin)
        train_and_compare(Chain, rank, world, _step, steps=2, net=net)


@batch.add
def deepcopy_in_the_middle_of_training(rank: int, world: int) -> None:
    net = wrap(Chain())
    _step(net, rank, 0)
    net.zero_grad()
    twin = copy.deepcopy(net)
    train_and_compare(Chain, rank, world, _step, steps=2, net=twin)


@batch.add
def pickled_with_the_default_group(rank: int, world: int) -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        net = wrap(Chain(), **options)
        with noticed() as said:
            loaded = pickle.loads(pickle.dumps(net))
        assert not said, said
        assert type(loaded) is type(net)
        assert loaded.process_group == net.process_group
        assert loaded.gradient_as_bucket_view == net.gradient_as_bucket_view
        assert loaded.static_graph == net.static_graph
        train_and_compare(Chain, rank, world, _step, steps=2, net=loaded)


@batch.add
def saved_by_torch(rank: int, world: int) -> None:
    file = io.BytesIO()
    torch.save(wrap(Chain()), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    train_and_compare(Chain, rank, world, _step, steps=2, net=loaded)


@batch.add
def pickled_with_the_options_that_matter(rank: int, world: int) -> None:
    net = wrap(Chain(), find_unused_parameters=True, bucket_cap_mb=0.5, forward_sync_buffers=False)
    loaded = pickle.loads(pickle.dumps(net))
    for name in ("find_unused_parameters", "bucket_bytes_cap", "broadcast_buffers", "dim"):
        assert getattr(loaded, name) == getattr(net, name), name


@batch.add
def a_group_of_ones_own_that_lives(rank: int, world: int) -> None:
    """Ranks 0 and 1 train by themselves; the pickle finds their group again."""
    pair = dist.new_group([0, 1])
    if rank < 2:
        net = wrap(Chain(), process_group=pair)
        with noticed() as said:
            loaded = pickle.loads(pickle.dumps(net))
        assert not said, said
        assert dist.get_process_group_ranks(loaded.process_group) == [0, 1]
        if world > 2:
            assert loaded.process_group is pair
        _step(loaded, rank, 0)
        assert_replicas_equal([p.grad for p in loaded.parameters()], pair)


@batch.add
def a_group_of_ones_own_that_is_gone(rank: int, world: int) -> None:
    """Each rank pickled in a group of itself; later there is only the default group."""
    alone = [dist.new_group([r]) for r in range(world)]
    data = pickle.dumps(wrap(Chain(), process_group=alone[rank]))
    for group in alone:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    with noticed() as said:
        loaded = pickle.loads(data)
    assert len(said) == 1 and "group" in said[0], f"one warning wanted, got {said}"
    assert loaded.process_group == dist.group.WORLD
    train_and_compare(Chain, rank, world, _step, steps=2, net=loaded)


@batch.add
def state_dict(rank: int, world: int) -> None:
    net = wrap(Chain())
    state = net.state_dict()
    assert list(state) == [f"module.{name}" for name in Chain().state_dict()]
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1.0)
    changed: dict[str, Any] = copy.deepcopy(net.state_dict())
    fresh = wrap(Chain())
    fresh.load_state_dict(changed)
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, changed[name]), name
    consume_prefix_in_state_dict_if_present(changed, "module.")
    Chain().load_state_dict(changed)


@batch.add
def training_goes_on_after_load_state_dict(rank: int, world: int) -> None:
    net = wrap(Chain())
    _step(net, rank, 5)
    net.zero_grad()
    state = {f"module.{name}": tensor for name, tensor in Chain().state_dict().items()}
    net.load_state_dict(state)
    train_and_compare(Chain, rank, world, _step, steps=2, net=net)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_pickle(name: str, world: int) -> None:
    batch.check(name, world)
