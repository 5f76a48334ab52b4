"""Every way to exchange, and how a test starts ranks that use it.

A way is named by the environment that chooses it, so that tests go the road a user's program goes:
through `choose`, over a gloo group.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from closeranks.exchange.base import Exchange, Pending
from closeranks.exchange.choose import choose
from closeranks.segment.kernels import library

WAYS = {
    "shm-c": {"CLOSERANKS_EXCHANGE": "shm", "CLOSERANKS_KERNELS": "c"},
    "shm-python": {"CLOSERANKS_EXCHANGE": "shm", "CLOSERANKS_KERNELS": "python"},
    "group": {"CLOSERANKS_EXCHANGE": "group"},
}
CPU = torch.device("cpu")


def need(way: str) -> None:
    """Skip what this machine cannot: there is no compiler everywhere."""
    if way == "shm-c" and library() is None:
        pytest.skip("the C kernels were not built here")


def plain_wait(pending: Pending, what: Callable[[], str]) -> None:
    """Waits as a reducer's waiter does, and explains nothing."""
    pending.wait()


def exchange_here(group: dist.ProcessGroup | None = None) -> Exchange:
    """The exchange of this rank, as its environment asks for it."""
    chosen = dist.distributed_c10d._get_default_group() if group is None else group
    return choose(chosen, CPU, plain_wait)
