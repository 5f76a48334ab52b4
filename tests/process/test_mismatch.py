"""Ranks that built different models: every rank raises the same error at once, and may go on.

The error names the first parameter that differs and both values, in torch's words where torch has
some. The group stays usable, so that the ranks can agree on what to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.process.batch import WORLDS, Batch
from tests.process.reference import rows, train_and_compare, wrap

batch = Batch()

Change = Callable[[nn.Sequential], nn.Module]


def _common() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def _refused(rank: int, world: int, change: Change, odd: int | None = None) -> str:
    """Wrap a model that is changed on one rank, the last; every rank must refuse it alike."""
    odd = world - 1 if odd is None else odd
    model = _common()
    if rank == odd:
        model = change(model)
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        wrap(model)
    seconds = time.monotonic() - started
    names = [c.__name__ for c in type(caught.value).__mro__]
    assert "ModelMismatch" in names, f"{names}: {caught.value}"
    assert seconds < 5, f"the error came after {seconds:.1f} s"
    texts: list[str | None] = [None] * world
    dist.all_gather_object(texts, str(caught.value))  # which also shows that the group still works
    assert len(set(texts)) == 1, f"the ranks differ in what they say: {texts}"
    return str(caught.value)


def _says(text: str, *wanted: str) -> None:
    missing = [phrase for phrase in wanted if phrase not in text]
    assert not missing, f"{missing} missing in: {text}"


def _replace(module: nn.Module, name: str, value: torch.Tensor) -> nn.Module:
    owner, _, leaf = name.rpartition(".")
    requires_grad = module.get_parameter(name).requires_grad
    setattr(module.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=requires_grad))
    return module


@batch.add
def more_parameters(rank: int, world: int) -> None:
    text = _refused(rank, world, lambda m: m.append(nn.Linear(2, 2)))
    phrase = "DDP expects same model across all ranks, but Rank 0 has 4 params, while rank "
    _says(text, f"{phrase}{world - 1} has inconsistent 6 params.", "3.weight")


@batch.add
def fewer_parameters(rank: int, world: int) -> None:
    text = _refused(rank, world, lambda m: m[:1])
    phrase = "DDP expects same model across all ranks, but Rank 0 has 4 params, while rank "
    _says(text, f"{phrase}{world - 1} has inconsistent 2 params.", "2.weight")


@batch.add
def fewer_parameters_on_the_first_rank(rank: int, world: int) -> None:
    text = _refused(rank, world, lambda m: m[:1], odd=0)
    _says(text, "DDP expects same model across all ranks, but Rank 0 has 2 params, while rank 1")
    _says(text, "has inconsistent 4 params.")


@batch.add
def another_shape(rank: int, world: int) -> None:
    text = _refused(
        rank, world, lambda m: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    )
    odd = world - 1
    _says(text, f"[{odd}]: params[0] in this process with sizes [5, 4] appears not to match")
    _says(text, "sizes/strides of the same param in process 0.", "0.weight", "[6, 4]")


@batch.add
def another_shape_with_as_many_elements(rank: int, world: int) -> None:
    text = _refused(rank, world, lambda m: _replace(m, "2.weight", torch.zeros(3, 4)))
    _says(text, "params[2]", "2.weight", "[3, 4]", "[2, 6]")


@batch.add
def another_stride(rank: int, world: int) -> None:
    text = _refused(rank, world, lambda m: _replace(m, "2.weight", torch.zeros(6, 2).t()))
    odd = world - 1
    _says(text, f"[{odd}]: params[2] in this process with sizes [2, 6] appears not to match")
    _says(text, "2.weight", "[6, 1]", "[1, 2]")


@batch.add
def another_dtype(rank: int, world: int) -> None:
    _says(_refused(rank, world, lambda m: m.double()), "0.weight", "float32", "float64")


@batch.add
def another_dtype_of_one_parameter(rank: int, world: int) -> None:
    def change(module: nn.Sequential) -> nn.Module:
        return _replace(module, "2.bias", torch.zeros(2, dtype=torch.bfloat16))

    _says(_refused(rank, world, change), "2.bias", "float32", "bfloat16")


@batch.add
def another_name(rank: int, world: int) -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(4, 6)
            self.head = nn.Linear(6, 2)

    _says(_refused(rank, world, lambda m: Renamed()), "0.weight", "stem.weight")


@batch.add
def another_order(rank: int, world: int) -> None:
    """The same parameters, two of the same shape and name registered the other way round."""

    class Pair(nn.Module):
        def __init__(self, names: tuple[str, str]) -> None:
            super().__init__()
            for name in names:
                self.register_module(name, nn.Linear(3, 3, bias=False))

    model = Pair(("left", "right") if rank != world - 1 else ("right", "left"))
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        wrap(model)
    assert time.monotonic() - started < 5
    texts: list[str | None] = [None] * world
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1, texts
    _says(str(caught.value), "left.weight", "right.weight")


@batch.add
def another_requires_grad(rank: int, world: int) -> None:
    def change(module: nn.Sequential) -> nn.Module:
        module[0].bias.requires_grad_(False)
        return module

    _says(_refused(rank, world, change), "0.bias", "requires_grad")


@batch.add
def every_rank_another_model(rank: int, world: int) -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        wrap(nn.Sequential(*[nn.Linear(3, 3) for _ in range(rank + 1)]))
    assert time.monotonic() - started < 5
    texts: list[str | None] = [None] * world
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1, texts
    _says(str(caught.value), "Rank 0 has 2 params, while rank 1 has inconsistent 4 params.")


@batch.add
def many_parameters_and_one_difference(rank: int, world: int) -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(300)])
    if rank == 1:
        _replace(model, "211.weight", torch.zeros(2, 3))
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        wrap(model)
    assert time.monotonic() - started < 5
    _says(str(caught.value), "[1]: params[422]", "211.weight", "[2, 3]", "[2, 2]")
    assert len(str(caught.value)) < 2000, "it names the first difference, not the whole model"


@batch.add
def the_ranks_may_go_on_with_the_same_model(rank: int, world: int) -> None:
    _refused(rank, world, lambda m: m[:1])

    def step(net: nn.Module, rank: int, step: int) -> None:
        net(rows(rank, step)).square().mean().backward()

    train_and_compare(_common, rank, world, step, steps=2)


@batch.add
def different_values_are_no_mismatch(rank: int, world: int) -> None:
    """Rank 0's weights and buffers are everybody's."""
    torch.manual_seed(rank)
    net = wrap(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    everyone: list[object] = [None] * world
    dist.all_gather_object(everyone, [t.sum().item() for t in net.state_dict().values()])
    assert all(sums == everyone[0] for sums in everyone)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_mismatch(name: str, world: int) -> None:
    batch.check(name, world)
