"""Waits for whatever comes first: bytes, signals, or a moment in time.

Output of workers is watched apart from everything else, so that it can be left waiting in its
pipes while the screen is busy. Knows descriptors and signals; must not know what they mean.
"""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


class Loop:
    """One round at a time; the caller decides when to stop."""

    def __init__(self) -> None:
        self._events = selectors.DefaultSelector()
        self._outputs = selectors.DefaultSelector()
        self._holds_output = True
        self._reading, self._writing = os.pipe()
        for fd in (self._reading, self._writing):
            os.set_blocking(fd, False)
        self._events.register(self._reading, selectors.EVENT_READ, None)
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self._wakeup_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, _do_nothing)

    def watch(self, fd: int, call: Callable[[], object], is_output: bool = False) -> None:
        """Call when there is something to read."""
        selector = self._outputs if is_output else self._events
        selector.register(fd, selectors.EVENT_READ, call)

    def forget(self, fd: int) -> None:
        for selector in (self._events, self._outputs):
            if fd in selector.get_map():
                selector.unregister(fd)

    def wait(self, limit_s: float, with_output: bool) -> list[int]:
        """Wait, make the calls that are due, and return the signals that came."""
        outputs_fd = self._outputs.fileno()
        if with_output and self._holds_output:
            self._events.register(outputs_fd, selectors.EVENT_READ, None)
        elif not with_output and not self._holds_output:
            self._events.unregister(outputs_fd)
        self._holds_output = not with_output
        for key, _ in self._events.select(max(0.0, limit_s)):
            if key.data is not None:
                key.data()
        if with_output:
            for key, _ in self._outputs.select(0):
                key.data()
        return self._signals()

    def close(self) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, before in self._before.items():
            signal.signal(number, before)
        self._events.close()
        self._outputs.close()
        os.close(self._reading)
        os.close(self._writing)

    def _signals(self) -> list[int]:
        try:
            return list(os.read(self._reading, 4096))
        except BlockingIOError:
            return []


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A handler in Python is what makes the wakeup descriptor work."""
