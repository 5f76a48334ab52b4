"""All ways to all-reduce take turns on the same ranks.

One round gives each way one block of repetitions, in an order that changes from round to round, so
that whatever slows the machine down meets them all. Runs inside a rank.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from closeranks.bench.raw import MIB, Blocks
from closeranks.measure.ways import Way, all_ways

_BLOCK_BYTES = 128 * MIB  # about so much is reduced in one block, in 1 to 20 repetitions


def measure(
    numels: Sequence[int],
    rounds: int,
    peers: Sequence[Way] = (),
) -> Iterator[Blocks]:
    """Time all ways, size after size."""
    by_name = {way.name: way for way in [*all_ways(), *peers]}
    for numel in numels:
        blocks = Blocks(numel)
        repetitions = max(1, min(20, _BLOCK_BYTES // (4 * numel)))
        for way in by_name.values():
            way.prepare(numel)
            way.block(2)
        for number in range(rounds):
            order = list(by_name)
            random.Random(number).shuffle(order)
            for name in order:
                way = by_name[name]
                blocks.ms.setdefault(name, []).append(way.block(repetitions))
                blocks.cpu_ms.setdefault(name, []).append(way.cpu_ms)
        for way in by_name.values():
            way.release()
        yield blocks
