"""The threads of a worker: how many, and that they stay so many.

The number of threads decides how sums are cut, and so the last bits. It is a property of the job
and not of the machine: OMP_NUM_THREADS, which launchers set to cores / workers, must not matter.
"""

from __future__ import annotations

import contextlib
import os

import torch


def settle(threads: int) -> None:
    """Compute with so many threads from now on, here and in every process started from here."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    torch.set_num_threads(threads)
    with contextlib.suppress(RuntimeError):  # It can be set only before anything has used it.
        torch.set_num_interop_threads(1)


def check(threads: int, place: str) -> None:
    """ValueError if somebody has changed the number of threads."""
    now = torch.get_num_threads()
    if now != threads:
        raise ValueError(
            f"torch computes with {now} threads at {place}, but Ranks was made with "
            f"threads={threads}: another number may give other bits. Training stopped; take "
            f"Ranks(threads={now}), and do not call torch.set_num_threads()."
        )
