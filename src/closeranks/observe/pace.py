"""How fast something goes: counts at moments, and the rate over the newest of them. Pure."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0


class Pace:
    """Counts that only grow. Time is whatever clock the caller gives."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, float]] = deque()

    def note(self, now_s: float, count: float) -> None:
        self._seen.append((now_s, count))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - self._window_s:
            self._seen.popleft()

    @property
    def rate(self) -> float:
        """Per second over the window; 0 before there are two moments."""
        if len(self._seen) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


def duration(seconds: float) -> str:
    """ "0:07", "12:34", "1:02:03"."""
    whole = int(seconds + 0.5)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours}:{minutes:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}"


def amount(value: float) -> str:
    """Three digits or so: "0.52", "35.2", "1126", "48.2k"."""
    if value >= 1e6:
        return f"{value / 1e6:.3g}M"
    if value >= 10_000:
        return f"{value / 1e3:.1f}k"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
