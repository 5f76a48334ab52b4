"""The memory of a job that survives its workers: who is in it, and where each one's area lies.

The launcher makes one file in memory (a memfd) before it starts a worker, and hands it down. Its
first bytes are the roster: one row for each *incarnation*, which is one process in the life of a
worker; only the launcher writes them. Behind it every incarnation has an *area* of its own, of
which only it writes a byte, and which is never used again by another. The file is so long that
every area has room for everything; memory is taken for what is written, and given back when an
area is cleared.

    words 0..4   magic, generation (grows with every death), workers, job, number of rows
    row i        worker, process, status, exit code, start

Knows processes and words. Must not know what is computed, and needs no torch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import time
from dataclasses import dataclass

ROSTER_BYTES = 1 << 20
AREA_BYTES = 1 << 44  # of addresses in the file, not of memory
HEAD_BYTES = 1 << 18  # the words of an area, before its data
INCARNATIONS_MAX = 8192

EMPTY, ALIVE, KILLED, FAILED, ENDED = range(5)

_MAGIC = 0x636C6F7365
_GENERATION, _WORKERS, _JOB, _ROWS = 1, 2, 3, 4
_FIRST_ROW, _ROW_WORDS = 64, 8
_WORKER, _PID, _STATUS, _CODE, _START_NS = range(5)

# Which file and which incarnation this process has, "descriptor:number", in its environment.
SEAT_VARIABLE = "CLOSERANKS_SEAT"

# The words of an area that a launcher reads (lanes/words.py has the rest).
AT = 0  # the tick this worker is at: it has applied all before it; 0 before its first
STEPS = 3  # how many steps this incarnation has finished
PROGRESS_NS = 4  # when it last finished anything
LOST = 5  # not 0 while it has no state of its own: it was overtaken and asks for it


@dataclass(frozen=True)
class Row:
    """One incarnation of a worker, as the launcher sees it."""

    number: int
    worker: int
    pid: int
    status: int
    code: int


class Roster:
    """The file of a job, mapped by the launcher or by a worker."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, ROSTER_BYTES)
        self._words = memoryview(self._map).cast("q")
        if self._words[0] != _MAGIC:
            raise ValueError(
                f"descriptor {fd} is not the memory of a closeranks job. Nothing was started; "
                "start the workers with `closeranks run`."
            )

    @classmethod
    def create(cls, workers: int) -> Roster:
        """The file of a new job, open in this process only."""
        fd = os.memfd_create("closeranks", os.MFD_CLOEXEC)
        os.ftruncate(fd, (INCARNATIONS_MAX + 1) * AREA_BYTES)
        os.posix_fallocate(fd, 0, ROSTER_BYTES)
        os.pwrite(fd, _MAGIC.to_bytes(8, "little"), 0)
        roster = cls(fd)
        roster._words[_WORKERS] = workers
        roster._words[_JOB] = secrets.randbits(62)
        return roster

    # The launcher's side.

    def admit(self, worker: int) -> int:
        """A row for the next incarnation of a worker, before its process is started."""
        number = self._words[_ROWS]
        if number >= INCARNATIONS_MAX:
            raise RuntimeError(f"{number} workers were started in this job, which is its limit")
        row = self._row(number)
        self._words[row + _WORKER] = worker
        self._words[row + _START_NS] = time.monotonic_ns()
        self._words[row + _STATUS] = ALIVE
        self._words[_ROWS] = number + 1
        return number

    def started(self, number: int, pid: int) -> None:
        self._words[self._row(number) + _PID] = pid

    def closed(self, number: int, status: int, code: int) -> None:
        """The kernel says that this process is gone."""
        row = self._row(number)
        self._words[row + _CODE] = code
        self._words[row + _STATUS] = status
        self._words[_GENERATION] += 1

    def word_of(self, number: int, word: int) -> int:
        """A word of an incarnation's area, written by itself."""
        return int.from_bytes(os.pread(self.fd, 8, area_start(number) + 8 * word), "little")

    def clear_area(self, number: int) -> None:
        """Give the memory of somebody's area back, the words first: who still reads forgets it."""
        start = area_start(number)
        clear(self.fd, start, HEAD_BYTES)
        clear(self.fd, start + HEAD_BYTES, AREA_BYTES - HEAD_BYTES)

    # Everybody's.

    @property
    def generation(self) -> int:
        return self._words[_GENERATION]

    @property
    def workers(self) -> int:
        return self._words[_WORKERS]

    @property
    def job(self) -> int:
        """A number that no other job has."""
        return self._words[_JOB]

    def __len__(self) -> int:
        return self._words[_ROWS]

    def status(self, number: int) -> int:
        return self._words[self._row(number) + _STATUS]

    def worker(self, number: int) -> int:
        return self._words[self._row(number) + _WORKER]

    def row(self, number: int) -> Row:
        at = self._row(number)
        worker, pid, status, code = self._words[at : at + 4].tolist()
        return Row(number, worker, pid, status, code)

    def rows(self) -> list[Row]:
        return [self.row(number) for number in range(len(self))]

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _row(self, number: int) -> int:
        return _FIRST_ROW + number * _ROW_WORDS


def area_start(number: int) -> int:
    """Where the area of an incarnation begins in the file."""
    return (number + 1) * AREA_BYTES


def clear(fd: int, start: int, length: int) -> None:
    """Give the memory of a piece of the file back; it reads as zeros from now on."""
    keep_size_and_punch = 3
    libc = ctypes.CDLL(None, use_errno=True)
    wide = ctypes.c_int64
    if libc.fallocate(fd, keep_size_and_punch, wide(start), wide(length)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot give shared memory back: {os.strerror(code)}")
