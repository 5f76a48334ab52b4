"""Seats for ranks of a measurement, as a launcher would keep them: Ranks without `closeranks run`.

Nobody is started again here, so a measurement ends with the first worker that dies.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from closeranks.segment.roster import SEAT_VARIABLE, Roster

Job = tuple[int, int]  # the process that holds the memory of the job, and its descriptor there


@contextmanager
def job(workers: int) -> Iterator[Job]:
    """The memory of a job, for workers that are started meanwhile."""
    roster = Roster.create(workers)
    for worker in range(workers):
        roster.admit(worker)
    try:
        yield os.getpid(), roster.fd
    finally:
        roster.close()


def sit_down(job: Job, rank: int) -> None:
    """Inside a rank: what the launcher does before the script begins."""
    holder, descriptor = job
    memory = os.open(f"/proc/{holder}/fd/{descriptor}", os.O_RDWR)
    messages = os.open(os.devnull, os.O_WRONLY)
    Roster(memory).started(rank, os.getpid())
    os.environ[SEAT_VARIABLE] = f"{memory}:{rank}:{messages}"
