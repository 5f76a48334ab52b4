"""_get_ddp_logging_data: torch's keys, with values that are true of this training."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.process.batch import WORLDS, Batch
from tests.process.reference import Branches, Chain, rows, wrap

batch = Batch()


def _step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step)).square().mean().backward()


def _trained(net: Any, rank: int, steps: int = 3) -> dict[str, Any]:
    for step in range(steps):
        _step(net, rank, step)
        net.zero_grad()
    return net._get_ddp_logging_data()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.replace(",", " ").split()]


@batch.add
def the_keys_are_those_of_torch(rank: int, world: int) -> None:
    ours = _trained(wrap(Chain()), rank)
    theirs = _trained(TorchDDP(Chain()), rank)
    assert not set(theirs) - set(ours), f"missing: {set(theirs) - set(ours)}"
    for key, value in theirs.items():
        assert isinstance(ours[key], type(value)), f"{key}: {ours[key]!r}, torch: {value!r}"


@batch.add
def construction_agrees_with_torch(rank: int, world: int) -> None:
    for options in (
        {},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"static_graph": True, "bucket_cap_mb": 1},
    ):
        ours = wrap(Chain(), **options)._get_ddp_logging_data()
        theirs = TorchDDP(Chain(), **options)._get_ddp_logging_data()
        for key in (
            *("world_size", "rank", "module_name", "backend_name", "device_ids", "output_device"),
            *("is_multi_device_module", "has_sync_bn", "static_graph", "broadcast_buffers"),
            *("bucket_cap_bytes", "find_unused_parameters", "gradient_as_bucket_view"),
            *("num_parameter_tensors", "total_parameter_size_bytes", "dtypes"),
            *("join_uneven_inputs", "torch_distributed_debug", "gloo_socket_ifname"),
        ):
            wanted = theirs.get(key, 0)  # torch leaves out what is not set
            assert ours.get(key, 0) == wanted, f"{key}: {ours[key]!r}, torch: {wanted!r}"


@batch.add
def bucket_sizes_add_up(rank: int, world: int) -> None:
    total = sum(p.numel() * p.element_size() for p in Chain().parameters())
    for cap in (None, 0.00001):
        data = _trained(wrap(Chain(), bucket_cap_mb=cap), rank)
        assert sum(_numbers(data["bucket_sizes"])) == total == data["total_parameter_size_bytes"]
        assert sum(_numbers(data["rebuilt_bucket_sizes"])) == total
        assert (len(_numbers(data["rebuilt_bucket_sizes"])) > 1) == (cap is not None)


@batch.add
def what_happened_in_the_last_iteration(rank: int, world: int) -> None:
    net = wrap(Chain(), bucket_cap_mb=0.00001)
    data = _trained(net, rank, steps=4)
    count = len(list(net.parameters()))
    assert data["has_rebuilt_buckets"] == 1
    order = _numbers(data["prev_iteration_grad_ready_order_indices"])
    assert sorted(order) == list(range(count)), order
    assert order[0] in (count - 2, count - 1), "the last layer's gradients come first"
    assert data["num_buckets_reduced"] == len(_numbers(data["rebuilt_bucket_sizes"]))
    assert data["iteration"] >= 3


@batch.add
def times_are_of_this_iteration(rank: int, world: int) -> None:
    data = _trained(wrap(Chain()), rank, steps=5)
    for name in (
        *("forward_compute_time", "backward_compute_time", "backward_comm_time"),
        *("avg_forward_compute_time", "avg_backward_compute_time", "avg_backward_comm_time"),
    ):
        nanoseconds = int(data[name])
        assert 0 < nanoseconds < 30e9, f"{name} is {nanoseconds} ns"
    assert int(data["backward_compute_comm_overlap_time"]) >= 0
    starts = [int(data[f"{part}_time_start"]) for part in ("forward_compute", "backward_compute")]
    assert 0 < starts[0] < starts[1] < int(data["backward_compute_time_end"])


@batch.add
def unused_parameters_have_a_size(rank: int, world: int) -> None:
    net = wrap(Branches(), find_unused_parameters=True)
    for step in range(3):
        net(rows(rank, step), (0,)).square().mean().backward()
        net.zero_grad()
    data = net._get_ddp_logging_data()
    unused = [p for n, p in net.module.named_parameters() if n.startswith(("heads.1", "heads.2"))]
    assert data["unused_parameter_size"] == sum(p.numel() * p.element_size() for p in unused)


@batch.add
def hooks_and_join_are_named(rank: int, world: int) -> None:
    net = wrap(Chain())
    assert not net._get_ddp_logging_data().get("comm_hook")
    net.register_comm_hook(None, default_hooks.allreduce_hook)
    assert net._get_ddp_logging_data()["comm_hook"] == "allreduce_hook"
    with net.join():
        _step(net, rank, 0)
    assert net._get_ddp_logging_data()["join_uneven_inputs"]


@batch.add
def whether_the_graph_could_be_static(rank: int, world: int) -> None:
    assert _trained(wrap(Chain()), rank)["can_set_static_graph"]
    changing = wrap(Branches(), find_unused_parameters=True)
    for step in range(3):
        changing(rows(rank, step), (step % 3,)).square().mean().backward()
        changing.zero_grad()
    assert not changing._get_ddp_logging_data()["can_set_static_graph"]


@batch.add
def several_dtypes_and_a_sample_rate(rank: int, world: int) -> None:
    net = wrap(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64)]))
    dtypes = net._get_ddp_logging_data()["dtypes"]
    assert sorted(part.strip() for part in dtypes.split(",")) == ["double", "float"], dtypes
    other = wrap(Chain())
    other._set_ddp_runtime_logging_sample_rate(1)
    assert _trained(other, rank, steps=13)["iteration"] >= 12


@batch.add
def an_error_is_kept(rank: int, world: int) -> None:
    net = wrap(Chain())
    assert not net._get_ddp_logging_data().get("has_error")
    with pytest.raises(TypeError):
        net.register_comm_hook(None, 1)
    data = net._get_ddp_logging_data()
    assert data["has_error"] and "must be callable" in data["error"]


@batch.add
def the_environment(rank: int, world: int) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.9"
    assert wrap(Chain())._get_ddp_logging_data()["master_addr"] == "127.0.0.9"


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_logging_data(name: str, world: int) -> None:
    batch.check(name, world)
