"""Stacks of processes that do not end, on a signal, whatever holds their interpreter lock.

A process that has called `register`, and all that it forks, append the Python stacks of all their
threads to one file when they get the signal. This module knows nothing of torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time

from tests.conformance.settings import Settings

_SIGNAL = signal.SIGUSR1
_FILE = "stacks"
_WRITING_S = 0.5  # what a process gets to write its stacks


def register(settings: Settings) -> None:
    file = settings.in_scratch(_FILE).open("a")  # open as long as the process lives
    faulthandler.register(_SIGNAL, file=file, all_threads=True)


def write(pids: list[int], settings: Settings) -> None:
    """Make each process append its stacks, one after the other so that they do not mix."""
    for pid in pids:
        with settings.in_scratch(_FILE).open("a") as file:
            file.write(f"--- stacks of process {pid} ---\n")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _SIGNAL)
            time.sleep(_WRITING_S)


def take(settings: Settings) -> str:
    """What has been written since the last call."""
    file = settings.in_scratch(_FILE)
    if not file.exists():
        return ""
    text = file.read_text(errors="replace")
    os.truncate(file, 0)
    return text
