"""What a user may say to Ranks, and what comes of it: the arguments of steps(), once, print, state.

Whatever is asked for is done by two workers as by the plain loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

from closeranks.lanes.ranks import Ranks
from closeranks.lanes.seat import take_seat
from tests.lanes_scripts import make
from tests.workers import pace, run_job

COUNT = 37


def count_samples(naive: bool, case: str, epochs: int = 2) -> dict[str, Any]:
    """Which samples were in which step, read from the gradient that they leave."""
    ranks = make(naive, lanes=4)
    table = nn.Embedding(COUNT, 1)
    ranks.prepare(table)
    data = TensorDataset(torch.arange(COUNT))
    options: dict[str, Any] = {
        "shuffle": {},
        "in order": {"shuffle": False},
        "drop_last": {"drop_last": True},
        "weighted": {"sampler": WeightedRandomSampler([1.0] * 20 + [0.0] * 17, 30)},
        "by epoch": {"sampler": DistributedSampler(data, 1, 0, seed=5)},
        "collate": {"collate_fn": lambda samples: [torch.stack([s[0] for s in samples]).flip(0)]},
        "weight": {"weight": lambda batch: 1.0 + float(batch[0][0])},
        "loaders": {"num_workers": 1},
    }[case]
    for step in ranks.steps(data, 10, epochs, **options):
        for (index,) in step:
            table(index).mean().backward()
            step.log(first=float(index[0]), many=len(index))
        assert table.weight.grad is not None
        seen = (table.weight.grad[:, 0] * 10).tolist()
        told = [step.number, step.epoch, step.values["first"], step.values["many"], seen]
        ranks.state["seen"] = [*ranks.state.get("seen", []), told]
        table.zero_grad()
        pace()
    return {"digest": ranks.digest(), "seen": ranks.state["seen"]}


CASES = (
    "shuffle",
    "in order",
    "drop_last",
    "weighted",
    "by epoch",
    "collate",
    "weight",
    "loaders",
)


@pytest.mark.parametrize("case", CASES)
def test_steps_takes_what_a_loader_takes(case: str) -> None:
    (plain,) = run_job(1, count_samples, True, case).values
    for value in run_job(2, count_samples, False, case).values:
        assert value == plain
    seen = torch.tensor([told[-1] for told in plain["seen"]])
    of_epochs = [seen[[told[1] == e for told in plain["seen"]]] for e in (0, 1)]
    numbers = [told[0] for told in plain["seen"]]
    assert numbers == list(range(len(numbers)))
    if case == "weight":
        return
    sizes = [10, 10, 10, 7]
    if case in ("drop_last", "weighted"):
        sizes = [10, 10, 10]
    for epoch in of_epochs:
        # In a step of n samples each of them leaves 1 / n, however they were cut into lanes.
        counts = epoch * torch.tensor(sizes)[:, None] / 10
        assert torch.allclose(counts, counts.round(), atol=1e-4)
        assert counts.sum(1).round().tolist() == sizes
        if case == "weighted":
            assert counts[:, 20:].sum() == 0.0
        elif case == "drop_last":
            assert counts.sum(0).max() < 1.5
        else:
            assert counts.sum(0).round().tolist() == [1.0] * COUNT
    same_order = torch.equal(of_epochs[0], of_epochs[1])
    assert same_order == (case == "in order")


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        yield torch.zeros(1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dataset": Endless()}, "IterableDataset: its samples have no numbers"),
        ({"dataset": object()}, "wanted one with __getitem__ and __len__"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"num_workers": -1}, "num_workers=-1"),
    ],
)
def test_wrong_arguments_of_steps_are_refused(options: dict[str, Any], said: str) -> None:
    (value,) = run_job(1, refused, options).values
    assert said in value["error"] and "Nothing was trained" in value["error"]


def refused(options: dict[str, Any]) -> dict[str, Any]:
    ranks = Ranks(lanes=2)
    try:
        ranks.steps(**{"dataset": TensorDataset(torch.zeros(4)), "batch_size": 2} | options)
    except (TypeError, ValueError) as error:
        return {"error": str(error)}
    return {"error": ""}


@pytest.mark.parametrize(
    "options", [{"lanes": 0}, {"lanes": 5000}, {"threads": 0}, {"check_every": -1}]
)
def test_wrong_arguments_of_ranks_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="Nothing was started"):
        Ranks(**options)


def test_another_launcher_is_refused_with_the_command_to_use() -> None:
    with pytest.raises(ValueError, match=r"WORLD_SIZE=4.*`closeranks run -n 4`"):
        take_seat({"WORLD_SIZE": "4", "RANK": "0"})
    assert take_seat({"WORLD_SIZE": "1"}).is_alone


def break_a_rule(rule: str, folder: str = "") -> dict[str, Any]:
    ranks = Ranks(lanes=2)
    model = nn.Linear(1, 1)
    ranks.prepare(model)
    data = TensorDataset(torch.zeros(8, 1))
    for step in ranks.steps(data, 4):
        if rule == "log outside":
            step.log(loss=1.0)
        for (x,) in step:
            model(x).sum().backward()
            if rule == "break inside":
                break
        if rule == "nested":
            list(ranks.steps(data, 4))
    return {}


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("log outside", "step.log(loss) was called outside of `for batch in step`"),
        ("break inside", "LoopDiverged: lane 0 of tick 1 was left before its end"),
        ("nested", "was called inside the loop over steps() (call 1) at step 0"),
    ],
)
def test_what_cannot_be_resumed_is_refused(rule: str, said: str) -> None:
    job = run_job(1, break_a_rule, rule)
    assert job.ended is not None and said in job.ended, job


def write_once(folder: str) -> dict[str, Any]:
    ranks = Ranks(lanes=4)
    model = nn.Linear(1, 1)
    ranks.prepare(model)
    note = Path(folder) / "note"

    def write() -> None:
        with note.open("a") as file:
            file.write("x")

    ranks.once(write)
    for step in ranks.steps(TensorDataset(torch.zeros(16, 1)), 4):
        for (x,) in step:
            model(x).sum().backward()
        model.zero_grad()
        ranks.once(write)
        ranks.print("step", step.number)
        ranks.print("again", step.number, sep="-")
    ranks.once(write)
    assert note.read_text() == "x" * 6  # Nobody goes on before it is done.
    ranks.print("the end")
    return {"digest": ranks.digest(), "size": ranks.size, "rank": ranks.rank}


def test_once_and_print_happen_once(tmp_path: Path) -> None:
    job = run_job(3, write_once, str(tmp_path))
    assert (tmp_path / "note").read_text() == "x" * 6
    lines = [line for n in range(4) for line in (f"step {n}", f"again-{n}")]
    assert job.printed == [*lines, "the end"]
    assert {v["size"] for v in job.values} == {3}
    assert {v["rank"] for v in job.values} <= {0, 1, 2}


def test_alone_it_prints(capfd: pytest.CaptureFixture[str]) -> None:
    take_seat({}).tell(print="alone", key="line 1")
    assert capfd.readouterr().out == "alone\n"


def test_who_stands_by_is_told(tmp_path: Path) -> None:
    job = run_job(3, write_once, str(tmp_path))
    # Batches of 4 samples are cut into 2 lanes, because no lane has one sample.
    assert job.notes == [
        "3 workers share 2 lanes of 4 samples: 1 of them stand by, and take over when another one "
        "dies. Larger lanes= or batch_size= would give them work"
    ]


def carry(naive: bool) -> dict[str, Any]:
    """A gradient that the user has left is put aside, and the average added to it."""
    ranks = make(naive, lanes=4)
    model = nn.Linear(2, 1, bias=False)
    frozen = nn.Linear(2, 1)
    frozen.requires_grad_(False)
    other = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = torch.optim.SGD([other], 1.0)
    ranks.prepare(model, frozen, optimizer)
    for step in ranks.steps(TensorDataset(torch.ones(8, 2)), 8):
        model.weight.grad = torch.tensor([[10.0, 20.0]])
        for (x,) in step:
            assert model.weight.grad is None
            (model(x) + frozen(x)).mean().backward(retain_graph=True)
            (3.0 * other.sum()).backward()
        assert frozen.weight.grad is None
    assert model.weight.grad is not None and other.grad is not None
    return {"model": model.weight.grad.tolist(), "other": other.grad.tolist()}


def test_gradients_that_were_there_are_added_to() -> None:
    for naive, workers in ((True, 1), (False, 1), (False, 3)):
        for value in run_job(workers, carry, naive).values:
            assert value == {"model": [[11.0, 21.0]], "other": [3.0, 3.0, 3.0]}


def sparse(naive: bool) -> dict[str, Any]:
    ranks = make(naive, lanes=4)
    table = nn.Embedding(20, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), 0.1)
    ranks.prepare(table, optimizer)
    for step in ranks.steps(TensorDataset(torch.arange(20)), 8):
        for (index,) in step:
            table(index).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"digest": ranks.digest()}


def test_sparse_gradients_become_dense() -> None:
    assert run_job(2, sparse, False).digest == run_job(1, sparse, True).digest
