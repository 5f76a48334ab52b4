"""A job on two hosts, one command each, when a worker is killed or a host vanishes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.hosts.places import hosts
from tests.hosts.test_launch import EXCHANGE, on_both
from tests.launch.job import Running


def _wait_for_training(running: list[Running]) -> None:
    for one in running:
        one.wait_for(lambda one=one: one.text().count(EXCHANGE) == 2, "training on both")


def test_a_rank_that_is_killed_ends_the_job_on_both_hosts(tmp_path: Path) -> None:
    with hosts(2) as network, on_both(network, tmp_path, "kill") as running:
        _wait_for_training(running)
        line = next(t for t in running[1].text().splitlines() if t.startswith("rank 2 | "))
        os.kill(int(line.split()[-1]), signal.SIGKILL)
        ended = [one.end() for one in running]
    for done in ended:
        assert done.code != 0
        assert "rank 2" in done.err, done.err
    assert "SIGKILL" in ended[1].err


def test_a_host_that_vanishes_ends_the_job_on_the_other(tmp_path: Path) -> None:
    with hosts(2) as network, on_both(network, tmp_path, "vanish") as running:
        _wait_for_training(running)
        network.unplug(1)
        unplugged_s = time.monotonic()
        ended = [one.end() for one in running]
        took_s = time.monotonic() - unplugged_s
    assert took_s < 30.0, took_s
    for host, done in enumerate(ended):
        assert done.code != 0
        other = network.address(1 - host)
        assert "nothing has come from it" in done.err and other in done.err, done.err
