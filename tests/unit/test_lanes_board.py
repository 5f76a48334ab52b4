"""What a worker concludes from others' words, which change while it reads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from closeranks.lanes import words as w
from closeranks.lanes.board import Board
from closeranks.segment.roster import ALIVE


class Finishing(dict[int, int]):
    """The words of a worker that finishes its last tick and leaves as soon as it is looked at."""

    def __getitem__(self, word: int) -> int:
        value = super().__getitem__(word)
        self.update({w.AT: 8, w.LEFT: 1})
        return value


def board_over(words: dict[int, int]) -> Any:
    roster = SimpleNamespace(worker=lambda number: number, status=lambda number: ALIVE)
    area = SimpleNamespace(words=words, number=1)
    board: Any = SimpleNamespace(alive=[area], dead=[], roster=roster)
    board._has_left = lambda area: Board._has_left(board, area)
    return board


def test_a_worker_that_leaves_while_it_is_looked_at_has_not_left_early() -> None:
    board = board_over(Finishing({w.AT: 7, w.LEFT: 0, w.LOST: 0}))
    assert Board.left_before(board, 8) is None


def test_a_worker_that_has_left_early_is_named() -> None:
    board = board_over({w.AT: 7, w.LEFT: 1, w.LOST: 0})
    assert Board.left_before(board, 8) == 1
    assert Board.left_before(board, 7) is None
