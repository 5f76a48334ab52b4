"""Whatever torch can train with comes back from a checkpoint as it was, and trains on the same."""

from __future__ import annotations

import inspect
import json
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import lr_scheduler

from closeranks.checkpoint import snapshot
from closeranks.checkpoint.folder import Folder
from closeranks.checkpoint.format import as_bytes, digest
from closeranks.checkpoint.reader import read
from closeranks.checkpoint.writer import write
from closeranks.lanes.ranks import Ranks
from closeranks.lanes.state import Prepared


def kept(tree: Any, folder: Path, files: Any = None) -> Any:
    """The tree as it comes back."""
    taken = snapshot.take("step-00000001", {}, tree, files or {})
    return read(write(Folder(folder), taken, "owner", 3)).tree


def prepared(*objects: Any) -> Prepared:
    found = Prepared()
    for thing in objects:
        found.add(thing)
    return found


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False))


def train(model: nn.Module, optimizer: Any, scheduler: Any = None) -> None:
    for k in range(3):

        def closure(k: int = k) -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.arange(8.0).view(2, 4) + k).square().mean()
            loss.backward()
            return loss

        loss = closure()
        optimizer.step(*([closure] if isinstance(optimizer, torch.optim.LBFGS) else []))
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(float(loss.detach()))
        elif scheduler is not None:
            scheduler.step()


def weights(model: nn.Module) -> str:
    return digest(dict(model.state_dict()))


OPTIMIZERS = [
    found
    for name, found in sorted(vars(torch.optim).items())
    if inspect.isclass(found)
    and issubclass(found, torch.optim.Optimizer)
    and found is not torch.optim.Optimizer
    and found is not torch.optim.SparseAdam  # See below: it needs sparse gradients.
]


def optimizers_and_options() -> Iterator[tuple[Any, dict[str, Any]]]:
    flags: dict[str, dict[str, Any]] = {
        "amsgrad": {"amsgrad": True},
        "momentum": {"momentum": 0.9},
        "centered": {"centered": True},
        "capturable": {"capturable": True},
        "fused": {"fused": True},
        "foreach": {"foreach": True},
    }
    for kind in OPTIMIZERS:
        yield kind, {}
        for name, options in flags.items():
            if name in inspect.signature(kind).parameters and name != "capturable":
                yield kind, options


@pytest.mark.parametrize(("kind", "options"), list(optimizers_and_options()), ids=str)
def test_every_optimizer_trains_on_from_a_checkpoint(
    kind: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    first = model_of(1)
    of_first = kind(first.parameters(), **options)
    train(first, of_first)
    before = prepared(first, of_first)
    captured = before.capture()
    second = model_of(2)
    of_second = kind(second.parameters(), **options)
    after = prepared(second, of_second)
    after.restore(kept(captured, tmp_path, before.files(captured)))
    assert after.digest() == before.digest()
    train(first, of_first)
    train(second, of_second)
    assert weights(second) == weights(first)
    assert after.digest() == before.digest()


def test_there_are_many_optimizers() -> None:
    assert len(OPTIMIZERS) >= 13


def test_sparse_adam_trains_on_from_a_checkpoint(tmp_path: Path) -> None:
    def steps(model: nn.Module, optimizer: Any) -> None:
        for _ in range(3):
            model(torch.tensor([1, 2, 2])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    models = [nn.Embedding(5, 3, sparse=True) for _ in range(2)]
    both = [(m, torch.optim.SparseAdam(m.parameters())) for m in models]
    steps(*both[0])
    before, after = prepared(*both[0]), prepared(*both[1])
    after.restore(kept(before.capture(), tmp_path))
    steps(*both[0])
    steps(*both[1])
    assert after.digest() == before.digest()


def _sequential(optimizer: Any) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: 0.9**k),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "SequentialLR": _sequential,
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, mode="exp_range", gamma=0.9),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, 2),
}


def test_every_scheduler_of_torch_is_here() -> None:
    of_torch = {
        name
        for name, found in vars(lr_scheduler).items()
        if inspect.isclass(found)
        and issubclass(found, lr_scheduler.LRScheduler)
        and not name.startswith("_")
    } - {"LRScheduler"}
    assert of_torch <= set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    def started(seed: int) -> tuple[nn.Module, Any, Any]:
        model = model_of(seed)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        return model, optimizer, SCHEDULERS[name](optimizer)

    first, second = started(1), started(2)
    train(*first)
    before, after = prepared(*first), prepared(*second)
    captured = before.capture()
    after.restore(kept(captured, tmp_path, before.files(captured)))
    assert after.digest() == before.digest()
    train(*first)
    train(*second)
    assert after.digest() == before.digest()


