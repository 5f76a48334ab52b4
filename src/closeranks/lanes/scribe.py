"""What one worker writes into the folder of checkpoints, at once or in a thread of its own.

Everything is copied when it is handed over; the thread writes the copies while training goes on.
The area's two words say which mark this worker has begun to write and which it has dealt with.
A disk that is full costs the checkpoint and a warning.

Knows snapshots and threads; when a checkpoint is due, and whose it is, says durable.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from closeranks.checkpoint import snapshot
from closeranks.checkpoint.folder import Folder, Key, key_of, name_of
from closeranks.checkpoint.snapshot import Snapshot
from closeranks.checkpoint.writer import write
from closeranks.lanes import words as w
from closeranks.lanes.resume import made_by
from closeranks.lanes.worker import Worker
from closeranks.segment.roster import ALIVE

Capture = Callable[[], dict[str, Any]]


class Scribe:
    """The writer in one worker."""

    def __init__(self, worker: Worker, folder: Folder, keep: int, facts: dict[str, Any]) -> None:
        self.worker = worker
        self.folder = folder
        self.keep = keep
        self.facts = facts
        self.job = f"{worker.board.roster.job:x}"
        self.owner = f"{self.job}-{worker.seat.number}"
        self._next: list[Snapshot] = []
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def is_busy(self) -> bool:
        return self._thread is not None

    def wait(self, limit_s: float | None = None) -> None:
        """Until the thread has written everything, or for so long."""
        thread = self._thread
        if thread is not None:
            thread.join(limit_s)

    def write_now(self, key: Key, call: int, capture: Capture) -> str:
        """Returns why it could not be written, or nothing."""
        self.wait()
        taken = self._take(key, call, capture())
        return self._write(taken)

    def write_later(self, key: Key, call: int, capture: Capture) -> None:
        """Copy everything now."""
        taken = self._take(key, call, capture())
        with self._lock:
            self._next[1:] = [taken]  # The first was promised; of the others the newest will do.
            if self._thread is None:
                # Ends with the process: what it has not named is not there.
                self._thread = threading.Thread(
                    target=self._work, name="closeranks-checkpoint", daemon=True
                )
                self._thread.start()

    def note(self, text: str) -> None:
        self.worker.seat.tell(note=text)

    def _take(self, key: Key, call: int, tree: dict[str, Any]) -> Snapshot:
        facts = self.facts | {
            "made_by": made_by(),
            "steps": key[0],
            "call": call,
            "position": tree["position"],
        }
        files = self.worker.prepared.files(tree["prepared"])
        taken = snapshot.take(name_of(key), facts, tree, files)
        self.worker.board.me.words[w.SAVE_BEGUN] = number_of(key)
        return taken

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
            write(self.folder, taken, self.owner, self.keep)
        except OSError as error:
            why = f"{error.strerror or error}"
            self.note(
                f"warning: {taken.name} could not be written to {self.folder.path}: {why}. "
                "Training goes on, and older checkpoints are as they were; make room there"
            )
        finally:
            self.worker.board.me.words[w.SAVE_DONE] = number_of(key)
        return why

    def _is_alive(self, owner: str) -> bool:
        job, _, number = owner.partition("-")
        roster = self.worker.board.roster
        return job == self.job and number.isdecimal() and roster.status(int(number)) == ALIVE


def number_of(key: Key) -> int:
    """A mark as a word: later marks are greater."""
    return key[0] << 20 | key[1]


def key_from(number: int) -> Key:
    return number >> 20, number & 0xFFFFF
