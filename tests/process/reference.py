"""What data-parallel training must compute, worked out by hand in a single process.

The reference: every rank's step is run on an unwrapped module, one rank after the other, and the
gradients are averaged over the ranks. A parameter that got no gradient on some ranks counts as zero
there; one that got none anywhere stays without. Data and weights are functions of rank and step, so
that every rank can compute the reference for all ranks without talking to any.

Set CLOSERANKS_TEST_TORCH=1 to put torch's own class to the same tests.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Make = Callable[[], nn.Module]
Step = Callable[[Any, int, int], None]  # net, rank, step
Grads = dict[str, Tensor | None]


def ddp_class() -> type:
    """The class under test."""
    if os.environ.get("CLOSERANKS_TEST_TORCH"):
        return nn.parallel.DistributedDataParallel
    from closeranks import DistributedDataParallel

    return DistributedDataParallel


# Torch's own class finds unused parameters only when it is told to.
FIND_UNUSED = (True,) if os.environ.get("CLOSERANKS_TEST_TORCH") else (False, True)


def wrap(module: nn.Module, **options: Any) -> Any:
    return ddp_class()(module, **options)


def unwrapped(net: Any) -> Any:
    """The user's module, whether net is wrapped or not: the reference runs on both."""
    return net.module if isinstance(net, nn.parallel.DistributedDataParallel) else net


def no_sync(net: Any) -> Any:
    """net.no_sync(), or nothing for a module that is not wrapped."""
    return net.no_sync() if isinstance(net, nn.parallel.DistributedDataParallel) else _nothing()


def _nothing() -> Any:
    return contextlib.nullcontext()


def rows(rank: int, step: int = 0, count: int = 4, width: int = 4) -> Tensor:
    """This rank's share of the batch of this step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(count, width, generator=generator)


class Branches(nn.Module):
    """A stem and three heads; `uses` names the heads that take part in the output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.stem = nn.Linear(4, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 3) for _ in range(3)])

    def forward(self, x: Tensor, uses: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        hidden = torch.tanh(self.stem(x))
        out = torch.zeros(x.shape[0], 3)
        for head in uses:
            out = out + self.heads[head](hidden)
        return out


class Chain(nn.Module):
    """Three linear layers in a row, all of them used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(4, 6)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def local_grads(module: nn.Module) -> Grads:
    return {
        name: None if p.grad is None else p.grad.detach().clone()
        for name, p in module.named_parameters()
    }


def mean_grads(per_rank: list[Grads], divisor: float | None = None) -> Grads:
    """The mean over ranks, a missing gradient being zero, None where none has one."""
    result: Grads = {}
    for name in per_rank[0]:
        present = [grads[name] for grads in per_rank if grads[name] is not None]
        result[name] = reduce(add, present) / (divisor or len(per_rank)) if present else None
    return result


def grads_of_ranks(make: Make, world: int, step: Step) -> list[Grads]:
    """Every rank's gradients after one step, each on a fresh unwrapped module."""
    result = []
    for rank in range(world):
        module = make()
        step(module, rank, 0)
        result.append(local_grads(module))
    return result


def expected_grads(make: Make, world: int, step: Step) -> Grads:
    return mean_grads(grads_of_ranks(make, world, step))


def assert_grads(net: Any, expected: Grads, *, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """The wrapped module's gradients are the expected ones, and the same bits on every rank."""
    for name, p in unwrapped(net).named_parameters():
        wanted = expected[name]
        assert (p.grad is None) == (wanted is None), f"{name}: got {p.grad}, wanted {wanted}"
        if wanted is not None:
            torch.testing.assert_close(
                p.grad.detach().to_dense(), wanted.to_dense(), rtol=rtol, atol=atol, msg=_on(name)
            )
    assert_replicas_equal([p.grad for p in unwrapped(net).parameters()])


def _on(name: str) -> Callable[[str], str]:
    return lambda message: f"{name}: {message}"


def assert_weights(
    net: Any, reference: nn.Module, *, rtol: float = 1e-4, atol: float = 1e-6
) -> None:
    """The wrapped module's weights are those of the reference, the same bits on every rank."""
    for (name, p), q in zip(unwrapped(net).named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=rtol, atol=atol, msg=_on(name))
    assert_replicas_equal([p.detach() for p in unwrapped(net).parameters()])


def assert_replicas_equal(tensors: list[Tensor | None], group: Any = None) -> None:
    """The same bits on every rank of the group, absent tensors included."""
    mine = [None if t is None else t.detach().to_dense() for t in tensors]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for rank, theirs in enumerate(everyone):
        for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            same = a is b if a is None or b is None else torch.equal(a, b)
            assert same, f"tensor {index} differs from that of rank {rank}: {a} and {b}"


def train_and_compare(
    make: Make,
    rank: int,
    world: int,
    step: Step,
    *,
    steps: int = 1,
    rtol: float = 1e-4,
    atol: float = 1e-6,
    net: Any = None,
    **options: Any,
) -> Any:
    """Train a wrapped module and the reference side by side; return the wrapped one.

    Gradients are compared after every step, weights at the end.
    """
    net = wrap(make(), **options) if net is None else net
    reference = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for i in range(steps):
        step(net, rank, i)
        expected = reference_grads(reference, world, step, i)
        assert_grads(net, expected, rtol=rtol, atol=atol)
        optimizer.step()
        optimizer.zero_grad()
        descend(reference, expected)
    assert_weights(net, reference, rtol=rtol, atol=atol)
    return net


def reference_grads(reference: nn.Module, world: int, step: Step, i: int) -> Grads:
    """The mean of the ranks' gradients of step i on this unwrapped module; leaves none behind."""
    per_rank = []
    for rank in range(world):
        step(reference, rank, i)
        per_rank.append(local_grads(reference))
        reference.zero_grad()
    return mean_grads(per_rank)


def descend(module: nn.Module, grads: Grads, lr: float = 0.1) -> None:
    """One step of plain SGD, by hand."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            grad = grads[name]
            if grad is not None:
                p -= lr * grad