def _same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and torch.equal(as_bytes(one), as_bytes(other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other or (one != one and other != other))


VALUES = [
    *(None, True, 3, 2**80, -0.5, float("inf"), float("nan"), "text", "", b"\0bytes", 1 + 2j),
    (),
    (1, (2, [3])),
    {1: "int keys", (1, 2): "tuples", None: 0, False: 1, 2.5: 2},
    {"!": "the tag itself", "v": 1},
    {1, 2, 3},
    Counter("abracadabra"),
    OrderedDict([("b", 1), ("a", 2)]),
    defaultdict(list, {"a": [1]}),
    defaultdict(int, {3: 1}),
    np.float32(1.5),
    np.int64(7),
    np.bool_(True),
    np.arange(6).reshape(2, 3),
    np.array(["ab", "c"]),
    torch.Size([2, 3]),
    torch.float16,
    torch.device("cpu"),
    torch.arange(3),
    [torch.tensor(1.5), {"t": torch.zeros(0, 2)}],
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_keep_their_types(value: Any, tmp_path: Path) -> None:
    assert _same(kept({"value": value}, tmp_path)["value"], value)


def _number_types() -> list[torch.dtype]:
    parts = {f"torch.{s}int{b}" for s in ("", "u") for b in range(1, 8)} | {"torch.bit"}
    found = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    return sorted((d for d in found if str(d) not in parts and ".q" not in str(d)), key=str)


@pytest.mark.parametrize("dtype", _number_types(), ids=str)
def test_every_number_type_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.arange(12 * dtype.itemsize, dtype=torch.uint8)
    if dtype == torch.bool:
        raw %= 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Some types are experimental.
        tensor = raw.view(dtype).view(3, 4)
        tree = {"a": tensor, "part": tensor[:, 1:3], "one": tensor[1, 1], "turned": tensor.t()}
        found = kept(tree, tmp_path)
    for name, was in tree.items():
        assert found[name].dtype == dtype and found[name].shape == was.shape
        assert torch.equal(as_bytes(found[name]), as_bytes(was))
        assert found[name].data_ptr() % 64 == 0
    assert found["turned"].stride() == tensor.t().stride()


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "builtins.object"),
        ({"deep": [np.datetime64("2026-01-01")]}, "numpy.datetime64"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (lambda: 0, "function"),
        (defaultdict(lambda: 1), "defaultdict"),
    ],
    ids=["object", "numpy", "sparse", "function", "defaultdict"],
)
def test_what_cannot_be_kept_is_refused_by_name_when_it_is_prepared(value: Any, named: str) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"inner": value}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError("never loaded")

    with pytest.raises(TypeError, match=named) as raised:
        Ranks().prepare(Odd())
    assert "0:Odd" in str(raised.value) and "inner" in str(raised.value)


class Tied(nn.Module):
    """Shared weights, a buffer that is not saved, a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.out = nn.Linear(3, 7, bias=False)
        self.out.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("hidden", torch.rand(2), persistent=False)
        self.part = nn.Parameter(torch.rand(4, 4).to(torch.bfloat16).t()[1:])
        self.embed.weight.requires_grad_(False)


def test_weights_load_into_a_plain_module(tmp_path: Path) -> None:
    model = Tied()
    before = prepared(model)
    captured = before.capture()
    kept(captured, tmp_path, before.files(captured))
    plain = Tied()
    loaded = load_file(tmp_path / "step-00000001" / "0-Tied.safetensors")
    plain.load_state_dict(loaded, strict=True)
    assert weights(plain) == weights(model)


def test_shared_hidden_and_frozen_parts_come_back(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    other.embed.weight.requires_grad_(True)
    before, after = prepared(model), prepared(other)
    captured = before.capture()
    after.restore(kept(captured, tmp_path, before.files(captured)))
    assert other.out.weight is other.embed.weight and not other.embed.weight.requires_grad
    assert torch.equal(other.hidden, model.hidden)
    assert after.digest() == before.digest()


def test_nothing_on_disk_is_pickled(tmp_path: Path) -> None:
    model = Tied()
    before = prepared(model, torch.optim.Adam(model.parameters()))
    captured = before.capture()
    kept(captured, tmp_path, before.files(captured))
    for path in (tmp_path / "step-00000001").iterdir():
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            assert load_file(path)
