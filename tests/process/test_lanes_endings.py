"""How a job of Ranks ends when it cannot go on: with a message that says who, where and why."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from closeranks.lanes.ranks import Ranks
from tests.workers import Fault, pace, run_job


def train(
    in_lane: Any = None, after_step: Any = None, steps: int = 12, workers_lanes: int = 8
) -> dict[str, Any]:
    """Linear regression; the hooks are called with the script's ranks and step."""
    ranks = Ranks(lanes=workers_lanes)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ranks.prepare(model, optimizer)
    data = TensorDataset(torch.arange(16.0 * 3 * steps).view(-1, 3) / 100)
    for step in ranks.steps(data, 16, shuffle=False):
        for (x,) in step:
            if in_lane is not None:
                in_lane(ranks, step, x)
            model(x).square().mean().backward()
            step.log(loss=1.0)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)  # Nobody is overtaken because it has to wait for a core.
        pace()
        if after_step is not None and after_step(ranks, step):
            break
    ranks.print("the end")
    return {"digest": ranks.digest(), "rank": ranks.rank}


def divide_by_zero(ranks: Any, step: Any, x: Any) -> None:
    if step.number == 4 and float(x[0, 0]) == float(torch.tensor(16.0 * 3 * 4 / 100)):
        raise ZeroDivisionError("a sample that nobody can bear")


def divide_once(ranks: Any, step: Any, x: Any) -> None:
    if step.number >= 4 and ranks._worker.seat.number == 1:
        raise ZeroDivisionError("a worker that cannot bear it")


def kill_whoever(ranks: Any, step: Any, x: Any) -> None:
    if step.number == 4 and float(x[0, 0]) == float(torch.tensor(16.0 * 3 * 4 / 100)):
        os.kill(os.getpid(), signal.SIGKILL)


def worker_1_leaves(ranks: Any, step: Any) -> bool:
    return step.number == 5 and ranks.rank == 1


def worker_1_evaluates(ranks: Any, step: Any) -> bool:
    if step.number == 5 and ranks.rank == 1:
        ranks.once(lambda: None)
    return False


def fail_after_step(ranks: Any, step: Any) -> bool:
    if step.number == 5:
        raise ZeroDivisionError("on every worker")
    return False


def test_an_exception_in_one_lane_ends_the_job_with_its_traceback() -> None:
    job = run_job(3, train, divide_by_zero)
    assert job.ended is not None and "a sample that nobody can bear" in job.ended
    assert "in lane 0 of tick 5" in job.ended
    assert job.values == []


def test_an_exception_of_one_worker_ends_that_worker_only() -> None:
    job = run_job(3, train, divide_once)
    assert job.ended is None
    assert job.digest == run_job(1, train).digest
    assert any("a worker that cannot bear it" in note for note in job.notes)


def test_a_lane_that_kills_two_workers_ends_the_job() -> None:
    job = run_job(3, train, kill_whoever)
    assert job.ended is not None
    assert "LaneDeadly" in job.ended and "lane 0 of step 4" in job.ended


@pytest.mark.parametrize("leave", [worker_1_leaves, worker_1_evaluates])
def test_workers_that_do_different_things_are_told(leave: Any) -> None:
    job = run_job(3, train, None, leave)
    assert job.ended is not None and "LoopDiverged" in job.ended, job
    assert "step" in job.ended and "worker 1" in job.ended, job.ended


def test_an_exception_on_every_worker_ends_the_job() -> None:
    job = run_job(2, train, None, fail_after_step)
    assert job.ended is not None and "on every worker" in job.ended


def test_all_leave_the_loop_together() -> None:
    job = run_job(3, train, None, leave_at_5)
    assert job.ended is None and len(job.values) == 3
    assert job.printed == ["the end"]


def leave_at_5(ranks: Any, step: Any) -> bool:
    return step.number == 5


def leave_by_values(ranks: Any, step: Any) -> bool:
    return step.number >= 8 and step.values["loss"] == 1.0


def test_a_worker_that_was_overtaken_leaves_the_loop_like_the_others() -> None:
    faults = [Fault("after backward", "stop", seconds=0.8, count=3)]
    job = run_job(3, train, None, leave_by_values, 40, faults=faults)
    assert job.fired and job.ended is None
    assert job.digest == run_job(1, train, None, leave_by_values, 40).digest


def test_more_workers_than_lanes_stand_by() -> None:
    faults = [Fault("after backward", count=3)]
    job = run_job(4, train, None, None, 12, 2, faults=faults)
    assert job.fired and job.digest == run_job(1, train, None, None, 12, 2).digest
    assert any("4 workers share 2 lanes, so 2 of them stand by" in note for note in job.notes)
