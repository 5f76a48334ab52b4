"""Shared memory for a long time: hundreds of models and groups, and deaths at any moment.

`tests/process/test_shm_lifetime` and `test_shm_lost` hold short versions of these. How late the
survivors noticed a death is logged; run with `--log-cli-level=INFO` to see it.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from closeranks.errors import PeerLost
from tests.process import test_shm_lifetime, test_shm_lost
from tests.process.exchange_ways import WAYS, need
from tests.process.faults import happened_at_s
from tests.process.reference import rows, wrap
from tests.ranks import run_ranks, try_ranks

_log = logging.getLogger(__name__)
_CYCLES = 300


@pytest.mark.timeout(600)
@pytest.mark.parametrize("with_group", (False, True), ids=("models", "groups"))
@pytest.mark.parametrize("way", ("shm-c", "shm-python"))
def test_hundreds_of_them_leave_nothing_behind(way: str, with_group: bool) -> None:
    need(way)
    outcomes = run_ranks(
        2,
        test_shm_lifetime._make_and_destroy,
        _CYCLES,
        with_group,
        env=WAYS[way],
        deadline_s=500.0,
    )
    test_shm_lifetime._check_counts(outcomes)


def _train_until_one_dies(rank: int, delay_s: float, folder: str) -> float:
    torch.manual_seed(1)
    net: Any = wrap(nn.Sequential(*[nn.Linear(200, 200) for _ in range(6)]), bucket_cap_mb=0.3)
    victim = 1
    if rank == victim and os.fork() == 0:  # A child kills its parent when no code expects it.
        time.sleep(delay_s)
        note = Path(folder) / "killed"
        new = note.with_suffix(".new")
        new.write_text(repr(time.monotonic()))
        new.rename(note)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    batch = rows(rank, 0, width=200)
    try:
        while True:
            net.zero_grad()
            net(batch).square().mean().backward()
    except PeerLost as error:
        now_s = time.monotonic()
        assert error.rank == victim and "bucket" in str(error)
        return now_s - happened_at_s(Path(folder) / "killed")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ("shm-c", "shm-python"))
@pytest.mark.parametrize("world", (2, 4))
def test_a_death_at_any_moment_is_noticed(world: int, way: str, tmp_path: Path) -> None:
    need(way)
    clock = random.Random(5)
    late_ms = []
    for turn in range(15):
        folder = tmp_path / str(turn)
        folder.mkdir()
        delay_s = clock.uniform(0.05, 0.5)
        outcomes = try_ranks(world, _train_until_one_dies, delay_s, str(folder), env=WAYS[way])
        for outcome in outcomes:
            if outcome.rank != 1:
                assert not outcome.failed, outcome.trace
                late_ms.append(1e3 * outcome.value)
    late_ms.sort()
    _log.info(
        "%d ranks, %s: noticed after %.0f ms (median), %.0f ms (longest of %d)",
        world,
        way,
        statistics.median(late_ms),
        late_ms[-1],
        len(late_ms),
    )
    assert late_ms[-1] < 2000


@pytest.mark.parametrize("way", ("shm-c", "shm-python"))
def test_ranks_that_stop_and_wake_stay_equal(way: str) -> None:
    need(way)
    run_ranks(4, test_shm_lost.train_while_ranks_stop, 500, env=WAYS[way], deadline_s=150.0)
