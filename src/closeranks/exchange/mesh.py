"""A gloo group of our own beside the one we were given, with its connections in hand.

It is made through the given group's store and device, by some ranks of that group: all of them at
the same point of their programs. So it can be cut when a rank is lost, which leaves the given
group as it is. Knows ranks by their numbers in the given group.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from closeranks.exchange import links
from closeranks.exchange.links import Link, Sign


class Mesh:
    """Connections between every two of some ranks."""

    def __init__(self, gloo: Any, store: Any, name: str, ranks: Sequence[int], rank: int) -> None:
        """`gloo` is the given group's backend, `store` its store; `rank` is this one's number."""
        own = ranks.index(rank)

        def make() -> Any:
            kind: Any = dist.ProcessGroupGloo  # torch's stubs do not know its options
            options = kind._Options()
            options._timeout = gloo.options._timeout
            options._devices = gloo.options._devices
            options._threads = gloo.options._threads
            return kind(PrefixStore(name, store), own, len(ranks), options)

        self.group, found = links.made_by(make)
        self.links = self._identify(found, ranks)
        _here.add(self)

    def _identify(self, found: dict[int, int], ranks: Sequence[int]) -> list[Link]:
        """Who is at the other end: the rank that says that this is one of its own ends."""
        ends = links.ends_of(found)
        size = len(ranks)
        own = torch.zeros(size, dtype=torch.int64)
        for place, (_, _, end) in enumerate(ends[:size]):
            own[place] = links.name_of(end.getsockname())
        everyones = [torch.zeros_like(own) for _ in ranks]
        self.group.allgather([everyones], [own]).wait()
        rank_of = {
            name: ranks[number]
            for number, names in enumerate(everyones)
            for name in names.tolist()
            if name
        }
        identified = []
        for inode, fd, end in ends:
            rank = rank_of.get(links.name_of(end.getpeername()))
            if rank is None:  # somebody else's, opened at the same moment
                end.close()
            else:
                identified.append(Link(rank, inode, fd, end))
        return identified

    def signs(self, watches: bool) -> list[Sign]:
        return [link.sign(watches) for link in self.links]

    def cut(self) -> None:
        """Whoever waits in a collective of this group is told that it has failed."""
        for link in self.links:
            link.cut()

    def close(self) -> None:
        links.close(self.links)
        self.links = []
        self.group = None


_here: weakref.WeakSet[Mesh] = weakref.WeakSet()


def _forget_in_copies() -> None:
    for mesh in list(_here):
        for link in mesh.links:
            link.forget()


os.register_at_fork(after_in_child=_forget_in_copies)
