"""A bucket that is under way. Knows when it took off and when it landed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from closeranks.observe.spans import clock_ns

if TYPE_CHECKING:
    from closeranks.reducer.bucket import Bucket, SparseBucket
    from closeranks.reducer.stats import Stats


@dataclass
class Flight:
    bucket: Bucket | SparseBucket
    pending: Any
    start_ns: int
    stats: Stats
    end_ns: int = 0

    def __post_init__(self) -> None:
        if self.stats.traces:
            self._note_the_end()

    def landed(self) -> None:
        """The wait for it has ended."""
        self.stats.bucket_landed(self.bucket.position, self.start_ns, self.end_ns or clock_ns())

    def _note_the_end(self) -> None:
        """Note when the exchange really ended, which may be long before anybody waits for it."""

        def note(_future: object) -> None:
            self.end_ns = clock_ns()

        future = self.pending if hasattr(self.pending, "add_done_callback") else None
        if future is None and hasattr(self.pending, "get_future"):
            future = self.pending.get_future()
        if future is not None:
            future.add_done_callback(note)
