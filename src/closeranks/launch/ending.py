"""How a job is brought to its end: which signal when, and what the launcher then exits with. Pure.

Whatever the reason, an end is a list of signals with times, each stronger than the one before, so
that nothing outlives the last of them.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

HANG_CODE = 124


@dataclass
class Ending:
    """An end that has begun."""

    reason: str
    code: int | None  # of the launcher; None: of the culprit
    steps: list[tuple[float, int]]  # seconds after its begin, signal
    began_s: float
    sent: list[int] = field(default_factory=list)

    def due(self, now_s: float) -> list[int]:
        """The signals whose time has come and that were not sent yet."""
        found = [number for after_s, number in self.steps if self.began_s + after_s <= now_s]
        found = found[len(self.sent) :]
        self.sent += found
        return found

    def next_s(self) -> float | None:
        """When the next signal is due."""
        left = self.steps[len(self.sent) :]
        return self.began_s + left[0][0] if left else None

    def hurry(self, now_s: float) -> None:
        """Leave out what is left but the last."""
        if len(self.sent) < len(self.steps):
            self.steps = [*self.steps[: len(self.sent)], (now_s - self.began_s, signal.SIGKILL)]


def of_failure(now_s: float) -> Ending:
    return Ending("failure", None, [(0.0, signal.SIGTERM), (0.5, signal.SIGKILL)], now_s)


def of_peer(code: int, now_s: float) -> Ending:
    """The job has ended on another machine."""
    return Ending("failure", code, [(0.0, signal.SIGTERM), (0.5, signal.SIGKILL)], now_s)


def of_interrupt(now_s: float) -> Ending:
    """Ctrl-C: Python's own way first, but nothing is left after two seconds."""
    steps = [(0.0, signal.SIGINT), (0.8, signal.SIGTERM), (1.3, signal.SIGKILL)]
    return Ending("interrupt", 128 + signal.SIGINT, list(steps), now_s)


def of_request(number: int, grace_s: float, now_s: float) -> Ending:
    """SIGTERM (or a terminal that was closed): passed on, with time to save what there is."""
    steps = [(0.0, int(signal.SIGTERM)), (grace_s, int(signal.SIGKILL))]
    return Ending(signal.Signals(number).name, 128 + number, steps, now_s)


def of_hang(now_s: float) -> Ending:
    return Ending("hang", HANG_CODE, [(0.0, signal.SIGTERM), (1.0, signal.SIGKILL)], now_s)
