"""What a rank does to see how a task is learned: train with one wire format, look at it in between.

The clock runs while steps are taken and stands still while the model is looked at. Knows tasks and
steps; must not know what is concluded from a curve.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from tasks import TASKS

from closeranks.ddp.wrapper import DistributedDataParallel

_LOOKS = 10  # at the model, evenly over the steps


@dataclass
class Curve:
    """One run as the first rank saw it."""

    seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    metrics: list[float] = field(default_factory=list)
    way: str = ""


def learn(rank: int, name: str, wire: str, seed: int, steps: int) -> Curve:
    task = TASKS[name]
    torch.manual_seed(seed)
    module = task.make_model()
    optimizer, schedule = task.make_optimizer(module, steps)
    model = DistributedDataParallel(module, wire=wire)
    data = task.load()
    curve, spent_s, began = Curve(), 0.0, 0.0
    for step in range(1, steps + 1):
        if began == 0.0:
            dist.barrier()
            began = time.perf_counter()
        order = torch.Generator().manual_seed((seed * 1_000_003 + step) * 64 + rank)
        optimizer.zero_grad()
        task.loss(model, data, order).backward()
        optimizer.step()
        schedule.step()
        if step % max(1, steps // _LOOKS) == 0 or step == steps:
            spent_s += time.perf_counter() - began
            began = 0.0
            if rank == 0:
                with torch.no_grad():
                    curve.metrics.append(task.evaluate(module, data))
            curve.seconds.append(spent_s)
            curve.steps.append(step)
    curve.way = model.exchange
    _check_equal(module)
    return curve


def _check_equal(module: torch.nn.Module) -> None:
    """A curve of replicas that have drifted apart would say nothing."""
    flat = torch.cat([p.detach().flatten() for p in module.parameters()])
    other = flat.clone()
    dist.broadcast(other, 0)
    assert torch.equal(flat.view(torch.int32), other.view(torch.int32)), "replicas have drifted"
