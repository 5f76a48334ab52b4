"""Workers that are not alike, and lanes that cannot be repeated, are refused by name."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from closeranks.lanes import resume
from tests.lanes_scripts import make
from tests.workers import Fault, Job, pace, run_job


def train(change: str = "", naive: bool = False, **options: Any) -> dict[str, Any]:
    """Linear regression; worker 1, or every worker, does something that it must not."""
    number = int(os.environ.get("CLOSERANKS_SEAT", "0:0:0").split(":")[1])
    if change == "torch" and number == 1:
        torch.__version__ = "1.0.0+other"
    if change in ("cpu", "cpu of a newcomer") and number == (3 if "new" in change else 1):
        resume._cpu = lambda: "Pentium"
    threads = 2 if change == "threads" and number == 1 else 1
    ranks = make(naive, **{"lanes": 4} | ({} if naive else {"threads": threads} | options))
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    if change == "weights" and number == 1:
        model[1].weight.data[0, 2] += 1e-6
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ranks.prepare(model, optimizer)
    drawn = []
    epochs = 200 if "newcomer" in change else 4  # Enough for somebody to come.
    for step in ranks.steps(TensorDataset(torch.randn(32, 3)), 8, epochs):
        for (x,) in step:
            drawn.append(len(drawn))
            noise = len(drawn) * 1e-3 if change == "unsteady" else 0.0
            model(x).add(noise).square().mean().backward()
            step.log(loss=float(len(drawn)) if change == "unsteady log" else 1.0)
            if change == "put":
                torch.zeros(4).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))
        if change == "more threads" and step.number == 5:
            torch.set_num_threads(2)
        optimizer.step()
        optimizer.zero_grad()
        if change == "replica" and number == 1 and step.number == 5:
            model[0].bias.data[1] += 1e-6
        pace()
    return {"digest": ranks.digest(), "lanes": len(drawn)}


def ended(job: Job, *texts: str) -> None:
    assert job.ended is not None, job
    for text in texts:
        assert text in job.ended, job.ended


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("torch", "the build of torch: "),
        ("cpu", "the CPU: "),
        ("threads", "threads: "),
    ],
)
def test_other_conditions_are_refused_when_a_worker_comes(change: str, said: str) -> None:
    ended(run_job(2, train, change), "WorkersDiffer: worker", said, "Training stopped")


def test_other_conditions_of_a_newcomer_are_refused() -> None:
    faults = [Fault("after backward", incarnation=1, count=3)]
    job = run_job(3, train, "cpu of a newcomer", faults=faults)
    assert job.fired
    ended(job, "WorkersDiffer: worker 1", "the CPU: Pentium, there ")


def test_other_weights_are_refused_by_name() -> None:
    ended(run_job(2, train, "weights"), "ModelMismatch", "workers 0 and 1", "values.1.weight")


def test_replicas_that_have_come_apart_are_named() -> None:
    job = run_job(2, train, "replica")
    ended(job, "WorkersDiffer: workers 0 and 1", "after epoch 1 of call 1", "values.0.bias")


def checked(change: str) -> dict[str, Any]:
    return train(change, check_every=3)


def test_a_check_compares_replicas_as_well() -> None:
    ended(run_job(2, checked, "replica"), "WorkersDiffer: workers 0 and 1", "after step 6")


@pytest.mark.parametrize(
    ("change", "said"),
    [("unsteady", "the gradients of 0:Sequential."), ("unsteady log", "what was logged")],
)
def test_a_lane_that_differs_the_second_time_is_an_error(change: str, said: str) -> None:
    job = run_job(1, checked, change)
    ended(job, "LaneUnsteady: worker 0 did lane 0 of step 0, phase 0 of call 1", said, "twice")


def test_lanes_are_done_twice_as_often_as_asked_for() -> None:
    job, unchecked = run_job(1, checked, ""), run_job(1, train, "")
    assert job.digest == unchecked.digest == run_job(1, train, "", True).digest
    assert job.values[0]["lanes"] == unchecked.values[0]["lanes"] + 6  # 16 steps, each third


def test_another_number_of_threads_in_between_is_refused() -> None:
    ended(run_job(1, train, "more threads"), "2 threads at step 6", "Ranks(threads=2)")


def test_an_operator_that_is_not_deterministic_is_warned_about_by_name() -> None:
    job = run_job(1, caught, train, "put")
    assert any("put_" in text for text in job.values[0]["warnings"]), job


def caught(fn: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        value = fn(*args)
    return value | {"warnings": [str(each.message) for each in found]}
