"""One suite for every exchange: through shared memory with either kernels, and by the group.

The cases are in exchange_cases. All of them run in one start of ranks, because a start costs more
than they do.
"""

from __future__ import annotations

import pytest

from tests.process.exchange_cases import CASES, Notes
from tests.process.exchange_ways import WAYS, exchange_here, need
from tests.ranks import run_ranks


def _run_all(rank: int, world: int, way: str) -> tuple[str, dict[str, tuple[list[str], dict]]]:
    exchange = exchange_here()
    reports = {}
    for case in CASES:
        notes = Notes()
        case(exchange, world, notes, way)
        reports[case.__name__] = (notes.findings, notes.digests)
    exchange.close()
    return exchange.way, reports


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", (1, 2, 3, 4, 5, 8))
def test_an_exchange_keeps_what_all_promise(way: str, world: int) -> None:
    need(way)
    if world == 1 and way != "group":
        pytest.skip("one rank shares memory with nobody")
    outcomes = run_ranks(world, _run_all, world, way, env=WAYS[way], deadline_s=150.0)
    ways = {outcome[0] for outcome in outcomes}
    wanted = {"shm-c": "C kernels", "shm-python": "pure Python", "group": "gloo"}[way]
    assert len(ways) == 1 and wanted in ways.pop(), ways
    wrong = []
    for case in CASES:
        reports = [outcome[1][case.__name__] for outcome in outcomes]
        for rank, (findings, digests) in enumerate(reports):
            wrong += [f"rank {rank}, {case.__name__}: {finding}" for finding in findings[:5]]
            first = reports[0][1]
            assert digests.keys() == first.keys()
            differing = [name for name, digest in digests.items() if digest != first[name]]
            wrong += [f"rank {rank} and rank 0 differ in {name}" for name in differing[:5]]
    assert not wrong, "\n".join(wrong)
