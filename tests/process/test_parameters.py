"""Parameters of every kind: dtypes, layouts, sizes, shared ones, sparse gradients.

What torch's class does with them is in its own tests too; here the gradients are compared with
those worked out by hand.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.process.batch import WORLDS, Batch
from tests.process.reference import assert_replicas_equal, rows, train_and_compare, wrap

batch = Batch()


def _seeded(make: Any) -> Any:
    """A constructor whose weights are the same wherever and whenever it is called."""

    def build() -> nn.Module:
        torch.manual_seed(7)
        return make()

    return build


def _step(net: nn.Module, rank: int, step: int) -> None:
    out = net(rows(rank, step))
    out.abs().square().mean().backward()


def _compare(make: Any, rank: int, world: int, step: Any = _step, **options: Any) -> None:
    for views in (False, True):
        for cap in (None, 0.00001):
            train_and_compare(
                _seeded(make),
                rank,
                world,
                step,
                steps=2,
                gradient_as_bucket_view=views,
                bucket_cap_mb=cap,
                **options,
            )


class Mixed(nn.Module):
    """Layers of three dtypes in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.in_32 = nn.Linear(4, 4)
        self.in_64 = nn.Linear(4, 4, dtype=torch.float64)
        self.in_16 = nn.Linear(4, 4, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.in_64(torch.tanh(self.in_32(x)).double())
        return self.in_16(wide.bfloat16()).float()


@batch.add
def of_several_dtypes(rank: int, world: int) -> None:
    _compare(Mixed, rank, world, rtol=5e-2, atol=1e-3)


@batch.add
def of_half_precision_only(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        net(rows(rank, step).bfloat16()).float().square().mean().backward()

    def make() -> nn.Module:
        return nn.Linear(4, 3).bfloat16()

    _compare(make, rank, world, step, rtol=5e-2, atol=2e-3)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.real = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight) * self.real


@batch.add
def complex_ones(rank: int, world: int) -> None:
    _compare(Complex, rank, world)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 2, 3, padding=1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        image = x.reshape(-1, 2, 2, 1).to(memory_format=torch.channels_last)
        return self.second(torch.relu(self.first(image)))


@batch.add
def channels_last(rank: int, world: int) -> None:
    _compare(Images, rank, world)
    net = wrap(_seeded(Images)())
    _step(net, rank, 0)
    grad = net.module.first.weight.grad
    assert grad.stride() == net.module.first.weight.stride(), "the gradient keeps the layout"


class Odd(nn.Module):
    """A scalar, an empty, a transposed and a sliced parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.transposed = nn.Parameter(torch.randn(3, 4).t())
        self.sliced = nn.Parameter(torch.randn(6, 6)[::2, ::2])

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x @ self.transposed) * self.scalar
        return torch.cat([hidden, self.empty]) @ self.sliced


@batch.add
def of_odd_shapes(rank: int, world: int) -> None:
    _compare(Odd, rank, world)


class Shared(nn.Module):
    """One weight under two names, used at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 3, bias=False)
        self.decode = nn.Linear(4, 3, bias=False)
        self.decode.weight = self.encode.weight
        self.same = self.encode

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.same(x)) @ self.encode.weight)


@batch.add
def shared_ones(rank: int, world: int) -> None:
    _compare(Shared, rank, world)
    assert len(list(wrap(_seeded(Shared)()).parameters())) == 1


class Words(nn.Module):
    def __init__(self, bag: bool = False) -> None:
        super().__init__()
        kind = nn.EmbeddingBag if bag else nn.Embedding
        self.words = kind(10, 4, sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x * 3).long().abs() % 10
        return self.head(self.words(tokens))


@batch.add
def sparse_embeddings(rank: int, world: int) -> None:
    for bag in (False, True):
        train_and_compare(_seeded(lambda b=bag: Words(b)), rank, world, _step, steps=3)
        net = wrap(_seeded(lambda b=bag: Words(b))())
        _step(net, rank, 0)
        assert net.module.words.weight.grad.is_sparse


