"""The checkpoints of a job, as one worker sees them: when one is due, and who writes it.

A *mark* is a boundary after which a checkpoint is due: after every so many steps or at the end of
an epoch, and when a call of the script is complete. All workers pass the same marks. Each tells in
two words of its area which mark it has begun to write and which one it has dealt with, so nobody
has to agree on anything:

    on time     at a mark the worker with the highest number writes: it copies everything, and a
                thread of it does the rest
    taken over  at a later boundary, if nobody has dealt with the mark and nobody is about to (the
                writer has died, has stopped, or was busy), another one writes what is true there
    at the end  a worker whose script has ended leaves when the last mark was dealt with

Two that write the same do no harm. A disk that is full costs the checkpoint and a warning.

Knows marks and workers; what a checkpoint consists of is the business of checkpoint/.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from closeranks.checkpoint.folder import Folder, Key, key_of, name_of
from closeranks.checkpoint.format import encode
from closeranks.checkpoint.reader import Checkpoint
from closeranks.lanes import resume
from closeranks.lanes import words as w
from closeranks.lanes.scribe import Capture, Scribe, key_from, number_of
from closeranks.lanes.turn import Wait
from closeranks.lanes.worker import Worker
from closeranks.segment.area import Area
from closeranks.segment.peers import is_stopped

_END_S = 600.0  # for the last checkpoint
_ANYBODY_AFTER_S = 1.0  # at the end
_BEHIND_TICKS = 2  # further behind, a writer is not believed to go on


@dataclass(frozen=True)
class Rhythm:
    """What the user has asked for."""

    path: Path
    every: int | None  # steps; None: at the end of each epoch
    keep: int

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ValueError(
                f"every={self.every}: wanted the number of steps from one checkpoint to the next, "
                "at least 1, or None for one at the end of each epoch. Nothing was started."
            )
        if self.keep < 1:
            raise ValueError(
                f"keep={self.keep}: wanted how many checkpoints to keep, at least 1. Nothing was "
                "started."
            )


@dataclass(frozen=True)
class _Last:
    """The newest mark that may be the job's last, and how everything looked there."""

    mark: int
    call: int
    capture: Capture
    looks: tuple[object, ...]


