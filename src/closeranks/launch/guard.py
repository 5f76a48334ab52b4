"""A process that outlives the launcher by a moment, to take everything with it.

Forked from the launcher before it has threads or workers. It hears of every process group through
a pipe that only the launcher holds open; when the pipe ends, for whatever reason, it kills the
groups that it still knows. A launcher killed by SIGKILL cannot do that itself, and the kernel's
own help (a signal at the parent's death) reaches the workers but not their children.
"""

from __future__ import annotations

import contextlib
import os
import signal

from closeranks.launch import kernel


class Guard:
    """The launcher's end."""

    def __init__(self) -> None:
        reading, self._writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._writing)
                _watch(reading)
            finally:
                os._exit(0)
        os.close(reading)

    def watch(self, group: int) -> None:
        self._tell(b"+%d\n" % group)

    def forget(self, group: int) -> None:
        self._tell(b"-%d\n" % group)

    def close(self) -> None:
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def _tell(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # without a guard the job goes on as well
            os.write(self._writing, line)


def _watch(reading: int) -> None:
    os.setsid()  # A Ctrl-C on the terminal is the launcher's business.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    kernel.set_title("closeranks: guard")
    groups: set[int] = set()
    with os.fdopen(reading, "rb") as lines:
        for line in lines:
            change = groups.add if line[:1] == b"+" else groups.discard
            change(int(line[1:]))
    for group in groups:
        kernel.kill_group(group, signal.SIGKILL)
