"""Whoever is killed, stopped or slow: the bits at the end are those of the plain loop.

Every fault is injected at a named point, and every test asserts that it fired.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from closeranks.lanes import words as w
from closeranks.lanes.ranks import Ranks
from tests.lanes_scripts import SCRIPTS
from tests.workers import SLEEP, STOP, Fault, Job, pace, run_job


@functools.cache
def undisturbed(name: str, *args: Any) -> str:
    return run_job(1, SCRIPTS[name], True, *args).digest


def survive(name: str, workers: int, *faults: Fault, args: tuple[Any, ...] = ()) -> Job:
    """Run a script under faults, and look whether the bits and the number of faults are right."""
    job = run_job(workers, SCRIPTS[name], False, *args, faults=faults)
    assert len(job.fired) >= len(faults), job
    assert job.ended is None, job
    assert job.digest == undisturbed(name, *args)
    return job


@pytest.mark.parametrize("name", SCRIPTS)
def test_any_script_survives_a_kill_a_stop_and_a_sleep(name: str) -> None:
    survive(
        name,
        3,
        Fault("fold half written", facts={"tick": 4}),
        Fault("record written", STOP, seconds=0.4, facts={"tick": 5}),
        Fault("complete but not applied", SLEEP, seconds=0.3, facts={"tick": 7}),
    )


ACTIONS = {
    "killed": {},
    "stopped for a while": {"action": STOP, "seconds": 0.3},
    "stopped for ever": {"action": STOP},
    "slow": {"action": SLEEP, "seconds": 0.4},
}


@pytest.mark.parametrize("action", ACTIONS)
def test_an_evaluation_is_disturbed(action: str) -> None:
    place = "evaluate() in the loop over steps() (call 1) at step 5, batch 0"
    job = survive("mlp", 3, Fault("task begun", facts={"place": place}, **ACTIONS[action]))
    assert all(value["totals"] == job.values[0]["totals"] for value in job.values)


def fit_a_line(steps: int, after_step: Callable[[Ranks, int], None]) -> dict[str, Any]:
    """The smallest of trainings, whose steps take next to no time."""
    ranks = Ranks(lanes=4)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ranks.prepare(model, optimizer)
    data = TensorDataset(torch.arange(8.0 * 3 * steps).view(-1, 3) / (10 * steps))
    for step in ranks.steps(data, 8):
        for (x,) in step:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step(ranks, step.number)
    return {"digest": ranks.digest(), "rank": ranks.rank}


def remember_little() -> dict[str, Any]:
    """A job that keeps what came out of four ticks, in place of hundreds."""
    w.HISTORY_COUNT = 4
    # The others are to be at work when the one that was stopped wakes.
    return fit_a_line(60, lambda ranks, number: time.sleep(0.03))


def test_a_worker_that_slept_longer_than_anybody_remembers_is_started_again() -> None:
    undisturbed = run_job(1, remember_little)
    fault = Fault("before forward", STOP, seconds=1.5, incarnation=1, facts={"tick": 5})
    job = run_job(2, remember_little, faults=[fault])
    assert len(job.fired) == 1 and job.ended is None, job
    assert job.digest == undisturbed.digest


def note_steps(folder: str) -> dict[str, Any]:
    """Notes every step in a file, once in the job."""

    def note(ranks: Ranks, number: int) -> None:
        ranks.once(lambda: _note(folder, number))
        pace()

    return fit_a_line(16, note)


def _note(folder: str, number: int) -> None:
    with open(f"{folder}/steps", "a") as file:
        file.write(f"{number}\n")


def test_what_was_done_once_is_not_done_again_by_a_worker_that_was_late(tmp_path: Path) -> None:
    """Worker 0 sleeps while worker 1 does five more steps and dies."""
    job = run_job(
        2,
        note_steps,
        str(tmp_path),
        faults=[
            Fault("before forward", SLEEP, seconds=3.0, incarnation=0, facts={"tick": 5}),
            Fault("before forward", incarnation=1, facts={"tick": 15}),
        ],
    )
    assert len(job.fired) == 2 and job.digest
    done = (tmp_path / "steps").read_text().split()
    assert done == [str(number) for number in range(16)], done
