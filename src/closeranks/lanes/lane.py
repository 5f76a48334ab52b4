"""The lanes of a phase, and what is told of one beside its gradient: weight, log, what it used.

Pure: numbers and text. The text is read by all workers, so whoever computed a lane, all of them
make the same of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Work:
    """One phase: where in the script it is, and its lanes."""

    place: str
    names: tuple[int | str, ...]  # of its seeds
    sizes: Sequence[int]  # samples of each lane
    fetch: Callable[[int, bool], Any]  # the batch of a lane; whether it is for the second time
    weigh: Callable[[Any], float] | None
    twice: int | None = None  # the lane that is done twice and compared


@dataclass
class Lane:
    """A lane that is being computed, or what was told of one."""

    tick: int
    index: int
    weight: float  # samples, or what weight= says
    values: dict[str, float] = field(default_factory=dict)
    unused: list[int] = field(default_factory=list)  # parameters without a gradient
    has_buffers: bool = False  # it is lane 0, and the forward has changed buffers
    buffers: list[Tensor] | None = None

    def told(self) -> str:
        return json.dumps([self.weight, self.values, self.unused, self.has_buffers])

    @classmethod
    def read(cls, tick: int, index: int, text: str) -> Lane:
        weight, values, unused, has_buffers = json.loads(text)
        return cls(tick, index, weight, values, unused, has_buffers)


def mean_values(lanes: Sequence[Lane]) -> dict[str, float]:
    """The weighted mean of whatever was logged, added up in the order of lanes."""
    sums: dict[str, list[float]] = {}
    for lane in lanes:
        for name, value in lane.values.items():
            total = sums.setdefault(name, [0.0, 0.0])
            total[0] += lane.weight * value
            total[1] += lane.weight
    return {name: total / weight if weight else total for name, (total, weight) in sums.items()}


def unused_everywhere(lanes: Sequence[Lane]) -> set[int]:
    """The parameters that no lane has used: their gradient stays as it was."""
    unused = set(lanes[0].unused)
    for lane in lanes[1:]:
        unused &= set(lane.unused)
    return unused
