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
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from closeranks.checkpoint import snapshot
from closeranks.checkpoint.folder import Folder, Key, key_of, name_of
from closeranks.checkpoint.format import encode
from closeranks.checkpoint.reader import Checkpoint
from closeranks.checkpoint.snapshot import Snapshot
from closeranks.checkpoint.writer import write
from closeranks.lanes import resume
from closeranks.lanes import words as w
from closeranks.lanes.turn import Wait
from closeranks.lanes.worker import Worker
from closeranks.segment.area import Area
from closeranks.segment.peers import is_stopped
from closeranks.segment.roster import ALIVE

_END_S = 600.0  # for the last checkpoint
_ANYBODY_AFTER_S = 1.0  # at the end
_BEHIND_TICKS = 2  # further behind, a writer is not believed to go on

Capture = Callable[[], dict[str, Any]]


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
        self._facts = {"lanes": lanes, "seed": worker.seed}
        self._job = f"{worker.board.roster.job:x}"
        self._owner = f"{self._job}-{worker.seat.number}"
        self._pid = os.getpid()
        self._mark = 0
        self._seen = 0  # the newest mark of which somebody said that it was dealt with
        self._is_asked = False
        self._last: _Last | None = None
        self._next: list[Snapshot] = []
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def open(self) -> int:
        """Hold the folder. Returns until which call an earlier job has told what it had to."""
        holder = os.environ.get("CLOSERANKS_LAUNCHER", "")
        who = f"the job of launcher {holder}" if holder else f"process {self._pid}"
        try:
            if self.folder.lock(self._job, who):
                self.folder.clear(lambda owner: False)
        except OSError as error:
            raise ValueError(
                f"checkpoint={str(self.folder.path)!r} cannot be written: {error.strerror}. "
                "Nothing was trained; name a folder that can."
            ) from error
        facts = resume.newest_facts(self.folder)
        if not facts:
            return 0
        resume.check(self.folder, facts, self._facts, self._note)
        is_finished = self.folder.is_finished()
        return 0 if is_finished else int(facts["call"])

    def newest(self) -> Checkpoint | None:
        """From where this job goes on."""
        return resume.newest(self.folder, self._note)

    # Marks.

    def after_step(self, capture: Capture, steps: int, call: int, ends: tuple[bool, bool]) -> None:
        """A boundary after a step, which may be the last of an epoch, or of the whole call."""
        ends_epoch, ends_call = ends
        every = self.rhythm.every
        is_mark = ends_epoch if every is None else steps % every == 0
        if is_mark or ends_call or self._is_asked:
            self._is_asked = False
            self._mark = _number((steps, 0))
            if ends_call:
                self._remember(call, capture)
        self._write_if_due((steps, 0), call, capture)

    def after_call(self, capture: Capture, steps: int, call: int) -> None:
        """A call other than steps() is complete."""
        self._mark = _number((steps, call))
        self._remember(call, capture)
        self._write_if_due((steps, call), call, capture)

    def ask(self) -> None:
        """The next boundary is a mark."""
        self._is_asked = True

    def write_now(self, capture: Capture, steps: int, call: int) -> str:
        """Write while everybody waits; returns why it could not be written."""
        return self._write_now((steps, call), call, capture)

    def _write_if_due(self, key: Key, call: int, capture: Capture) -> None:
        number = _number(key)
        if self._dealt_with() >= self._mark:
            return
        on_time = self._mark == number
        if self._is_busy() or not self._is_chosen(on_time):
            return
        is_mine_busy = self._thread is not None and self._thread.is_alive()
        if is_mine_busy and not (on_time and self._last and self._last.mark == number):
            return  # It is done at a later boundary; but after a call there may be none.
        taken = self._take(key, call, capture())
        self.worker.board.me.words[w.SAVE_BEGUN] = number
        with self._lock:
            self._next[1:] = [taken]  # The first was asked for; of the others the newest will do.
            if self._thread is None or not self._thread.is_alive():
                # Ends with the process: what it has not named is not there.
                self._thread = threading.Thread(
                    target=self._work, name="closeranks-checkpoint", daemon=True
                )
                self._thread.start()

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

    # Writing.

    def _take(self, key: Key, call: int, tree: dict[str, Any]) -> Snapshot:
        facts = self._facts | {
            "made_by": resume.made_by(),
            "steps": key[0],
            "call": call,
            "position": tree["position"],
        }
        files = self.worker.prepared.files(tree["prepared"])
        return snapshot.take(name_of(key), facts, tree, files)

    def _write_now(self, key: Key, call: int, capture: Capture) -> str:
        thread = self._thread
        if thread is not None:
            thread.join()
        taken = self._take(key, call, capture())
        self.worker.board.me.words[w.SAVE_BEGUN] = _number(key)
        return self._write(taken)

    def _work(self) -> None:
        """The thread: write what was taken, until there is nothing left."""
        while True:
            with self._lock:
                if not self._next:
                    self._thread = None
                    return
                taken = self._next.pop(0)
            self._write(taken)

    def _write(self, taken: Snapshot) -> str:
        why = ""
        key = key_of(taken.name)
        assert key is not None, "a snapshot is named after its mark"
        try:
            self.folder.clear(self._is_alive)
            write(self.folder, taken, self._owner, self.rhythm.keep)
        except OSError as error:
            why = f"{error.strerror or error}"
            self._note(
                f"warning: {taken.name} could not be written to {self.folder.path}: {why}. "
                "Training goes on, and older checkpoints are as they were; make room there"
            )
        finally:
            self.worker.board.me.words[w.SAVE_DONE] = _number(key)
        return why

    def _is_alive(self, owner: str) -> bool:
        job, _, number = owner.partition("-")
        roster = self.worker.board.roster
        return job == self._job and number.isdecimal() and roster.status(int(number)) == ALIVE

    def _note(self, text: str) -> None:
        self.worker.seat.tell(note=text)

    # The end.

    def finish(self) -> None:
        """The script has ended: leave when the last mark was dealt with."""
        if os.getpid() != self._pid or not self.folder.is_locked:
            return
        try:
            if not (self.worker.is_lost or self.worker.has_failed):
                self._await_last()
                self.folder.finish(self._owner)
        except OSError as error:
            self._note(f"warning: {self.folder.path}: {error}")
        finally:
            thread = self._thread
            if thread is not None:
                thread.join(_END_S)
            self.folder.unlock()

    def _await_last(self) -> None:
        board = self.worker.board
        wait, began_s = Wait(), time.monotonic()
        while time.monotonic() < began_s + _END_S:
            board.refresh()
            if self._dealt_with() >= self._mark:
                return
            thread = self._thread
            if thread is not None:
                thread.join(0.01)
                continue
            writers = [a for a in self._writers() if not is_stopped(board.roster.row(a.number).pid)]
            is_late = time.monotonic() > began_s + _ANYBODY_AFTER_S
            if not writers and (is_late or self._is_chosen(on_time=True)):
                if not self._is_as_it_was():
                    return  # The one before is the newest; what follows it would be done again.
                last = self._last
                assert last is not None, "somebody has remembered it"
                self._write_now(_key(last.mark), last.call, last.capture)
                return
            wait.once()
        self._note(f"warning: the last checkpoint was not written within {_END_S:.0f} s")

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


def _number(key: Key) -> int:
    """A mark as a word: later marks are greater."""
    return key[0] << 20 | key[1]


def _key(number: int) -> Key:
    return number >> 20, number & 0xFFFFF
