"""The collectives of one group, one after the other, in the order in which they were called.

A call that waits for its result anyway is worked off in its own thread, with no switch to another.
A call that does not is worked off by a thread of the line, for two reasons: torch's reducer waits
for a future, which nobody can help along, and two ranks that wait for the works of two groups in
different order, or in gloo in between, would otherwise wait for each other. If somebody waits for
a task that nobody has in hand yet, that thread takes it: usually it is there first.

A hook may call from a callback, in the thread of the line, and wait there for what it has called:
nobody else would come, so that thread does it at once, after all that was called before.

Whoever has the turn works; there is one turn. After the first error no collective is begun: ranks
may have stopped at different places. Knows tasks; must not know what they do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from closeranks.backend.work import Task
from closeranks.errors import ExchangeFailed

_LOOK_S = 0.005
_KEPT = 64


class Line:
    """Tasks waiting, at most one in hand."""

    def __init__(self, name: str, on_error: Callable[[], None]) -> None:
        self._name = name
        self._on_error = on_error
        self._tasks: deque[Task] = deque()
        self._busy = False  # somebody has the turn
        self._closed = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        # torch's join() leaves a work to C++ alone, which does not keep what of it is in Python,
        # and asks for its one number at the next backward. Large results are nobody's business.
        self._newest: deque[Task] = deque(maxlen=_KEPT)

    def start(self, run: Callable[[], None], result: Any, in_background: bool) -> Task:
        """Do this after all that was started before; now, or in the background."""
        task = Task(self, run, result)
        if all(isinstance(tensor, Tensor) and tensor.numel() <= 1 for tensor in result):
            self._newest.append(task)
        with self._changed:
            self._refuse_if_over()
            now = not in_background and not self._busy and not self._tasks
            if now:
                self._busy = True
            else:
                self._tasks.append(task)
                if in_background:
                    self._wake()
        if now:
            self._work_off(task)
        if threading.current_thread() is self._thread:
            self._serve(task)
        elif not in_background:
            task.wait()
        return task

    def see_through(self, task: Task, limit_s: float | None) -> None:
        """Return when the task is over; do what is before it, and itself, if nobody does."""
        while not task.is_completed():
            mine = None
            with self._changed:
                if not self._busy and self._tasks and limit_s is None:
                    mine = self._tasks.popleft()
                    self._busy = True
            if mine is not None:
                self._work_off(mine)
            elif not task.wait_over(limit_s):
                raise ExchangeFailed(f"the result was not there within {limit_s:.1f} s of waiting")

    def close(self) -> None:
        """Nothing is begun any more; what waits ends with an error."""
        with self._changed:
            self._closed = True
            left, thread = list(self._tasks), self._thread
            self._tasks.clear()
            self._changed.notify_all()
        for task in left:
            task.end(ExchangeFailed("the process group was destroyed before this collective began"))
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5.0)

    def _work_off(self, task: Task) -> None:
        """Do one task; the turn is ours."""
        error: BaseException | None = self._failure
        try:
            if error is None:
                error = self._attempt(task)
        except BaseException as interruption:  # from the keyboard, say: it goes on its way
            error = interruption
            self._on_error()
            raise
        finally:
            with self._changed:
                if error is not None and self._failure is None:
                    self._failure = error
                self._busy = False
                if self._tasks:
                    self._wake()
            task.end(error)

    def _attempt(self, task: Task) -> Exception | None:
        assert task.run is not None, "a task is done once"
        try:
            task.run()
        except Exception as error:  # noqa: BLE001 - raised where somebody waits for the task
            self._on_error()
            return error
        return None

    def _refuse_if_over(self) -> None:
        if isinstance(self._failure, ExchangeFailed):
            raise self._failure
        if self._failure is not None:
            raise ExchangeFailed(
                f"an earlier collective of this process group failed ({self._failure!r}), so ranks "
                "may have stopped at different places. The group cannot be used any more; restart."
            ) from self._failure
        if self._closed:
            raise ExchangeFailed("the process group has been destroyed")

    def _wake(self) -> None:
        """Called with the lock."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._changed.notify()

    def _serve(self, until: Task | None = None) -> None:
        """Work off what comes: in the line's own thread, for ever or until a task is over."""
        pause_s = None if until is None else _LOOK_S  # who works it off elsewhere does not say so
        while until is None or not until.is_completed():
            with self._changed:
                if self._closed:
                    return
                if self._busy or not self._tasks:
                    self._changed.wait(pause_s)
                    continue
                task = self._tasks.popleft()
                self._busy = True
            self._work_off(task)
