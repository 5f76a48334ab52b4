"""Two workers, one of them slowed down by stopping and continuing it all the time.

The slow one runs for a quarter of each period. What a job reaches is compared with the sum of the
two speeds: with what one worker alone does, and a quarter of that. Each way trains for some seconds
at a time, in turns: alone, both with Ranks, both with torch's class, whose steps wait for the
slower one.

Runs inside a rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from seats import Job, sit_down
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import TensorDataset

from closeranks.measure.cases import CASES, loss_of, make_optimizer

LANES, LANE_SAMPLES = 16, 16
SHARE = 0.25  # of its time that the slow one runs
PERIOD_S = 0.04
_CASE = "mlp16"


def train_by_ranks(rank: int, steps: int, is_slowed: bool, job: Job) -> list[float]:
    """When each step ended on this rank, in seconds from the first."""
    sit_down(job, rank)
    from closeranks import Ranks

    ranks = Ranks(lanes=LANES)
    model = CASES[_CASE].make()
    optimizer = make_optimizer(model)
    ranks.prepare(model, optimizer)
    ended = []
    with _slowed(is_slowed and rank == 1):
        for step in ranks.steps(_data(8), LANES * LANE_SAMPLES, epochs=steps // 8, shuffle=False):
            for (x,) in step:
                loss_of(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
            ended.append(time.perf_counter())
    return ended


def train_by_torch(rank: int, steps: int, is_slowed: bool) -> list[float]:
    """The same lanes, half of them on each rank, in torch's class."""
    module = CASES[_CASE].make()
    model = TorchDDP(module)
    optimizer = make_optimizer(module)
    each = LANES // dist.get_world_size()
    (data,) = _data(1).tensors
    lanes = data.view(LANES, LANE_SAMPLES, -1)[rank * each : (rank + 1) * each]
    ended = []
    with _slowed(is_slowed and rank == 1):
        for _ in range(steps):
            with model.no_sync():
                for x in lanes[:-1]:
                    loss_of(model(x)).backward()
            loss_of(model(lanes[-1])).backward()
            optimizer.step()
            optimizer.zero_grad()
            ended.append(time.perf_counter())
    return ended


def _data(batches: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(batches * LANES * LANE_SAMPLES, 1024, generator=generator))


@contextlib.contextmanager
def _slowed(is_slowed: bool) -> Iterator[None]:
    """Let a child stop and continue this process."""
    if not is_slowed:
        yield
        return
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(ProcessLookupError):
            while os.getppid() == parent:
                time.sleep(SHARE * PERIOD_S)
                os.kill(parent, signal.SIGSTOP)
                time.sleep((1.0 - SHARE) * PERIOD_S)
                os.kill(parent, signal.SIGCONT)
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
