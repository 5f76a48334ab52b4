"""Whether other processes of this host live: identified by pid and start time, watched by pidfd.

A pid may be given to another process; the start time tells them apart when the watch begins, and
from then on the kernel's descriptor means that one process. Knows processes; must not know ranks'
work.
"""

from __future__ import annotations

import os
import select
import weakref
from pathlib import Path


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; OSError if there is none."""
    return int(_stat(pid)[19])


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger."""
    try:
        return _stat(pid)[0] in ("T", "t")
    except OSError:
        return False


def _stat(pid: int) -> list[str]:
    text = Path(f"/proc/{pid}/stat").read_text()
    return text[text.rindex(")") + 2 :].split()  # The name before it may hold anything.


class Peer:
    """One other process. One watch serves all groups that it is in: see watch()."""

    def __init__(self, pid: int, started: int) -> None:
        self.pid = pid
        self.fd = os.pidfd_open(pid)
        try:
            if start_time(pid) != started:
                raise ProcessLookupError(f"process {pid} is another one than the rank's")
        except OSError:
            self.close()
            raise
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def is_gone(self) -> bool:
        return bool(self._poll.poll(0))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close()


_watched: weakref.WeakValueDictionary[tuple[int, int], Peer] = weakref.WeakValueDictionary()


def watch(pid: int, started: int) -> Peer:
    """The peer of a process: a descriptor for each, however many models it trains with this one."""
    peer = _watched.get((pid, started))
    if peer is None:
        peer = _watched[pid, started] = Peer(pid, started)
    return peer