@batch.add
def sparse_embeddings_unused_by_rank(rank: int, world: int) -> None:
    class Sometimes(Words):
        def forward(self, x: Tensor, use: bool = True) -> Tensor:
            return super().forward(x) if use else self.head(x)

    def step(net: nn.Module, rank: int, step: int) -> None:
        net(rows(rank, step), (rank + step) % 2 == 0).square().mean().backward()

    train_and_compare(_seeded(Sometimes), rank, world, step, steps=3, find_unused_parameters=True)


@batch.add
def many_small_ones(rank: int, world: int) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*[nn.Linear(4, 4) for _ in range(60)])

    train_and_compare(_seeded(make), rank, world, _step, steps=3, bucket_cap_mb=0.001)


@batch.add
def one_single_parameter(rank: int, world: int) -> None:
    _compare(lambda: nn.Linear(4, 1, bias=False), rank, world)


@batch.add
def outputs_of_every_form(rank: int, world: int) -> None:
    """Tensors in lists, tuples, dicts and dataclasses keep their form."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> dict[str, Any]:
            out = self.layer(x)
            return {"pair": (out, [out * 2]), "number": 3, "nothing": None}

    def step(net: nn.Module, rank: int, step: int) -> None:
        out = net(rows(rank, step))
        assert isinstance(out["pair"], tuple) and isinstance(out["pair"][1], list)
        assert out["number"] == 3 and out["nothing"] is None
        (out["pair"][0] + out["pair"][1][0]).square().mean().backward()

    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        train_and_compare(_seeded(Nested), rank, world, step, steps=2, **options)


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclass(frozen=True)
class Frozen:
    values: list[Any]


class Wrapping(nn.Module):
    """Its output has a form of its own, and is a constant where `uses` is False."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.form = form

    def forward(self, x: Tensor, uses: bool) -> Any:
        return self.form(self.layer(x) if uses else x[:, :2] * 2)


@batch.add
def outputs_of_any_form_on_ranks_that_use_nothing(rank: int, world: int) -> None:
    """Constants in any container get a graph, so that this rank's backward takes part."""
    forms: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = [
        (lambda t: Pair(t, None), lambda out: out.first),
        (lambda t: Frozen([None, {"it": t}]), lambda out: out.values[1]["it"]),
        (lambda t: OrderedDict(it=[t, "text"]), lambda out: out["it"][0]),
        (lambda t: torch.max(t, 1), lambda out: out.values),
    ]
    for form, value_of in forms:

        def step(net: nn.Module, rank: int, step: int) -> None:
            uses = rank == step % 2
            loss = value_of(net(rows(rank, step), uses)).square().mean()  # noqa: B023
            if loss.requires_grad:  # not so in the reference, which is not wrapped
                loss.backward()
            assert loss.requires_grad or not isinstance(net, DistributedDataParallel)

        train_and_compare(_seeded(lambda f=form: Wrapping(f)), rank, world, step, steps=2)


@batch.add
def a_recurrent_network(rank: int, world: int) -> None:
    """Its outputs are nested tuples, and its weights are kept in a list of their own besides."""

    def step(net: nn.Module, rank: int, step: int) -> None:
        out, (hidden, _cell) = net(rows(rank, step).unsqueeze(1))
        (out.square().mean() + hidden.mean()).backward()

    make = _seeded(lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True))
    for view in (False, True):
        train_and_compare(make, rank, world, step, steps=3, gradient_as_bucket_view=view)


@batch.add
def inputs_that_require_grad(rank: int, world: int) -> None:
    """Their gradient is local: each rank's own."""
    net = wrap(_seeded(lambda: nn.Linear(4, 2))())
    alone = _seeded(lambda: nn.Linear(4, 2))()
    mine, theirs = (rows(rank).requires_grad_() for _ in range(2))
    net(mine).square().mean().backward()
    alone(theirs).square().mean().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    assert_replicas_equal([p.grad for p in net.parameters()])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_parameters(name: str, world: int) -> None:
    batch.check(name, world)
