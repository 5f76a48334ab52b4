"""The launcher's standard output and error, written from a thread of their own.

Somebody may stop reading (a pager, a terminal that is scrolled): then only this thread waits, and
the launcher still hears Ctrl-C. A bar, if there is one, stays below everything that is written.
Knows bytes; must not know ranks.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque

_FULL_BYTES = 8 << 20
_ERASE = b"\r\x1b[2K"


class Screen:
    """Two streams and a bar."""

    def __init__(self, out: int = 1, err: int = 2) -> None:
        self._fds = (out, err)
        self.has_bar = os.isatty(err) and os.environ.get("TERM") != "dumb"
        self.is_coloured = not os.environ.get("NO_COLOR") and self.has_bar
        self.closed_out = False  # whoever read standard output has gone
        self._queue: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._bar = b""
        self._new_bar: bytes | None = None
        self._end = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def is_full(self) -> bool:
        return self._bytes > _FULL_BYTES

    def colours(self, is_err: bool) -> bool:
        return self.is_coloured and os.isatty(self._fds[is_err])

    def write(self, is_err: bool, data: bytes) -> None:
        if not data:
            return
        with self._changed:
            self._queue.append((self._fds[is_err], data))
            self._bytes += len(data)
            self._wake()

    def say(self, text: str) -> None:
        """Lines of the launcher's own."""
        shown = "".join(f"closeranks: {_harmless(line)}\n" for line in text.split("\n"))
        self.write(True, shown.encode(errors="backslashreplace"))

    def set_bar(self, text: str) -> None:
        """One line to stay at the bottom; "" for none."""
        if self.has_bar:
            with self._changed:
                self._new_bar = text.encode(errors="backslashreplace")
                self._wake()

    def close(self, limit_s: float) -> None:
        """Write what is left, for at most so long."""
        with self._changed:
            self._new_bar = b""
            self._end = True
            self._wake()
        if self._thread is not None:
            self._thread.join(limit_s)

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="screen", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._queue or self._new_bar is not None or self._end):
                    self._changed.wait()
                chunks, self._queue = list(self._queue), deque()
                bar, self._new_bar = self._new_bar, None
                end = self._end and not chunks and bar is None
            if end:
                return
            self._show(chunks, self._bar if bar is None else bar)
            with self._changed:
                self._bytes -= sum(len(data) for _, data in chunks)

    def _show(self, chunks: list[tuple[int, bytes]], bar: bytes) -> None:
        if self._bar:
            _write(self._fds[1], _ERASE)
        for fd, data in chunks:
            if not _write(fd, data) and fd == self._fds[0]:
                self.closed_out = True
        if bar:
            _write(self._fds[1], bar)
        self._bar = bar


def _harmless(line: str) -> str:
    """A message of somebody else's must not colour the screen or move about on it."""
    return "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in line)


def _write(fd: int, data: bytes) -> bool:
    """Whether it went out. A stream that belongs to others may be set not to wait: then we wait."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:
            return False
    return True
