"""Who came to an exchange and who did not, told through the store that the group already has.

A rank writes nothing while all goes well. One that waits for more than a moment, or whose
exchange failed, writes where it is; when it wonders, it reads what the others wrote. Whoever wrote
nothing is not waiting: that is the rank to look at. A rank that leaves training in an orderly way
says so.

Knows positions (exchange number, bucket) and ranks; must not know tensors.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store


@dataclass(frozen=True)
class Report:
    """What the store knows of the ranks at one moment."""

    waiting: tuple[int, ...]  # they wait in the same exchange as this rank
    absent: tuple[int, ...]  # they have not come to it
    left: dict[int, int]  # absent ranks that left training, with the exchanges they took part in

    def sentence(self) -> str:
        if not self.absent:
            return f"all ranks ({_numbers(self.waiting)}) have come: the network or a group is slow"
        text = f"{_ranks(self.absent)} did not come, {_ranks(self.waiting)} wait"
        if len(self.waiting) == 1:
            text += "s"
        for rank, exchanges in self.left.items():
            text += f"; rank {rank} left training after {exchanges} exchanges"
        return text


class Attendance:
    """The notes of one reducer's ranks. Without a store every question is answered with None."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self._store = store_of(group)
        self._prefix = f"closeranks/attendance/{instance_number(group)}"
        self._exchanges = 0
        self._group = weakref.ref(group)
        if self._store is not None:
            _say_goodbye_at_exit(self)

    def took_part(self, exchanges: int) -> None:
        """This rank has completed so many exchanges."""
        self._exchanges = exchanges

    def wait_in(self, exchange: int) -> None:
        """Write that this rank waits in the given exchange."""
        self._write("wait", {"exchange": exchange})

    def is_over(self) -> bool:
        """Whether this process has destroyed the group, and so comes to no further exchange."""
        group = self._group()
        return self._store is not None and (
            group is None or group not in dist.distributed_c10d._world.pg_map
        )

    def leave(self) -> None:
        """Write that this rank will not come to any further exchange."""
        self._write("left", {"exchanges": self._exchanges})

    def has_left(self, rank: int) -> bool:
        """Whether a rank said that it leaves."""
        try:
            return self._store is not None and self._note("left", rank) is not None
        except RuntimeError:  # The store is gone with the rank that held it.
            return False

    def ask(self, exchange: int, answer_s: float = 1.5) -> Report | None:
        """Say where this rank is, give the others a moment to do so, and read where they are."""
        if self._store is None:
            return None
        try:
            self.wait_in(exchange)
            deadline = time.monotonic() + answer_s
            while True:
                report = self._read(exchange)
                if not report.absent or report.left or time.monotonic() >= deadline:
                    return report
                time.sleep(0.1)
        except RuntimeError:  # The store is gone with the rank that held it.
            return None

    def _read(self, exchange: int) -> Report:
        waiting, absent, left = [], [], {}
        for rank in range(self.size):
            note = self._note("wait", rank)
            if rank == self.rank or (note is not None and note["exchange"] == exchange):
                waiting.append(rank)
                continue
            absent.append(rank)
            goodbye = self._note("left", rank)
            if goodbye is not None:
                left[rank] = goodbye["exchanges"]
        return Report(tuple(waiting), tuple(absent), left)

    def _note(self, kind: str, rank: int) -> dict[str, int] | None:
        key = f"{self._prefix}/{kind}/{rank}"
        assert self._store is not None, "notes are read only where there is a store"
        if not self._store.check([key]):
            return None
        note: dict[str, int] = json.loads(self._store.get(key))
        return note

    def _write(self, kind: str, note: dict[str, int]) -> None:
        if self._store is not None:
            # The store may have ended with the rank that held it; then nobody can read either.
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{self._prefix}/{kind}/{self.rank}", json.dumps(note))


# All ranks wrap their models in the same order, so equal numbers belong together.
_instances: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_present: weakref.WeakSet[Attendance] = weakref.WeakSet()


def instance_number(group: dist.ProcessGroup) -> str:
    number = _instances.get(group, 0)
    _instances[group] = number + 1
    return f"{dist.distributed_c10d._world.pg_names.get(group, '')}/{number}"


def store_of(group: dist.ProcessGroup) -> Store | None:
    """The store of a registered group; None for one that torch.distributed does not know."""
    entry = dist.distributed_c10d._world.pg_map.get(group)
    return None if entry is None else entry[1]


def _say_goodbye_at_exit(attendance: Attendance) -> None:
    if not _present:
        atexit.register(_say_goodbye, os.getpid())
    _present.add(attendance)


def _say_goodbye(pid: int) -> None:
    if os.getpid() != pid:
        return  # A process that was forked from the rank ends, and the rank goes on.
    for attendance in list(_present):
        attendance.leave()


def _numbers(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {_numbers(ranks)}"
