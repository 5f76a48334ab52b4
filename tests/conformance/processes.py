"""How torch's test classes start their ranks, and what happens to ranks that do not end.

torch starts every rank with `spawn`, which imports torch again for each; `fork` is three times
faster. torch's own way of showing where a rank hangs needs that rank's interpreter lock; the one
used here does not.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch.multiprocessing
import torch.testing._internal.common_distributed as common

from tests.conformance import stacks
from tests.conformance.settings import Settings


def install(settings: Settings) -> None:
    """Change torch's base class for tests, in the worker and in each of its ranks."""
    cases: Any = common.MultiProcessTestCase
    common.get_timeout = lambda test_id: settings.timeout_s
    cases._get_timedout_process_traceback = _write_stacks_of_ranks
    if settings.start == "fork":
        cases._spawn_processes = _fork_ranks
    stacks.register(settings)


def kill_ranks() -> None:
    """Leave no rank of the last test alive, not even one that ignores SIGTERM."""
    for rank in multiprocessing.active_children():
        rank.kill()
        rank.join()


def _fork_ranks(self: Any) -> None:
    self._start_processes(torch.multiprocessing.get_context("fork").Process)


def _write_stacks_of_ranks(self: Any) -> None:
    alive = [process.pid for process in self.processes if process.exitcode is None]
    stacks.write(alive, Settings.from_environment())
