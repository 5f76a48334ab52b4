"""Step times of several variants on the same ranks, taken in turns so that noise meets them all.

One round gives every variant one block of steps, in an order that changes from round to round. A
block starts at a barrier; its first step is not counted, because it finds the caches full of
somebody else's weights. A step is forward, backward, optimizer and zero_grad.

Runs inside a rank. Must not know how ranks are started, or what is made of the times.
"""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from closeranks.bench.raw import PAIRS, RankResult, Times
from closeranks.measure.cases import CASES, loss_of, make_optimizer
from closeranks.measure.variants import VARIANTS

_WARM_BLOCKS = 2
_TRACED_STEPS = 12


class Trainee:
    """One variant with everything that it trains with."""

    def __init__(self, variant_name: str, module: nn.Module, batch: Tensor) -> None:
        self.module = copy.deepcopy(module)
        self.model = VARIANTS[variant_name].wrap(self.module)
        self.optimizer = make_optimizer(self.module)
        self.batch = batch

    def step(self) -> tuple[float, float]:
        """Take one step; milliseconds of the whole, and of forward and backward."""
        began = time.perf_counter()
        loss_of(self.model(self.batch)).backward()
        differentiated = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        ended = time.perf_counter()
        return (ended - began) * 1e3, (differentiated - began) * 1e3

    def block(self, steps: int, times: Times) -> None:
        dist.barrier()
        self.step()
        cpu_began = time.process_time()
        taken = [self.step() for _ in range(steps)]
        times.cpu.append([(time.process_time() - cpu_began) * 1e3 / steps])
        times.step.append([whole for whole, _ in taken])
        times.backward.append([part for _, part in taken])


def measure(rank: int, case_name: str, rounds: int) -> RankResult:
    """Time all variants of one case."""
    case = CASES[case_name]
    torch.manual_seed(0)
    module, batch = case.make(), case.batch(rank)
    trainees = {name: Trainee(name, module, batch) for name in VARIANTS}
    for _ in range(_WARM_BLOCKS):
        for trainee in trainees.values():
            trainee.block(2, Times())
    times = {name: Times() for name in trainees}
    for number in range(rounds):
        order = list(trainees)
        random.Random(number).shuffle(order)
        for name in order:
            trainees[name].block(case.block_steps, times[name])
    difference = max(_difference(trainees[ours], trainees[theirs]) for _, theirs, ours in PAIRS)
    spans = {ours: _trace(trainees[ours]) for _, _, ours in PAIRS}
    return RankResult(times, spans, difference)


def _difference(ours: Trainee, theirs: Trainee) -> float:
    """How far apart the same number of steps has led; about the precision of a float, or a bug."""
    largest = max(p.detach().abs().max().item() for p in theirs.module.parameters())
    pairs = zip(ours.module.parameters(), theirs.module.parameters(), strict=True)
    return max((a - b).detach().abs().max().item() for a, b in pairs) / largest


def _trace(trainee: Trainee) -> list[tuple[str, int, int]]:
    """The spans of a few steps, with the true ends of exchanges, which cost a callback each."""
    model: Any = trainee.model
    stats = model.reducer.stats
    stats.traces = True
    stats.spans.clear()
    trainee.block(_TRACED_STEPS - 1, Times())
    stats.traces = False
    return [(s.name, s.start_ns, s.end_ns) for s in stats.spans.named("")]
