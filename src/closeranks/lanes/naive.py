"""What Ranks computes, as plain loops in one process: to be read, and to be compared with.

Same arguments, same bits. No workers, no shared memory, nothing that could go wrong. What is not
needed for the numbers (checkpoints, loaders) is not here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from closeranks.exchange.tree import fold
from closeranks.lanes.assign import cut
from closeranks.lanes.data import Source
from closeranks.lanes.seeds import derive, seed_all
from closeranks.lanes.state import Prepared


class NaiveRanks:
    """Ranks for one process, without anything that only several need."""

    rank, size = 0, 1

    def __init__(self, lanes: int = 8, seed: int = 0) -> None:
        self.lanes, self.seed = lanes, seed
        self.printed: list[str] = []
        self._prepared = Prepared()
        self._calls = 0
        self._loop: str | None = None
        torch.set_num_threads(1)
        seed_all(derive(seed, "start"))

    @property
    def state(self) -> dict[str, Any]:
        return self._prepared.state

    def prepare(self, *objects: Any) -> Any:
        for thing in objects:
            self._prepared.add(thing)
        return objects[0] if len(objects) == 1 else objects

    def steps(
        self,
        dataset: Any,
        batch_size: int,
        epochs: int = 1,
        weight: Callable[[Any], float] | None = None,
        num_workers: int = 0,
        **order: Any,
    ) -> Iterator[NaiveStep]:
        source = Source(dataset, batch_size, self.seed, **{"shuffle": True} | order)
        self._calls += 1
        call, number = self._calls, 0
        for epoch in range(epochs):
            for samples in source.batches(epoch):
                seed_all(derive(self.seed, "before", call, number))
                self._loop = f"the loop over steps() (call {call}) at step {number}"
                yield NaiveStep(self, source, (call, number), epoch, samples, weight)
                self._loop = None
                number += 1
        seed_all(derive(self.seed, "end", call))

    def evaluate(
        self, dataset: Any, batch_size: int, fn: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        source = Source(dataset, batch_size, derive(self.seed, "evaluate"))
        if self._loop is None:
            self._calls += 1
        place = f"evaluate() in {self._loop}" if self._loop else f"evaluate() of call {self._calls}"
        was_training = [(m, m.training) for top in self._prepared.modules for m in top.modules()]
        for module, _ in was_training:
            module.eval()
        totals: dict[str, Any] = {}
        for number, samples in enumerate(source.batches(0)):
            batch = source.fetch(0, samples)
            seed_all(derive(self.seed, place, number))
            with torch.no_grad():
                for name, value in fn(batch).items():
                    plain = value.item() if isinstance(value, Tensor) and not value.dim() else value
                    totals[name] = totals[name] + plain if name in totals else plain
        for module, training in was_training:
            module.training = training
        seed_all(derive(self.seed, "end", place if self._loop else self._calls))
        return totals

    def once(self, fn: Callable[[], object]) -> None:
        if self._loop is None:
            self._calls += 1
        fn()
        place = f"once() in {self._loop}" if self._loop else f"once() of call {self._calls}"
        seed_all(derive(self.seed, "end", place))

    def print(self, *values: object, sep: str = " ") -> None:
        self.printed.append(sep.join(map(str, values)))

    def digest(self) -> str:
        return self._prepared.digest()


class NaiveStep:
    """One global batch, lane after lane."""

    def __init__(
        self,
        ranks: NaiveRanks,
        source: Source,
        place: tuple[int, int],
        epoch: int,
        samples: list[int],
        weight: Callable[[Any], float] | None,
    ) -> None:
        self.number, self.epoch = place[1], epoch
        self.values: dict[str, float] = {}
        self._ranks, self._source, self._place = ranks, source, place
        self._samples, self._weight = samples, weight
        self._phases = 0
        self._logged: dict[str, float] = {}

    def log(self, **values: Any) -> None:
        for name, value in values.items():
            self._logged[name] = float(value.detach() if isinstance(value, Tensor) else value)

    def __iter__(self) -> Iterator[Any]:
        phase, self._phases = self._phases, self._phases + 1
        prepared, names = self._ranks._prepared, (*self._place, phase)
        parameters = prepared.parameters()
        aside = [p.grad for p in parameters]
        buffers = [b for module in prepared.modules for b in module.buffers()]
        before = [b.clone() for b in buffers]
        gradients: list[list[Tensor | None]] = []
        weights: list[float] = []
        logged: list[dict[str, float]] = []
        after_lane_0 = before
        for lane, (lo, hi) in enumerate(cut(len(self._samples), self._ranks.lanes)):
            # Every lane begins with the same buffers, no gradients, and random numbers of its own.
            _set(buffers, before)
            for parameter in parameters:
                parameter.grad = None
            batch = self._source.fetch(self.epoch, self._samples[lo:hi])
            weights.append(self._weight(batch) if self._weight else hi - lo)
            self._logged = {}
            seed_all(derive(self._ranks.seed, "lane", *names, lane))
            yield batch
            logged.append(self._logged)
            gradients.append([p.grad for p in parameters])
            if lane == 0:
                after_lane_0 = [b.clone() for b in buffers]
        _set(buffers, after_lane_0)
        total = sum(weights)
        for index, parameter in enumerate(parameters):
            parameter.grad = aside[index]
            of_lanes = [g[index] for g in gradients]
            if any(g is not None for g in of_lanes):
                _add(parameter, self._average(parameter, of_lanes, weights, total))
        for name in dict.fromkeys(name for values in logged for name in values):
            told = [(w, v[name]) for w, v in zip(weights, logged, strict=True) if name in v]
            # One after the other: the built-in sum() of newer Pythons adds in another way.
            weighted = reduce(operator.add, (w * v for w, v in told), 0.0)
            self.values[name] = weighted / reduce(operator.add, (w for w, _ in told), 0.0)
        seed_all(derive(self._ranks.seed, "after", *names))

    def _average(
        self,
        parameter: Tensor,
        of_lanes: list[Tensor | None],
        weights: list[float],
        total: float,
    ) -> Tensor:
        """Each lane's gradient times its share, added up in the tree over lanes."""
        wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        zero = torch.zeros_like(parameter, dtype=wide)
        leaves = [zero if g is None else g.to_dense().to(wide) for g in of_lanes]
        if self._weight is None:
            leaves = [leaf * (w / total) for leaf, w in zip(leaves, weights, strict=True)]
            return fold(leaves, torch.add).to(parameter.dtype)
        leaves = [leaf * w for leaf, w in zip(leaves, weights, strict=True)]
        return (fold(leaves, torch.add) * (1.0 / total)).to(parameter.dtype)


def _add(parameter: Tensor, average: Tensor) -> None:
    parameter.grad = average if parameter.grad is None else parameter.grad + average


def _set(buffers: list[Tensor], values: list[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
