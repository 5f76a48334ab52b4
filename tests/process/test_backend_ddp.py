"""torch's own DistributedDataParallel over a "closeranks" group equals itself over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import closeranks
from tests.ranks import run_ranks


def _net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(64, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 3)
    )


def _train(rank: int, **options: Any) -> list[bytes]:
    """The bits of all parameters after six steps, two of them accumulating."""
    backend_group = options.pop("group", None)
    net = DistributedDataParallel(_net(), process_group=backend_group, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        x = torch.randn(8, 64, generator=generator)
        if step in (2, 3):
            with net.no_sync():
                net(x).square().mean().backward()
            continue
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.detach().numpy().tobytes() for value in net.module.parameters()]


def _compare(rank: int, options: dict[str, Any]) -> list[bytes]:
    ours = _train(rank, **options)
    theirs = _train(rank, group=dist.new_group(backend="gloo"), **options)
    assert ours == theirs
    return ours


@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 0.1, "gradient_as_bucket_view": True}, {"find_unused_parameters": True}],
    ids=["default", "small-buckets", "unused"],
)
def test_torchs_class_ends_with_the_bits_of_gloo(options: dict[str, Any]) -> None:
    first, second = run_ranks(2, _compare, options, backend="closeranks")
    assert first == second


def _compress(rank: int, wrap: type) -> list[bytes]:
    """PowerSGD waits for collectives in callbacks of others."""
    net = wrap(_net())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        net.zero_grad()
        net(torch.randn(8, 64)).square().mean().backward()
    return [value.grad.numpy().tobytes() for value in net.module.parameters()]


@pytest.mark.parametrize(
    "wrap", [DistributedDataParallel, closeranks.DistributedDataParallel], ids=["torchs", "ours"]
)
def test_a_hook_whose_callbacks_wait(wrap: type) -> None:
    first, second = run_ranks(2, _compress, wrap, backend="closeranks")
    assert first == second


def _compile(rank: int) -> list[bytes]:
    """The compiler sees every call that C++ makes of a method in Python."""
    net = torch.compile(DistributedDataParallel(_net()), backend="eager")
    for _ in range(2):
        net(torch.randn(8, 64)).square().mean().backward()
    return [value.grad.numpy().tobytes() for value in net.parameters()]


def test_torchs_class_can_be_compiled() -> None:
    first, second = run_ranks(2, _compile, backend="closeranks")
    assert first == second


def _run_out_of_data(rank: int) -> list[bytes]:
    """Here C++ alone holds a work of ours until it asks how many ranks still train."""
    net = DistributedDataParallel(_net())
    with net.join(divide_by_initial_world_size=False):
        for _ in range(3 + rank):
            net(torch.randn(8, 64)).square().mean().backward()
    return [value.detach().numpy().tobytes() for value in net.parameters()]


def test_ranks_may_run_out_of_data() -> None:
    first, second = run_ranks(2, _run_out_of_data, backend="closeranks")
    assert first == second


def _profile(rank: int) -> list[str]:
    net = DistributedDataParallel(_net())
    with torch.profiler.profile() as profile:
        net(torch.randn(8, 64)).square().mean().backward()
        dist.barrier()
    return [event.name for event in profile.events() if event.name.startswith("closeranks:")]


def test_a_profile_shows_collectives_as_with_gloo() -> None:
    for names in run_ranks(2, _profile, backend="closeranks"):
        assert {"closeranks:all_reduce", "closeranks:broadcast", "closeranks:barrier"} <= set(names)
