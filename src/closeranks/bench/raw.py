"""What a rank brings home from a measurement, as plain values, and its way through JSON.

Everything is in milliseconds. Knows names, and nothing of how a time is taken.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 1 << 20

# The cases of step times, by name.
TITLES = {
    "tiny": "160 tiny layers",
    "mlp16": "MLP 25 MB, batch 16",
    "mlp128": "MLP 25 MB, batch 128",
    "transformer": "transformer",
}
# (is the gradient a view of its bucket?, torch's, ours)
PAIRS = ((False, "torch", "ours"), (True, "torch view", "ours view"))

# The ways to all-reduce, and what memory allows.
GLOO, MPI, DEEPSPEED = "gloo", "OpenMPI", "DeepSpeed"
IN_PLACE, COPY = "limit: in place", "limit: copy"
OURS = {"c": "ours, C", "python": "ours, Python"}
DOOR_2 = {"c": "door 2, C", "python": "door 2, Python"}
LIMITS = (IN_PLACE, COPY)


@dataclass
class Times:
    """One rank and one class: for each round a list, with a number for each step."""

    step: list[list[float]] = field(default_factory=list)
    backward: list[list[float]] = field(default_factory=list)  # forward and backward alone
    cpu: list[list[float]] = field(default_factory=list)  # of all threads; one mean for a block


@dataclass
class RankResult:
    """What one rank brings home from one case."""

    times: dict[str, Times]
    # For each traced step: name, start and end of the backward and of every exchange.
    spans: dict[str, list[tuple[str, int, int]]]
    difference: float  # the largest between a weight of ours and torch's, relative to the largest


@dataclass
class Blocks:
    """All-reduces of one size: by way, for each round a list."""

    numel: int
    ms: dict[str, list[list[float]]] = field(default_factory=dict)
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)  # a mean for each round


@dataclass
class Haul:
    """Everything that one rank brings home."""

    loads: tuple[float, float]  # the load average before and after
    blocks: list[Blocks]
    steps: dict[str, RankResult]  # by case

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)), "utf-8")


def read(path: Path) -> Haul:
    plain: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return Haul(
        tuple(plain["loads"]),
        [Blocks(**blocks) for blocks in plain["blocks"]],
        {
            case: RankResult(
                {name: Times(**times) for name, times in rank["times"].items()},
                {name: [tuple(s) for s in spans] for name, spans in rank["spans"].items()},
                rank["difference"],
            )
            for case, rank in plain["steps"].items()
        },
    )
