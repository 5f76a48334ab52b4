"""What the caller of a collective holds: torch's Work, for a collective of ours.

Whoever waits may do the work itself (see `line`); torch's reducer and compiled code wait for the
future instead, which is made only if somebody asks. Knows nothing of what the work is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from closeranks.backend.untraced import untraced

if TYPE_CHECKING:
    from closeranks.backend.line import Line


@untraced
class Task(dist.Work):
    """One collective: not begun, in hand, or over with a result or an error."""

    def __init__(self, line: Line, run: Callable[[], None], result: Any) -> None:
        super().__init__()
        self.run: Callable[[], None] | None = run  # None once it is over, to let go of tensors
        self._line = line
        self._result = result
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._future: Any = None
        self._trigger: Any = None  # its value makes the future's
        self._lock = threading.Lock()

    # For the line.

    def end(self, error: BaseException | None) -> None:
        """It is over; called once."""
        with self._lock:
            self.run = None
            self._error = error
            trigger = self._trigger
            self._over.set()
        if trigger is not None:
            trigger.set_result(None)

    # For the caller: torch's names.

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Any:
        return self._result

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when the tensors hold the result; raise what went wrong."""
        limit_s = timeout.total_seconds()
        if not self._over.is_set():
            self._line.see_through(self, limit_s if limit_s > 0 else None)
        if self._error is not None:
            raise self._error
        return True

    def wait_over(self, limit_s: float | None) -> bool:
        """Leave the work to others; False if it is not over within the limit."""
        return self._over.wait(limit_s)

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        """A future of the result, the same at every call."""
        with self._lock:
            new = self._future is None
            if new:
                self._trigger = torch.futures.Future()
                self._future = self._trigger.then(self._outcome)
            late = new and self._over.is_set()
        if late:
            self._trigger.set_result(None)
        return self._future

    def _outcome(self, _: Any) -> Any:
        """Runs as a callback: only so an exception becomes an error for C++ as well.

        set_exception() would store it as a value, which only Python's wait() knows how to raise.
        """
        if self._error is not None:
            raise self._error
        return self._result
