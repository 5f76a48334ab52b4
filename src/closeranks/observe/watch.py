"""Calls somebody when a wait takes too long, from a thread of its own, and lets the wait go on.

Knows nothing of what is waited for. One daemon thread serves one Watch; it starts with the first
wait and costs the waiting thread two assignments. At the end of the process all of them end before
the interpreter does: a thread that comes back from C++ into an interpreter that is being taken down
is unwound through frames that forbid it, and the process aborts after all its work is done.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable

from closeranks.observe import whereabouts


class Watch:
    """Calls alarm(what, waited_s) once for each wait that lasts longer than limit_s.

    Before that, after at most a second, it calls notice() once for the same wait: time to leave a
    note for others who may ask. When the watch ends, by close() or because is_over() says so
    between two waits, it calls farewell().
    """

    def __init__(
        self,
        limit_s: float,
        notice: Callable[[], None],
        alarm: Callable[[str, float], None],
        is_over: Callable[[], bool],
        farewell: Callable[[], None],
    ) -> None:
        self.limit_s = limit_s
        self._notice_s = min(1.0, limit_s / 4)
        self._notice = notice
        self._alarm = alarm
        self._is_over = is_over
        self._farewell = farewell
        self._waiting: tuple[Callable[[], str], float] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        whereabouts.ask(self)

    def current(self) -> tuple[str, float] | None:
        """What is being waited for and since when, or None. Any thread may ask."""
        wait = self._waiting
        return None if wait is None else (wait[0](), wait[1])

    def enter(self, what: Callable[[], str]) -> None:
        """A wait begins; what() describes it if it comes to an alarm."""
        self._waiting = (what, time.monotonic())
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="closeranks-watch", daemon=True)
            _end_at_exit(self)
            self._thread.start()

    def leave(self) -> None:
        """The wait has ended."""
        wait, self._waiting = self._waiting, None
        if wait is not None:
            whereabouts.waited(time.monotonic() - wait[1])

    def close(self) -> None:
        self._stop.set()

    def join(self, timeout_s: float) -> None:
        """Return when the thread has ended, or after so long a time."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        noticed: object = None
        alarmed: object = None
        while not self._stop.wait(self._notice_s / 2):
            wait = self._waiting
            if wait is None:
                if self._is_over():
                    break
                continue
            waited_s = time.monotonic() - wait[1]
            if waited_s >= self._notice_s and noticed is not wait:
                noticed = wait
                self._notice()
            if waited_s >= self.limit_s and alarmed is not wait:
                alarmed = wait
                self._alarm(wait[0](), waited_s)
        self._farewell()


_END_S_MAX = 5.0  # for all watches together: an end that hangs in a store is not waited for
_started: weakref.WeakSet[Watch] = weakref.WeakSet()


def _end_at_exit(watch: Watch) -> None:
    if not _started:
        atexit.unregister(_end_all)
        atexit.register(_end_all, os.getpid())
    _started.add(watch)


def _end_all(pid: int) -> None:
    if os.getpid() != pid:
        return  # The threads are in the process that this one was forked from.
    watches, deadline = list(_started), time.monotonic() + _END_S_MAX
    for watch in watches:
        watch.close()
    for watch in watches:
        watch.join(max(0.0, deadline - time.monotonic()))
