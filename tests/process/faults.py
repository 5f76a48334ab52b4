"""Faults at the named points of a rank, and the moments at which they happened.

`arm` is called in the rank that is to suffer. What it did is left in a file, because a rank that
was killed cannot report; the clock is the host's, so that ranks can compare.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from closeranks.observe import points

AROUND_BARRIERS = ("before arriving", "after arriving", "before done", "after done")


def arm(name: str, act: Callable[[], object], nth: int = 1) -> None:
    """Have something happen when the nth point of this name is reached from now on."""
    seen = 0

    def on_reach(reached: str, **facts: object) -> None:
        nonlocal seen
        seen += reached == name
        if reached == name and seen == nth:
            act()

    points.on_reach = on_reach


def kill_at(name: str, note: Path, nth: int = 1) -> None:
    """The process ends there, as if its machine's owner had no mercy."""

    def act() -> None:
        note_now(note)
        os.kill(os.getpid(), signal.SIGKILL)

    arm(name, act, nth)


def stop_at(name: str, note: Path, nth: int = 1) -> None:
    """The process stops there and goes on when somebody lets it."""

    def act() -> None:
        note_now(note)
        os.kill(os.getpid(), signal.SIGSTOP)

    arm(name, act, nth)


def fail_at(name: str, error: Callable[[], OSError], note: Path | None = None) -> None:
    """Every point of this name raises."""

    def on_reach(reached: str, **facts: object) -> None:
        if reached == name:
            if note is not None:
                note_now(note)
            raise error()

    points.on_reach = on_reach


def happened_at_s(note: Path, deadline_s: float = 20.0) -> float:
    """When it happened, on the clock of time.monotonic(); fails if it has not."""
    deadline = time.monotonic() + deadline_s
    while not note.exists():
        assert time.monotonic() < deadline, f"the fault at {note.name!r} did not fire"
        time.sleep(0.002)
    return float(note.read_text())


def note_now(note: Path) -> None:
    """Write that it happens now; the file is whole when it is there."""
    new = note.with_suffix(f".{os.getpid()}")
    new.write_text(repr(time.monotonic()))
    new.rename(note)
