"""closeranks.progress: how far a loop has come, shown once for all ranks.

Every rank counts. Under `closeranks run` each tells the launcher now and then, and the launcher
draws the bar, because the terminal is its own and all ranks write to it. Under another launcher
rank 0 draws by itself, and multiplies its own samples by the number of ranks.

A step costs two additions and one look at the clock. Knows no torch: what has a shape has samples.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from closeranks.observe import launcher, whereabouts
from closeranks.observe.standing import Standings

T = TypeVar("T")

_LEADER_EVERY_S, _OTHERS_EVERY_S = 0.25, 1.0
LINE_EVERY_S = 5.0
_numbers = itertools.count()
_samples_ever = 0


class Progress(Generic[T]):
    """An iterable that says how far it has come. Made by `progress()`."""

    def __init__(self, iterable: Iterable[T], values: Mapping[str, object]) -> None:
        self._iterable = iterable
        self._values = dict(values)
        self._rank = int(os.environ.get("RANK") or 0)
        self._step = 0
        self._number = next(_numbers)
        self._display = _Display() if launcher.tell is None and self._rank == 0 else None

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]

    def show(self, **values: object) -> None:
        """Values to show with the next update: numbers, texts, or functions that return one."""
        self._values.update(values)

    def __iter__(self) -> Iterator[T]:
        global _samples_ever
        self._step, self._began_s = 0, time.monotonic()
        self._waited_before = whereabouts.waited_s()
        is_silent = launcher.tell is None and self._display is None
        every_s = _LEADER_EVERY_S if self._rank == 0 else _OTHERS_EVERY_S
        self._tell(self._began_s, is_done=False)
        next_s = self._began_s + every_s
        for item in self._iterable:
            yield item
            self._step += 1
            if is_silent:
                continue
            _samples_ever += samples_in(item)
            now_s = time.monotonic()
            if now_s >= next_s:
                next_s = now_s + every_s
                self._tell(now_s, is_done=False)
        self._tell(time.monotonic(), is_done=True)

    def _tell(self, now_s: float, is_done: bool) -> None:
        if launcher.tell is None and self._display is None:
            return
        elapsed_s = max(now_s - self._began_s, 1e-9)
        told = {
            "kind": "progress",
            "loop": self._number,
            "step": self._step,
            "total": _length(self._iterable),
            "began_s": self._began_s,
            "at_s": now_s,
            "samples_ever": _samples_ever,
            "waited": (whereabouts.waited_s() - self._waited_before) / elapsed_s,
            "values": self._shown_values() if self._rank == 0 else {},
            "is_done": is_done,
        }
        if launcher.tell is not None:
            launcher.tell(told)
        elif self._display is not None:
            self._display.update(told)

    def _shown_values(self) -> dict[str, str]:
        found = {}
        for name, value in self._values.items():
            shown = value() if callable(value) else value
            item = getattr(shown, "item", None)
            shown = item() if callable(item) else shown
            found[name] = f"{shown:.4g}" if isinstance(shown, float) else str(shown)
        return found


def progress(iterable: Iterable[T], **values: object) -> Progress[T]:
    """Iterate, and show how far all ranks have come: one bar, or a line every few seconds.

        for x, y in (bar := closeranks.progress(loader, epoch=3)):
            ...
            bar.show(loss=loss)

    It shows steps and samples per second (over all ranks; the samples of a batch are the length of
    its first tensor), the time that is left, the newest values, and which rank the others wait
    for. Values are rank 0's own; one that is a function is called only when it is shown, and so is
    the `.item()` of a tensor. On other ranks it costs next to nothing.
    """
    return Progress(iterable, values)


def samples_in(batch: object) -> int:
    """The length of the first thing in a batch that has a shape; 0 if there is none."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 0
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((count for each in batch[:4] if (count := samples_in(each))), 0)
    return 0


def _length(iterable: object) -> int | None:
    try:
        return len(iterable)  # type: ignore[arg-type]
    except TypeError:
        return None


class _Display:
    """Rank 0 shows by itself, on standard error."""

    def __init__(self) -> None:
        self._standings = Standings()
        self._is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._next_line_s = 0.0
        self._size = int(os.environ.get("WORLD_SIZE") or 1)

    def update(self, told: dict[str, Any]) -> None:
        told["samples_ever"] *= self._size
        self._standings.tell(0, told)
        standing = self._standings.standing()
        if self._is_terminal and not standing.is_done:
            width = os.get_terminal_size(sys.stderr.fileno()).columns
            sys.stderr.write(f"\r\x1b[2K{standing.bar(width)}")
            sys.stderr.flush()
            return
        if self._next_line_s == 0.0:
            self._next_line_s = told["at_s"] + LINE_EVERY_S
        if standing.is_done or told["at_s"] >= self._next_line_s:
            self._next_line_s = told["at_s"] + LINE_EVERY_S
            erase = "\r\x1b[2K" if self._is_terminal else ""
            sys.stderr.write(f"{erase}{standing.line()}\n")
