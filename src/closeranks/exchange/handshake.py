"""How the ranks of a group find out that they share memory: each makes a page, all map all pages.

    Phase 1  tell    each rank tells all: its host, process, page, and kernels
    Phase 2  meet    each maps the pages of its host's ranks, finds the nonces that their owners
                     wrote, and all learn whether that went well everywhere

Names prove nothing: two ranks share a host if each can read what the other wrote. What follows from
the facts is decided in `choose`. Knows a group and a segment; must not know what is exchanged.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import torch

from closeranks.observe import points
from closeranks.segment import kernels, memory, waiting
from closeranks.segment.page import PAGE_SIZE_BYTES, Page
from closeranks.segment.peers import start_time, watch
from closeranks.segment.team import Team
from closeranks.world.meeting import this_host

if TYPE_CHECKING:
    from closeranks.exchange.base import Pending
    from closeranks.exchange.group import GroupExchange

logger = logging.getLogger("closeranks")

Facts = Mapping[str, Any]
Wait = Callable[["Pending", Callable[[], str]], None]

_FACTS_BYTES = 2048
_TEXT_MAX = 100  # characters of one text, however many bytes they need
_WHAT = "the meeting of ranks"


class Handshake:
    """One rank's part in it."""

    def __init__(self, group: GroupExchange, wait: Wait) -> None:
        self._group = group
        self._wait = wait
        self._memory: memory.Memory | None = None

    # Phase 1

    def tell(self, wishes: Mapping[str, str]) -> list[Facts]:
        """The facts of all ranks, by rank."""
        rank, size = self._group.rank, self._group.size
        own = json.dumps({"wishes": wishes, **self._facts()}).encode()
        assert len(own) <= _FACTS_BYTES, "facts are short"
        everyones = torch.zeros(size, _FACTS_BYTES, dtype=torch.uint8)
        everyones[rank, : len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        self._wait(self._group.all_reduce(everyones), lambda: _WHAT)
        return [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in everyones]

    def _facts(self) -> Facts:
        where = {"host": _host(), "name": _name()}
        unable = memory.is_possible()
        if unable:
            return {**where, "unable": unable, "failed": False}
        try:
            points.reach("make page")
            made = memory.Memory(PAGE_SIZE_BYTES)
            started = start_time(os.getpid())
        except OSError as error:
            why = f"{PAGE_SIZE_BYTES} bytes could not be made ({error.strerror})"[:_TEXT_MAX]
            return {**where, "unable": why, "failed": True}
        self._memory = made
        return {
            **where,
            "unable": "",
            "pid": os.getpid(),
            "started": started,
            "fd": made.fd,
            "nonce": Page(made.map).sign(),
            "kernels": kernels.kinds_here(),
            "cores": hex(sum(1 << core for core in os.sched_getaffinity(0))),
        }

    # Phase 2

    def meet(
        self, everyones: Sequence[Facts], mates: Sequence[int], kind: str, timeout_s: float
    ) -> Team | None:
        """The team of this rank and those that share its host, its mates.

        None, on every rank, if some rank could not map the pages of its mates.
        """
        team, failed = None, 0
        try:
            points.reach("meet")
            team = self._map_pages(everyones, mates, kind, timeout_s)
        except OSError as error:
            failed = 1
            logger.info("rank %d could not map the memory of another: %s", self._group.rank, error)
        anywhere = torch.tensor([failed], dtype=torch.int32)
        self._wait(self._group.all_max(anywhere), lambda: _WHAT)
        if self._memory is not None:
            self._memory.close_door()
        return None if anywhere.item() else team

    def _map_pages(
        self, everyones: Sequence[Facts], mates: Sequence[int], kind: str, timeout_s: float
    ) -> Team:
        assert self._memory is not None, "ranks meet where all have made a page"
        own = mates.index(self._group.rank)
        pages, peers = [], {}
        for rank, number in enumerate(mates):
            facts = everyones[number]
            if rank == own:
                pages.append(Page(self._memory.map))
                continue
            peers[rank] = watch(facts["pid"], facts["started"])
            pages.append(Page(memory.attach(facts["pid"], facts["fd"], PAGE_SIZE_BYTES)))
            if pages[-1].nonce.hex() != facts["nonce"]:
                raise OSError(f"the page of process {facts['pid']} is not rank {number}'s")
        policy = waiting.choose(len(pages), core_count(everyones[number] for number in mates))
        made = kernels.make(kind, pages, own, policy)
        team = Team(own, pages, peers, made, timeout_s, mates)
        if len(mates) < len(everyones):
            team.host = everyones[self._group.rank]["name"]
        return team


def core_count(facts: Iterable[Facts]) -> int:
    """How many cores these ranks have together; each may be pinned to one of its own."""
    return reduce(or_, (int(each["cores"], 16) for each in facts)).bit_count()


def _name() -> str:
    """What people call this host."""
    return (os.environ.get("CLOSERANKS_HOST") or os.uname().nodename)[:_TEXT_MAX]


def _host() -> str:
    """Where pids mean the same as here; as long as it must be, and no longer."""
    try:
        processes = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        processes = 0
    return hashlib.sha256(f"{this_host()}/{processes}".encode()).hexdigest()[:32]
