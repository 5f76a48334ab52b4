"""An exception in user code is not a death: it is written down, and a second one ends the job.

    a worker that is lost    ran on numbers that were no result: it is started again, silently
    our own errors           concern all workers: the job ends
    anything else            is written into this worker's area with its place. If another worker
                             has failed at the same place, or nobody else is there to try, the job
                             ends with the first traceback; otherwise only this worker ends, and
                             another one takes the lane

Installed as sys.excepthook. In a process that is alone it only notes that the script has failed.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from types import TracebackType

from closeranks.errors import CloseranksError, LoopDiverged
from closeranks.lanes import words as w
from closeranks.lanes.seat import AGAIN
from closeranks.lanes.worker import Worker
from closeranks.segment.area import Area


def watch(worker: Worker) -> None:
    """Write down what this process dies of, if it is an exception."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if worker.is_lost and isinstance(error, Exception):
            sys.stdout.flush()
            worker.seat.tell(again=True)
            os._exit(AGAIN)
        worker.has_failed = True
        if not worker.seat.is_alone and isinstance(error, Exception):
            text = "".join(traceback.format_exception(kind, error, trace))
            fail(worker, error, text)
        before(kind, error, trace)

    def at_end() -> None:
        try:
            if not worker.has_failed:
                check_end(worker)
        except LoopDiverged as error:
            fail(worker, error, f"LoopDiverged: {error}")

    sys.excepthook = hook
    if not worker.seat.is_alone:
        atexit.register(at_end)


def check_end(worker: Worker) -> None:
    """The script has ended: the others should not be further than its end, or have less."""
    board = worker.board
    if worker.is_lost or not worker.tick:
        return
    board.leave()
    board.refresh()
    if board.ahead_of(worker.tick + 1):
        worker.diverged("the others go on with their script", "its end")
    early = board.left_before(worker.tick + 1)
    if early is not None:
        worker.diverged(f"worker {early} has ended its script before it", "its end")


def fail(worker: Worker, error: Exception, text: str) -> None:
    """This worker's script has raised an exception."""
    board = worker.board
    lane = worker.lane or worker.abandoned
    where = "outside of lanes" if lane is None else f"in lane {lane.index}"
    where = f"worker {worker.seat.worker}, {where} of tick {worker.tick}"
    if isinstance(error, CloseranksError):
        worker.seat.tell(end=text, code=1)
        return
    key = worker.tick << 16 | (0 if lane is None else lane.index + 1)
    board.refresh()
    first = _failed_at(worker, key)
    others = [a for a in board.alive if a.words[w.AT] and not a.words[w.LOST]]
    if first is not None or not others:
        told = text if first is None else first
        worker.seat.tell(end=f"{told}\n({where}. Nobody else can do it.)", code=1)
        return
    with board.me.write(w.FAILURE, key):
        said = f"{text}\n(first at {where})"
        board.me.set_head_text(w.FAILURE_TEXT, w.FAILURE_TEXT_BYTES, said)
    worker.seat.tell(note=f"{where}: {type(error).__name__}: {error}. Another worker tries it.")


def _failed_at(worker: Worker, key: int) -> str | None:
    """What another incarnation has said of the same place."""
    roster = worker.board.roster
    for number in range(len(roster)):
        if number != worker.seat.number:
            area = Area(roster.fd, number)
            if area.words[w.FAILURE] == key:
                return area.head_text(w.FAILURE_TEXT, w.FAILURE_TEXT_BYTES)
    return None