class Durable:
    """One worker's part in the checkpoints of its job."""

    def __init__(self, worker: Worker, rhythm: Rhythm, lanes: int) -> None:
        self.worker = worker
        self.rhythm = rhythm
        self.folder = Folder(rhythm.path)
        facts = {"lanes": lanes, "seed": worker.seed}
        self.scribe = Scribe(worker, self.folder, rhythm.keep, facts)
        self._pid = os.getpid()
        self._mark = 0
        self._seen = 0  # the newest mark of which somebody said that it was dealt with
        self._is_asked = False
        self._last: _Last | None = None

    def open(self) -> int:
        """Hold the folder. Returns until which call an earlier job has told what it had to."""
        holder = os.environ.get("CLOSERANKS_LAUNCHER", "")
        who = f"the job of launcher {holder}" if holder else f"process {self._pid}"
        try:
            if self.folder.lock(self.scribe.job, who):
                self.folder.clear(lambda owner: False)
        except OSError as error:
            raise ValueError(
                f"checkpoint={str(self.folder.path)!r} cannot be written: {error.strerror}. "
                "Nothing was trained; name a folder that can."
            ) from error
        facts = resume.newest_facts(self.folder)
        if not facts:
            return 0
        resume.check(self.folder, facts, self.scribe.facts, self.scribe.note)
        is_finished = self.folder.is_finished()
        return 0 if is_finished else int(facts["call"])

    def newest(self) -> Checkpoint | None:
        """From where this job goes on."""
        found = resume.newest(self.folder, self.scribe.note)
        key = None if found is None else key_of(found.path.name)
        if key is not None:
            self._mark = self._seen = number_of(key)
        return found

    # Marks.

    def after_step(self, capture: Capture, steps: int, call: int, ends: tuple[bool, bool]) -> None:
        """A boundary after a step, which may be the last of an epoch, or of the whole call."""
        ends_epoch, ends_call = ends
        every = self.rhythm.every
        is_mark = ends_epoch if every is None else steps % every == 0
        if is_mark or ends_call or self._is_asked:
            self._is_asked = False
            self._mark = number_of((steps, 0))
            if ends_call:
                self._remember(call, capture)
        self._write_if_due((steps, 0), call, capture)

    def after_call(self, capture: Capture, steps: int, call: int) -> None:
        """A call other than steps() is complete."""
        self._mark = number_of((steps, call))
        self._remember(call, capture)
        self._write_if_due((steps, call), call, capture)

    def ask(self) -> None:
        """The next boundary is a mark."""
        self._is_asked = True

    def write_now(self, capture: Capture, steps: int, call: int) -> str:
        """Write while everybody waits; returns why it could not be written."""
        return self.scribe.write_now((steps, call), call, capture)

    def _write_if_due(self, key: Key, call: int, capture: Capture) -> None:
        number = number_of(key)
        if self._dealt_with() >= self._mark:
            return
        on_time = self._mark == number
        if self._is_busy() or not self._is_chosen(on_time):
            return
        if self.scribe.is_busy and not (on_time and self._last and self._last.mark == number):
            return  # It is done at a later boundary; but after a call there may be none.
        self.scribe.write_later(key, call, capture)

    # Who.

    def _dealt_with(self) -> int:
        """The newest mark that somebody has dealt with."""
        for area in self.worker.board.known:
            self._seen = max(self._seen, area.words[w.SAVE_DONE])
        return self._seen

    def _writers(self) -> list[Area]:
        """Others that are about to write, and can be expected to."""
        return [
            area
            for area in self.worker.board.alive
            if area.words[w.SAVE_BEGUN] > area.words[w.SAVE_DONE]
        ]

    def _is_busy(self) -> bool:
        tick = self.worker.tick - _BEHIND_TICKS
        return any(area.words[w.AT] > tick for area in self._writers())

    def _is_chosen(self, on_time: bool) -> bool:
        """Whether this worker has the highest number of those who can be expected to write."""
        board, tick = self.worker.board, self.worker.tick
        for area in board.alive:
            at = area.words[w.AT]
            is_here = at > (0 if on_time else tick) and not area.words[w.LOST]
            if is_here and board.roster.worker(area.number) > self.worker.seat.worker:
                return False
        return True

    # The end.

    def finish(self) -> None:
        """The script has ended: leave when the last mark was dealt with."""
        if os.getpid() != self._pid or not self.folder.is_locked:
            return
        try:
            if not (self.worker.is_lost or self.worker.has_failed):
                self._await_last()
                self.folder.finish(name_of(key_from(self._mark)), self.scribe.owner)
        except OSError as error:
            why = f"cannot be written: {error.strerror}"
            self.scribe.note(f"warning: {self.folder.path} {why}. The result is not touched by it")
        finally:
            self.scribe.wait(_END_S)
            self.folder.unlock()

    def _await_last(self) -> None:
        board = self.worker.board
        wait, began_s = Wait(), time.monotonic()
        while time.monotonic() < began_s + _END_S:
            board.refresh()
            if self._dealt_with() >= self._mark:
                return
            if self.scribe.is_busy:
                self.scribe.wait(0.01)
                continue
            writers = [a for a in self._writers() if not is_stopped(board.roster.row(a.number).pid)]
            is_late = time.monotonic() > began_s + _ANYBODY_AFTER_S
            if not writers and (is_late or self._is_chosen(on_time=True)):
                if not self._is_as_it_was():
                    return  # The one before is the newest; what follows it would be done again.
                last = self._last
                assert last is not None, "somebody has remembered it"
                self.scribe.write_now(key_from(last.mark), last.call, last.capture)
                return
            wait.once()
        self.scribe.note(f"warning: the last checkpoint was not written within {_END_S:.0f} s")

    def _remember(self, call: int, capture: Capture) -> None:
        self._last = _Last(self._mark, call, capture, _looks(capture()))

    def _is_as_it_was(self) -> bool:
        """Whether nothing has changed since the last mark, so that it can still be written."""
        last = self._last
        return last is not None and last.mark == self._mark and _looks(last.capture()) == last.looks


def _looks(tree: dict[str, Any]) -> tuple[object, ...]:
    """What changes when anything in a tree does, without reading its tensors."""
    text, tensors = encode(tree, "the state")
    return (text, *((t.data_ptr(), t._version) for t in tensors))
