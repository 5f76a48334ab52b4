"""The folder of a job's checkpoints: names, who holds it, and what dead jobs have left in it.

    step-00000128             a checkpoint after 128 steps
    step-00000128-call-2      after 128 steps, when the second call of the script was complete
    .step-00000128.OWNER      one that is being written, or was when its writer died
    lock                      held by the processes of one job

Knows names and files; must not know what is in a checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from closeranks.errors import CheckpointInUse

_NAME = re.compile(r"step-(\d{8,})(?:-call-(\d+))?")
_TEMPORARY = re.compile(r"\.step-\d+(?:-call-\d+)?\.([\w-]+)")
_LOCK = "lock"
_FINISHED = "finished.json"
_LOCK_WAIT_S = 3.0  # what a job that is just dying may take

Key = tuple[int, int]  # steps, and the number of the call that was complete, or 0


def name_of(key: Key) -> str:
    steps, call = key
    return f"step-{steps:08d}" + (f"-call-{call}" if call else "")


def key_of(name: str) -> Key | None:
    """What a checkpoint's name says; None if it is no such name."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2] or 0)) if found else None


class Folder:
    """Checkpoints that lie side by side."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def checkpoints(self) -> list[Path]:
        """All that have a name, newest first; whether they are whole, the reader says."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        keys = [(key, name) for name in names if (key := key_of(name)) is not None]
        return [self.path / name for _, name in sorted(keys, reverse=True)]

    def temporary(self, name: str, owner: str) -> Path:
        """Where `owner` builds a checkpoint."""
        return self.path / f".{name}.{owner}"

    def clear(self, is_alive: Callable[[str], bool]) -> None:
        """Remove what those who are not alive any more have not finished."""
        for path in self.path.glob(".step-*"):
            found = _TEMPORARY.fullmatch(path.name)
            if found and not is_alive(found[1]):
                shutil.rmtree(path, ignore_errors=True)

    # The end of a script.

    def is_finished(self) -> bool:
        """Whether the script that wrote the newest checkpoint came to its end after it."""
        newest = self.checkpoints()
        try:
            told = json.loads((self.path / _FINISHED).read_text())
        except (OSError, ValueError):
            return False
        return bool(newest) and isinstance(told, dict) and told.get("after") == newest[0].name

    def finish(self, name: str, owner: str) -> None:
        """Note that the script has ended after this checkpoint, if it is the newest."""
        newest = self.checkpoints()
        if not newest or newest[0].name != name or self.is_finished():
            return
        temporary = self.path / f".{_FINISHED}.{owner}"
        try:
            temporary.write_text(json.dumps({"after": name}) + "\n")
            temporary.replace(self.path / _FINISHED)
        finally:
            temporary.unlink(missing_ok=True)

    # The lock.

    def lock(self, job: str, holder: str) -> bool:
        """Hold the folder for a job, together with the others of it; True for the first of them.

        The lock is the kernel's and ends with the processes that hold it, however they end. They
        share it; the first writes into the file which job it is.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            is_first = self._hold(fd, job, holder)
            self._lock = fd
        finally:
            if self._lock is None:
                os.close(fd)
        _close_in_children(self)
        return is_first

    @property
    def is_locked(self) -> bool:
        return self._lock is not None

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _hold(self, fd: int, job: str, holder: str) -> bool:
        deadline = time.monotonic() + _LOCK_WAIT_S
        is_first = False
        while True:
            if _try(fd, fcntl.LOCK_EX):
                told = {"job": job, "holder": holder, "host": socket.gethostname()}
                os.ftruncate(fd, 0)
                os.pwrite(fd, json.dumps(told).encode() + b"\n", 0)
                is_first = True
            # From exclusive to shared is a moment in which somebody else may come: look again.
            if _try(fd, fcntl.LOCK_SH):
                held = _holder(fd)
                if held.get("job") == job:
                    return is_first
                fcntl.flock(fd, fcntl.LOCK_UN)
            is_first = False
            if time.monotonic() > deadline:
                held = _holder(fd)
                raise CheckpointInUse(
                    f"{self.path} is in use: {held.get('holder', 'somebody')} on host "
                    f"{held.get('host', 'unknown')} writes its checkpoints there, and waiting "
                    f"{_LOCK_WAIT_S:g} s did not help. Nothing was trained; end that job, or give "
                    "this one another folder as checkpoint=."
                )
            time.sleep(0.02)


def _try(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(fd: int) -> dict[str, str]:
    with contextlib.suppress(ValueError):
        told = json.loads(os.pread(fd, 4096, 0) or b"{}")
        if isinstance(told, dict):
            return told
    return {}


def _close_in_children(folder: Folder) -> None:
    """A process that is forked from this one, like a loader's, must not go on holding the lock."""
    known = weakref.ref(folder)

    def close() -> None:
        folder = known()
        if folder is not None:
            folder.unlock()

    os.register_at_fork(after_in_child=close)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
