"""The ways to all-reduce a tensor that are compared, and what memory allows at best.

A way lives in one rank. It is prepared for a size, then asked for blocks of timed repetitions; all
ranks ask for the same blocks in the same order. Knows nothing of rounds and tables.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.bench.raw import COPY, DOOR_2, GLOO, IN_PLACE, OURS
from closeranks.exchange.choose import choose
from closeranks.segment.kernels import kinds_here

Run = Callable[[], object]


class Way:
    """A function that all-reduces a tensor of this rank, or only passes over it."""

    def __init__(self, name: str, make: Callable[[int], tuple[Tensor, Run]]) -> None:
        self.name = name
        self._make = make
        self._tensor: Tensor | None = None
        self._run: Run = lambda: None
        self.cpu_ms = 0.0  # processor time of a repetition in the newest block, all threads

    def prepare(self, numel: int) -> None:
        self._tensor, self._run = self._make(numel)

    def release(self) -> None:
        self._tensor, self._run = None, lambda: None

    def block(self, repetitions: int) -> list[float]:
        """Milliseconds of each repetition; the numbers are small again before the first."""
        assert self._tensor is not None, "a way is prepared before it is timed"
        self._tensor.uniform_(-1, 1)
        run, times = self._run, []
        dist.barrier()
        cpu_began = time.process_time()
        for _ in range(repetitions):
            began = time.perf_counter()
            run()
            times.append((time.perf_counter() - began) * 1e3)
        self.cpu_ms = (time.process_time() - cpu_began) * 1e3 / repetitions
        return times


def all_ways() -> list[Way]:
    """Whatever can be had here without another package."""
    ways = [Way(GLOO, _gloo)]
    for kind in kinds_here():
        with _kernels(kind):
            ways += [Way(OURS[kind], _resident()), Way(DOOR_2[kind], _door_2())]
    return [*ways, Way(IN_PLACE, _in_place), Way(COPY, _copy)]


@contextlib.contextmanager
def _kernels(kind: str) -> Iterator[None]:
    before = os.environ.get("CLOSERANKS_KERNELS")
    os.environ["CLOSERANKS_KERNELS"] = kind
    try:
        yield
    finally:
        del os.environ["CLOSERANKS_KERNELS"]
        if before is not None:
            os.environ["CLOSERANKS_KERNELS"] = before


def _gloo(numel: int) -> tuple[Tensor, Run]:
    tensor = torch.zeros(numel)
    return tensor, lambda: dist.all_reduce(tensor)


def _resident() -> Callable[[int], tuple[Tensor, Run]]:
    """A tensor where door 1 keeps its buckets."""
    group = dist.distributed_c10d._get_default_group()
    exchange = choose(group, torch.device("cpu"), lambda pending, what: _wait(pending))

    def make(numel: int) -> tuple[Tensor, Run]:
        tensor = exchange.allocate([numel], torch.float32, torch.device("cpu"))[0]
        return tensor, lambda: exchange.all_reduce(tensor).wait()

    return make


def _wait(pending: Any) -> None:
    pending.wait()


def _door_2() -> Callable[[int], tuple[Tensor, Run]]:
    """Any tensor, through the backend."""
    group: Any = dist.new_group(backend="closeranks")
    dist.barrier(group)  # It chooses its kernels when it is first used.

    def make(numel: int) -> tuple[Tensor, Run]:
        tensor = torch.zeros(numel)
        return tensor, lambda: dist.all_reduce(tensor, group=group)

    return make


def _in_place(numel: int) -> tuple[Tensor, Run]:
    """Every element is read and written once, by all ranks at once."""
    tensor = torch.zeros(numel)
    return tensor, lambda: tensor.mul_(0.5)


def _copy(numel: int) -> tuple[Tensor, Run]:
    tensor, other = torch.zeros(numel), torch.zeros(numel)
    return tensor, lambda: other.copy_(tensor)
