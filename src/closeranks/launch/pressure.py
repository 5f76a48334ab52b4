"""How much memory was in use lately, and whether the kernel has killed somebody for want of it.

When a death is noticed, the memory of the dead is free already: so the launcher looks now and then
and tells the most of the last seconds.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from pathlib import Path

from closeranks.launch.machine import Memory, memory

_EVERY_S = 0.5
_WINDOW_S = 5.0


class Pressure:
    """Looked at from the launcher's loop."""

    def __init__(
        self, read: Callable[[], Memory] = memory, count_kills: Callable[[], int] | None = None
    ) -> None:
        self._read, self._count_kills = read, count_kills or _kills
        self._seen: deque[tuple[float, Memory]] = deque()
        self._kills = self._count_kills()

    def look(self, now_s: float) -> None:
        if self._seen and now_s - self._seen[-1][0] < _EVERY_S:
            return
        self._seen.append((now_s, self._read()))
        while self._seen[0][0] < now_s - _WINDOW_S:
            self._seen.popleft()

    def shown(self) -> str:
        """ "14.2 of 23.0 GB were in use", and whom the kernel blames."""
        most = max([seen for _, seen in self._seen] or [self._read()], key=lambda seen: seen.used)
        if self._count_kills() > self._kills:
            return f"{most.shown()}; the kernel killed a process because memory ran out"
        return most.shown()


def _kills() -> int:
    """How often the kernel has done so since it started; 0 where it does not tell."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.M)
    except OSError:
        return 0
    return int(found[1]) if found else 0
