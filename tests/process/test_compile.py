"""torch.compile of what is wrapped and of the wrapper: the gradients stay right.

The wrapper's graph is split where buckets end, so that their exchange overlaps the backward: dynamo
learns the bucket size from `_active_ddp_module`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.process.batch import Batch
from tests.process.reference import (
    Branches,
    Chain,
    no_sync,
    rows,
    train_and_compare,
    unwrapped,
    wrap,
)
from tests.ranks import run_ranks

batch = Batch(deadline_s=150.0)


def _step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step)).square().mean().backward()


def _compare(
    rank: int, world: int, compiled: Any, net: Any, make: Any = Chain, steps: int = 3
) -> None:
    """Train through the compiled callable; compare the gradients of the wrapped module."""

    def step(module: nn.Module, r: int, i: int) -> None:
        _step(compiled if module is net else module, r, i)

    train_and_compare(make, rank, world, step, steps=steps, net=net)


@batch.add
def the_wrapped_module(rank: int, world: int) -> None:
    torch._dynamo.reset()
    module = Chain()
    module.compile(backend="aot_eager")
    net = wrap(module)
    _compare(rank, world, net, net)


@batch.add
def an_optimized_module_inside(rank: int, world: int) -> None:
    torch._dynamo.reset()
    net = wrap(torch.compile(Chain(), backend="aot_eager"))

    def make() -> nn.Module:
        return torch.compile(Chain(), backend="eager")

    train_and_compare(make, rank, world, _step, steps=3, net=net)


@batch.add
def the_wrapper(rank: int, world: int) -> None:
    torch._dynamo.reset()
    net = wrap(Chain(), gradient_as_bucket_view=True)
    _compare(rank, world, torch.compile(net, backend="aot_eager"), net)


@batch.add
def the_wrapper_in_place(rank: int, world: int) -> None:
    torch._dynamo.reset()
    net = wrap(Chain())
    net.compile(backend="aot_eager")
    _compare(rank, world, net, net)


@batch.add
def a_function_around_the_wrapper(rank: int, world: int) -> None:
    torch._dynamo.reset()
    net = wrap(Chain())

    @torch.compile(backend="aot_eager")
    def forward(x: Tensor) -> Tensor:
        return net(x) * 2.0 / 2.0

    _compare(rank, world, forward, net)


@batch.add
def unused_parameters(rank: int, world: int) -> None:
    torch._dynamo.reset()
    net = wrap(Branches(), find_unused_parameters=True)
    compiled = torch.compile(net, backend="aot_eager")

    def step(module: nn.Module, r: int, i: int) -> None:
        called = compiled if module is net else module
        called(rows(r, i), ((r + i) % 3,)).square().mean().backward()

    train_and_compare(Branches, rank, world, step, steps=3, net=net)


@batch.add
def accumulation(rank: int, world: int) -> None:
    torch._dynamo.reset()
    net = wrap(Chain())
    compiled = torch.compile(net, backend="aot_eager")

    def step(module: nn.Module, r: int, i: int) -> None:
        called = compiled if module is net else module
        with no_sync(module):
            _step(called, r, 10 * i)
        _step(called, r, 10 * i + 1)

    train_and_compare(Chain, rank, world, step, steps=3, net=net)


class Megabytes(nn.Module):
    """Three layers of 1 MiB each: the least that dynamo puts into a bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.repeat(1, 128))


def _graphs(rank: int, world: int, optimize_ddp: bool) -> int:
    """How many graphs the wrapper is compiled into, with a bucket for every layer."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    net = wrap(Megabytes(), bucket_cap_mb=1)
    with torch._dynamo.config.patch(optimize_ddp=optimize_ddp):
        _compare(rank, world, torch.compile(net, backend=counter), net, Megabytes, steps=2)
    return len(counter.graphs)


@batch.add
def the_graph_is_split_where_buckets_end(rank: int, world: int) -> None:

    whole, split = (_graphs(rank, world, wanted) for wanted in (False, True))
    assert whole == 1, f"{whole} graphs without the split"
    assert split == 3, f"{split} graphs for three layers"


@batch.add
def nothing_is_active_outside_a_forward(rank: int, world: int) -> None:
    class Spy(Chain):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch_class._get_active_ddp_module())
            return super().forward(x)

    torch_class = nn.parallel.DistributedDataParallel
    seen: list[Any] = []
    net = wrap(Spy())
    _step(net, rank, 0)
    assert seen == [net] and torch_class._get_active_ddp_module() is None
    assert unwrapped(net) is net.module


@pytest.mark.parametrize("name", batch.names())
def test_compile(name: str) -> None:
    batch.check(name, 2)


def _by_inductor(rank: int, world: int) -> None:
    with torch._inductor.config.patch(compile_threads=1):
        net = wrap(Chain())
        _compare(rank, world, torch.compile(net), net, steps=2)


@pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "c++", "clang++")),
    reason="inductor needs a C++ compiler (Debian: g++)",
)
def test_inductor(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    run_ranks(2, _by_inductor, 2, deadline_s=150.0, env=env)
