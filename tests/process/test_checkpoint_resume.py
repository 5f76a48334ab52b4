"""A job that was killed as a whole goes on from its newest checkpoint, to the same digest."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from closeranks.lanes.ranks import Ranks
from tests.lanes_scripts import SCRIPTS, points_and_labels
from tests.workers import KILL_ALL, Fault, Job, pace, run_job


def story(
    folder: str, told: str, every: int | None = 4, patient: bool = False, **options: Any
) -> dict[str, Any]:
    """Everything a script may do, and what it has done so far in the file `told`.

    patient: wait until what is being written is durable, so that a kill finds it.
    """
    ranks = Ranks(**({"checkpoint": folder, "every": every} if folder else {}), **options)
    ranks.print("begins")
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    ranks.prepare(model, optimizer, scheduler)
    train, test = points_and_labels(100, 6, 3), points_and_labels(40, 6, 3, seed=2)
    ranks.once(lambda: _tell(told, "once before"))
    for _ in range(2):
        for step in ranks.steps(train, 16, epochs=2):
            for x, y in step:
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
                step.log(loss=loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            ranks.state.setdefault("losses", []).append(step.values["loss"])
            if step.number == 5:
                ranks.once(lambda: _tell(told, "once inside"))
            pace()
            if patient:
                ranks._durable.scribe.wait()
        hits = ranks.evaluate(test, 16, lambda b: {"hit": (model(b[0]).argmax(1) == b[1]).sum()})
        ranks.print("hits", hits["hit"], random.random(), float(torch.rand(1)))
        optimizer.param_groups[0]["lr"] *= 0.5
    ranks.once(lambda: _tell(told, "once after"))
    ranks.print("the end", len(ranks.state["losses"]), ranks.digest())
    return {"digest": ranks.digest(), "rank": ranks.rank, "losses": ranks.state["losses"]}


def _tell(path: str, text: str) -> None:
    if path:
        with open(path, "a") as file:
            file.write(text + "\n")


@functools.cache
def undisturbed() -> Job:
    return run_job(1, story, "", "")


def warnings_of(job: Job) -> list[str]:
    """What a job has said about its checkpoints."""
    return [note for note in job.notes if note.startswith("warning: ")]


def killed(workers: int, fault: Fault, fn: Any, *args: Any) -> Job:
    """A job in which a worker is killed, and then all others at once."""
    job = run_job(workers, fn, *args, faults=[dataclasses.replace(fault, action=KILL_ALL)])
    assert job.fired and job.ended == "killed" and not job.values, job
    return job


MOMENTS = [
    Fault("before forward", count=2),
    Fault("after backward", count=14),
    Fault("boundary", facts={"call": 2, "number": 7}),
    Fault("complete but not applied", count=11),
    Fault("piece computed", facts={"place": "evaluate() of call 3, batch 0"}),
    Fault("piece computed", facts={"place": "once() of call 6"}),
    Fault("checkpoint file half written", count=3),
    Fault("checkpoint not named", count=2),
]


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda fault: f"{fault.point} {fault.count}")
def test_a_killed_job_goes_on_with_other_numbers_of_workers(moment: Fault, tmp_path: Path) -> None:
    folder, told = str(tmp_path / "ckpt"), str(tmp_path / "told")
    killed(2, moment, story, folder, told)
    job = run_job(3, story, folder, told)
    assert job.ended is None and job.digest == undisturbed().digest, job
    assert job.values[0]["losses"] == undisturbed().values[0]["losses"]
    assert job.printed[-1] == undisturbed().printed[-1]
    assert all(line in undisturbed().printed for line in job.printed)
    assert not list((tmp_path / "ckpt").glob(".*"))


def test_what_a_killed_job_has_done_is_not_done_again(tmp_path: Path) -> None:
    folder, told = str(tmp_path / "ckpt"), str(tmp_path / "told")
    moment = Fault("boundary", facts={"call": 4, "number": 9})
    first = killed(2, moment, story, folder, told, 4, True)
    second = run_job(1, story, folder, told)
    assert first.printed == undisturbed().printed[:2]
    assert second.printed == undisturbed().printed[2:]
    assert (tmp_path / "told").read_text().splitlines() == [
        *("once before", "once inside", "once inside", "once after")
    ]


def test_a_finished_job_trains_nothing_and_prints_the_same(tmp_path: Path) -> None:
    folder, told = str(tmp_path / "ckpt"), str(tmp_path / "told")
    first = run_job(2, story, folder, told)
    assert first.digest == undisturbed().digest
    assert first.printed == undisturbed().printed
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "ckpt").rglob("*.json")}
    again = run_job(3, story, folder, told, faults=[Fault("before forward")])
    assert not again.fired
    assert again.printed == first.printed and again.digest == first.digest
    assert (tmp_path / "told").read_text().splitlines() == [
        *("once before", "once inside", "once inside", "once after")
    ]
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "ckpt").rglob("*.json")} == files


def test_all_workers_are_gone_and_the_job_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    fault = Fault("after backward", count=30, everybody=True)
    job = run_job(2, story, str(tmp_path), "", faults=[fault])
    assert len(job.fired) == 2 and job.digest == undisturbed().digest
    assert job.printed == undisturbed().printed
    (warning,) = warnings_of(job)
    assert "all workers were gone" in warning and "from step " in warning
    assert json.loads((tmp_path / "finished.json").read_text())


def test_all_workers_are_gone_before_the_first_checkpoint() -> None:
    fault = Fault("after backward", count=3, everybody=True)
    job = run_job(2, story, "", "", faults=[fault])
    assert len(job.fired) == 2 and job.digest == undisturbed().digest
    (warning,) = warnings_of(job)
    assert "goes on from its start" in warning


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_is_killed_and_resumed(name: str, tmp_path: Path) -> None:
    moment = Fault("before forward", count=17)
    killed(2, moment, checkpointed, name, str(tmp_path))
    job = run_job(3, checkpointed, name, str(tmp_path))
    assert job.ended is None
    assert job.digest == run_job(1, SCRIPTS[name], True).digest
    assert len(os.listdir(tmp_path)) >= 2


def killed_at_random_moments(times: int, rng: random.Random, fn: Any, *args: Any) -> Job:
    """A job that is killed so often and then left alone; how it ended at last."""
    for _ in range(times):
        at_s = rng.uniform(0.05, 1.0)
        run_job(rng.randint(1, 4), fn, *args, max_restarts=0, kill_all_after_s=at_s)
    return run_job(rng.randint(1, 4), fn, *args)


def test_a_job_is_killed_at_random_moments(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    job = killed_at_random_moments(5, random.Random(seed), story, str(tmp_path), "", 2)
    assert job.ended is None and job.digest == undisturbed().digest, f"seed {seed}: {job}"


def checkpointed(name: str, folder: str) -> dict[str, Any]:
    return SCRIPTS[name](checkpoint=folder, every=2)


def saving(folder: str) -> dict[str, Any]:
    """Saves when it likes to."""
    ranks = Ranks(checkpoint=folder, every=1000, keep=9)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ranks.prepare(model, optimizer)
    ranks.save()
    before = sorted(os.listdir(folder))
    for step in ranks.steps(TensorDataset(torch.randn(40, 3)), 8):
        for (x,) in step:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step.number == 2:
            ranks.save()
    ranks.save()
    return {"digest": ranks.digest(), "before": before, "after": sorted(os.listdir(folder))}


@pytest.mark.parametrize("workers", [1, 3])
def test_save_is_durable_when_it_returns(workers: int, tmp_path: Path) -> None:
    job = run_job(workers, saving, str(tmp_path))
    assert job.ended is None
    for value in job.values:
        assert "step-00000000-call-1" in value["before"]
        assert "step-00000005-call-3" in value["after"]
    assert "step-00000003" in os.listdir(tmp_path)
