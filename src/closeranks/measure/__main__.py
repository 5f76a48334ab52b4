"""`python -m closeranks.measure FOLDER`: one rank of `closeranks bench`.

Meets the others, times what it is told to, and leaves FOLDER/rank-N.json.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from closeranks.bench.raw import MIB, TITLES, Blocks, Haul, RankResult
from closeranks.measure import rounds, turns
from closeranks.observe.progress import progress
from closeranks.world import init


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", type=float, nargs="*", default=[], help="of all-reduces, in MiB")
    parser.add_argument("--cases", nargs="*", default=[], choices=list(TITLES))
    parser.add_argument("--rounds", type=int, required=True)
    given = parser.parse_args()
    world = init()
    try:
        torch.set_num_threads(1)
        load_before = os.getloadavg()[0]
        blocks: list[Blocks] = []
        steps: dict[str, RankResult] = {}
        turn = turns.measure([round(size * MIB / 4) for size in given.sizes], given.rounds)
        work: list[tuple[str, Callable[[], object]]] = [
            (f"all-reduce of {size:g} MiB", lambda: blocks.append(next(turn)))
            for size in given.sizes
        ]
        for case in given.cases:
            work.append((TITLES[case], _step_of(case, world.rank, given.rounds, steps)))
        for name, measure in (bar := progress(work)):
            bar.show(now=name)
            measure()
        haul = Haul((load_before, os.getloadavg()[0]), blocks, steps)
        haul.write(given.folder / f"rank-{world.rank}.json")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


def _step_of(
    case: str, rank: int, count: int, steps: dict[str, RankResult]
) -> Callable[[], object]:
    def measure() -> None:
        steps[case] = rounds.measure(rank, case, count)

    return measure


if __name__ == "__main__":
    sys.exit(main())
