"""How much memory the gradients of a job take, read from the real bytes of its segment."""

from __future__ import annotations

import math
import os
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from closeranks.lanes.ranks import Ranks
from tests.workers import run_job

WIDTH = 1448
GRADIENT_BYTES = 4 * WIDTH * WIDTH  # about 8 MB
OTHER_BYTES = 2 << 20  # words and texts of one worker


def train(lanes: int, absent_s: float = 0.0) -> dict[str, Any]:
    """Also returns how many bytes the segment took after each step, in gradients."""
    ranks = Ranks(lanes=lanes)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    ranks.prepare(model)
    fd = ranks._worker.board.roster.fd
    taken = []
    for step in ranks.steps(TensorDataset(torch.randn(2 * lanes, WIDTH)), 2 * lanes, epochs=10):
        if step.number == 2 and ranks.rank == 1:
            time.sleep(absent_s)
        for (x,) in step:
            model(x).square().mean().backward()
            time.sleep(0.03)  # So long that everybody comes in time for its own lanes.
        model.zero_grad()
        bytes_taken = os.fstat(fd).st_blocks * 512 - ranks.size * OTHER_BYTES
        taken.append(bytes_taken / GRADIENT_BYTES)
        time.sleep(0.03)
    return {"digest": ranks.digest(), "taken": taken}


@pytest.mark.parametrize(("workers", "lanes"), [(1, 8), (2, 8), (4, 4)])
def test_gradients_take_what_is_promised(workers: int, lanes: int) -> None:
    job = run_job(workers, train, lanes)
    assert job.ended is None and job.values, job
    # Where somebody had to help (cores may be few here), more was taken for two steps.
    usual = sorted(taken for value in job.values for taken in value["taken"][2:])
    assert usual[len(usual) // 4] <= workers * (math.log2(lanes / workers) + 1) + 2, usual
    assert usual[0] >= 2.0, "it is the right file"


def test_what_was_taken_for_others_is_given_back() -> None:
    """A worker does everything for a while, because the other one is asleep."""
    job = run_job(2, train, 8, 0.6)
    for value in job.values:
        taken = value["taken"]
        assert max(taken) > min(taken[-3:]) + 0.1, taken
        assert min(taken[-3:]) <= 2 * (math.log2(4) + 1) + 2, taken
