"""Calls somebody when a wait takes too long, from a thread of its own, and lets the wait go on.

Knows nothing of what is waited for. One daemon thread serves one Watch; it starts with the first
wait and costs the waiting thread two assignments.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Watch:
    """Calls alarm(what, waited_s) once for each wait that lasts longer than limit_s."""

    def __init__(self, limit_s: float, alarm: Callable[[str, float], None]) -> None:
        self.limit_s = limit_s
        self._alarm = alarm
        self._waiting: tuple[Callable[[], str], float] | None = None
        self._alarmed: object = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def enter(self, what: Callable[[], str]) -> None:
        """A wait begins; what() describes it if it comes to an alarm."""
        self._waiting = (what, time.monotonic())
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="closeranks-watch", daemon=True)
            self._thread.start()

    def leave(self) -> None:
        """The wait has ended."""
        self._waiting = None

    def close(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(min(1.0, self.limit_s / 4)):
            wait = self._waiting
            if wait is None or wait is self._alarmed:
                continue
            waited_s = time.monotonic() - wait[1]
            if waited_s >= self.limit_s:
                self._alarmed = wait
                self._alarm(wait[0](), waited_s)
