"""A worker that stands still for a minute is killed and started again, while the job goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch.job import run
from tests.launch.test_ranks import TRAIN, digest_of

STOP = (
    "if ranks.rank == 1 and life == 0 and step.number == 50: os.kill(os.getpid(), signal.SIGSTOP)"
)


@pytest.mark.timeout(900)
def test_a_worker_that_is_stopped_for_ever_is_replaced(tmp_path: Path) -> None:
    long = TRAIN.replace("12.0 * 3 * 60", "12.0 * 3 * 700")
    alone = digest_of(
        run(tmp_path, "-n", "1", "train.py", script=long.replace("0.02", "0.0"), deadline_s=300.0)
    )
    slow = long.replace("time.sleep(0.02)", "time.sleep(0.12)")
    done = run(tmp_path, "-n", "3", "train.py", STOP, script=slow, deadline_s=300.0)
    assert digest_of(done) == alone
    killed = [line for line in done.report if re.match(r"rank 1 made no progress for 6\d s", line)]
    assert len(killed) == 1, done.err
    assert any(line.startswith("rank 1 is back after") for line in done.report), done.err
