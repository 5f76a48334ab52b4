"""What the supervisor has to know of a job, as one frozen value."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from closeranks.launch.channel import Message
from closeranks.launch.record import Worker


@dataclass(frozen=True)
class Job:
    """One job, and how it gets new workers started."""

    size: int  # of the world: the ranks of all machines
    show: frozenset[int] | None
    grace_s: float
    hang_report_s: float
    hang_timeout_s: float | None
    listener_of: Callable[[Worker], socket.socket | None]
    message_of: Callable[[Worker], Message]  # the job that a worker is handed
    prepare: Callable[[], None]  # called before all workers start, again or for the first time
