"""A short memory of what happened when: named spans on one clock, in a ring of fixed length.

Knows nothing of what the spans mean. Recording one costs an append to a deque.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

clock_ns = time.perf_counter_ns


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasted from start_ns to end_ns on the clock of this process."""

    name: str
    start_ns: int
    end_ns: int

    @property
    def milliseconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6

    def overlap_ns(self, other: Span) -> int:
        """For how long both were going on."""
        return max(0, min(self.end_ns, other.end_ns) - max(self.start_ns, other.start_ns))


class Spans:
    """The newest spans, oldest first."""

    def __init__(self, count_max: int = 512) -> None:
        self._ring: deque[Span] = deque(maxlen=count_max)

    def add(self, name: str, start_ns: int, end_ns: int) -> None:
        self._ring.append(Span(name, start_ns, end_ns))

    def named(self, prefix: str) -> list[Span]:
        return [span for span in self._ring if span.name.startswith(prefix)]

    def clear(self) -> None:
        self._ring.clear()
