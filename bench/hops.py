"""What a rank does to measure a network: train with torch's class and with ours, in turns.

One round gives every variant one step, or a few on a fast network, in an order that changes from
round to round. A step is forward, backward, SGD and zero_grad of six layers of 1024 x 1024 at
batches of 16: 25 MB of gradients and little else. Knows nothing of how ranks are started.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from closeranks.ddp.wrapper import DistributedDataParallel
from closeranks.measure.cases import CASES, loss_of, make_optimizer

TORCH = "torch"
_WARM_STEPS = 3  # buckets are planned anew after the first


@dataclass
class Haul:
    """What one rank brings home."""

    ms: dict[str, list[list[float]]] = field(default_factory=dict)  # by variant, for each round
    ways: dict[str, str] = field(default_factory=dict)  # how ours exchanged, in its own words


class Trainee:
    """One variant with everything that it trains with."""

    def __init__(self, variant: str, module: nn.Module, batch: Tensor) -> None:
        self.module = copy.deepcopy(module)
        self.model: nn.Module
        if variant == TORCH:
            self.model = TorchDDP(self.module)
        else:
            self.model = DistributedDataParallel(self.module, wire=variant)
        self.optimizer = make_optimizer(self.module)
        self.batch = batch

    def step(self) -> float:
        """Take one step; milliseconds."""
        began = time.perf_counter()
        loss_of(self.model(self.batch)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return (time.perf_counter() - began) * 1e3

    def block(self, steps: int) -> list[float]:
        dist.barrier()
        return [self.step() for _ in range(steps)]


def measure(rank: int, variants: Sequence[str], rounds: int, block_steps: int) -> Haul:
    """Time all variants; their names are `torch` and the wire formats of ours."""
    torch.manual_seed(0)
    case = CASES["mlp16"]
    module, batch = case.make(), case.batch(rank)
    trainees = {name: Trainee(name, module, batch) for name in variants}
    for trainee in trainees.values():
        trainee.block(_WARM_STEPS)
    haul = Haul({name: [] for name in variants})
    for number in range(rounds):
        order = list(variants)
        random.Random(number).shuffle(order)
        for name in order:
            haul.ms[name].append(trainees[name].block(block_steps))
    for name, trainee in trainees.items():
        haul.ways[name] = getattr(trainee.model, "exchange", "gloo")
    return haul
