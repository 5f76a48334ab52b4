"""How long a lane usually takes on this worker, for each phase of a step."""

from __future__ import annotations

from collections import deque

_REMEMBERED = 15


class Durations:
    """The newest durations of each kind of work."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def note(self, phase: int, seconds: float) -> None:
        self._seconds.setdefault(phase, deque(maxlen=_REMEMBERED)).append(seconds)

    def median_s(self, phase: int) -> float | None:
        """None if there was none yet."""
        durations = sorted(self._seconds.get(phase, ()))
        return durations[len(durations) // 2] if durations else None
