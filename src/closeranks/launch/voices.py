"""What workers write: into their logs, and onto the screen with their rank before every line."""

from __future__ import annotations

from closeranks.launch.folder import JobFolder
from closeranks.launch.output import Prefix
from closeranks.launch.record import Worker
from closeranks.launch.screen import Screen


class Voices:
    """The output of all workers; whoever is muted goes on in its log only."""

    def __init__(
        self, size: int, show: frozenset[int] | None, folder: JobFolder, screen: Screen
    ) -> None:
        self.muted: set[int] = set()
        self._size = size
        self._show = show
        self._folder = folder
        self._screen = screen
        self._prefixes: dict[tuple[int, bool], Prefix] = {}

    def pass_on(self, worker: Worker, is_err: bool, lines: bytes) -> None:
        if not lines:
            return
        self._folder.write_log(worker.rank, lines)
        shown = self._show is None or worker.rank in self._show
        if shown and worker.rank not in self.muted:
            self._screen.write(is_err, self._prefix(worker.rank, is_err).put_before(lines))

    def _prefix(self, rank: int, is_err: bool) -> Prefix:
        if (rank, is_err) not in self._prefixes:
            coloured = self._screen.colours(is_err)
            self._prefixes[rank, is_err] = Prefix(rank, self._size, coloured)
        return self._prefixes[rank, is_err]
