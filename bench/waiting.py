"""How evenly ranks wait in shared memory: the longest of many runs against the median of all.

Ranks reduce a resident tensor again and again; with more ranks than cores, whoever waits in a wrong
way keeps the rank that is waited for from running, and single runs become very long. A run takes as
long as it takes the slowest rank.

    python bench/waiting.py                          # what is used
    python bench/waiting.py --polls 200 --yield-us 0 # what else could be
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from machine import describe

from ranks import run

SIZES_BYTES = (4 << 10, 1 << 20)
TIMES_MEDIAN_MAX = 3


def measure(
    rank: int, kernels: str, size_bytes: int, runs: int, polls: int | None, yield_us: int | None
) -> list[float]:
    """Microseconds of each run on this rank."""
    from closeranks.exchange.choose import choose
    from closeranks.segment import waiting

    os.environ |= {"CLOSERANKS_EXCHANGE": "shm", "CLOSERANKS_KERNELS": kernels}
    usual = waiting.choose

    def chosen(ranks: int, cores: int) -> waiting.WaitPolicy:
        policy = usual(ranks, cores)
        return waiting.WaitPolicy(
            policy.polls if polls is None else polls,
            policy.yield_us if yield_us is None else yield_us,
        )

    waiting.choose = chosen
    group = dist.distributed_c10d._get_default_group()
    exchange = choose(group, torch.device("cpu"), lambda pending, what: pending.wait())
    tensor = exchange.allocate([size_bytes // 4], torch.float32, torch.device("cpu"))[0]
    for _ in range(20):
        exchange.all_reduce(tensor).wait()
    taken = []
    for _ in range(runs):
        began = time.perf_counter()
        exchange.all_reduce(tensor).wait()
        taken.append((time.perf_counter() - began) * 1e6)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--kernels", nargs="+", default=["c", "python"])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5, help="starts of ranks for each line")
    parser.add_argument("--polls", type=int, help="looks before the first yield")
    parser.add_argument("--yield-us", type=int, help="how long to yield before sleeping")
    options = parser.parse_args()
    for name, value in describe().items():
        print(f"{name:14}{value}")
    print("\nranks kernels   size  median us  longest us  longest/median  runs over 3 medians")
    for size in options.ranks:
        for kernels in options.kernels:
            for size_bytes in SIZES_BYTES:
                for _ in range(options.repeats):
                    by_rank = run(
                        size,
                        120.0,
                        measure,
                        kernels,
                        size_bytes,
                        options.runs,
                        options.polls,
                        options.yield_us,
                    )
                    runs = [max(times) for times in zip(*by_rank, strict=True)]
                    median, longest = statistics.median(runs), max(runs)
                    over = sum(taken > TIMES_MEDIAN_MAX * median for taken in runs)
                    print(
                        f"{size:5} {kernels:7} {size_bytes >> 10:4} Ki {median:10.1f} "
                        f"{longest:11.1f} {longest / median:15.1f} {over:20}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
