"""Step times of Ranks and of DistributedDataParallel on the same ranks, taken in turns.

Both train the same weights on the same data, with as many lanes as workers and nobody in trouble.
One round gives each of them one block of steps. A step is fetching the batch, forward, backward,
optimizer and zero_grad; both fetch from the same dataset of tensors, door 1 by slicing and door 3
as Ranks does.

Runs inside a rank.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from seats import Job, sit_down
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import TensorDataset

from closeranks import DistributedDataParallel, Ranks
from closeranks.measure.cases import CASES, loss_of, make_optimizer

RANKS, OURS, TORCH = "Ranks", "door 1", "torch"


@dataclass
class Times:
    """Milliseconds of one rank: for each variant and round a list with a number for each step."""

    ms: dict[str, list[list[float]]] = field(default_factory=dict)
    cpu_ms: dict[str, list[list[float]]] = field(default_factory=dict)  # a mean for each block


def measure(rank: int, case_name: str, rounds: int, warm: int, job: Job) -> Times:
    case, size = CASES[case_name], dist.get_world_size()
    data = TensorDataset(torch.randn((8 * size * case.batch_shape[0], *case.batch_shape[1:])))
    by_name = {
        RANKS: _by_ranks(case_name, data, rank, size, job),
        OURS: _by_wrapper(case_name, data, rank, size, DistributedDataParallel),
        TORCH: _by_wrapper(case_name, data, rank, size, TorchDDP),
    }
    times = Times()
    for number in range(warm + rounds):
        order = list(by_name)
        random.Random(number).shuffle(order)
        for name in order:
            dist.barrier()
            by_name[name]()
            cpu_began = time.process_time()
            taken = [by_name[name]() for _ in range(case.block_steps)]
            cpu_ms = (time.process_time() - cpu_began) * 1e3 / case.block_steps
            if number >= warm:
                times.ms.setdefault(name, []).append(taken)
                times.cpu_ms.setdefault(name, []).append([cpu_ms])
    return times


def _by_ranks(
    case_name: str, data: TensorDataset, rank: int, size: int, job: Job
) -> Callable[[], float]:
    sit_down(job, rank)
    ranks = Ranks(lanes=size)
    torch.manual_seed(0)
    model = CASES[case_name].make()
    optimizer = make_optimizer(model)
    ranks.prepare(model, optimizer)
    batch_size = size * CASES[case_name].batch_shape[0]
    steps = iter(ranks.steps(data, batch_size, epochs=1_000_000, shuffle=False))

    def step() -> float:
        began = time.perf_counter()
        for (x,) in next(steps):
            loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return (time.perf_counter() - began) * 1e3

    return step


def _by_wrapper(
    case_name: str, data: TensorDataset, rank: int, size: int, wrapper: type[nn.Module]
) -> Callable[[], float]:
    torch.manual_seed(0)
    module = CASES[case_name].make()
    model = wrapper(module)
    optimizer = make_optimizer(module)
    each = CASES[case_name].batch_shape[0]
    number = 0

    def step() -> float:
        nonlocal number
        began = time.perf_counter()
        lo = (number % 8 * size + rank) * each
        number += 1
        loss_of(model(data.tensors[0][lo : lo + each])).backward()
        optimizer.step()
        optimizer.zero_grad()
        return (time.perf_counter() - began) * 1e3

    return step
