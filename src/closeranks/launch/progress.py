"""Shows what the ranks tell of their progress: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import os

from closeranks.launch.channel import Message
from closeranks.launch.screen import Screen
from closeranks.observe.progress import LINE_EVERY_S
from closeranks.observe.standing import Standings

_WIDTH_WITHOUT_TERMINAL = 80


class ProgressView:
    """The progress of one job on one screen."""

    def __init__(self, screen: Screen, leader: int) -> None:
        self._screen = screen
        self._standings = Standings(leader)
        self._next_line_s = 0.0

    def tell(self, rank: int, message: Message) -> None:
        """A rank has told where it is."""
        if not self._standings.tell(rank, message):
            return
        standing = self._standings.standing()
        if standing.is_done:
            self._screen.set_bar("")
            self._screen.say(standing.line())
            self._next_line_s = 0.0
        elif self._screen.has_bar:
            self._screen.set_bar(standing.bar(_width()))
        elif self._next_line_s == 0.0:
            self._next_line_s = message["at_s"] + LINE_EVERY_S
        elif message["at_s"] >= self._next_line_s:
            self._next_line_s = message["at_s"] + LINE_EVERY_S
            self._screen.say(standing.line())


def _width() -> int:
    try:
        return os.get_terminal_size(2).columns
    except OSError:
        return _WIDTH_WITHOUT_TERMINAL
