"""Memory of the same size on every rank of a host, each made by its rank and mapped by all.

A rank makes its own part by itself and tells where it is; the others' are mapped at the first use,
when all have arrived there and so have told. If one rank could not make its part, all see that, and
none uses the region. Knows bytes and tensors; must not know what is reduced.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from closeranks.observe import points
from closeranks.segment.memory import Memory, attach
from closeranks.segment.page import NOT_MADE

if TYPE_CHECKING:
    from closeranks.segment.team import Team

logger = logging.getLogger("closeranks")


class Region:
    """One rank's view of the parts of all."""

    def __init__(self, team: Team, size_bytes: int) -> None:
        self._team = team
        self._memory: Memory | None = None
        try:
            points.reach("allocate", size_bytes=size_bytes)
            self._memory = Memory(size_bytes)
        except OSError as error:
            logger.warning(
                "rank %d: no %d bytes of memory to share on this host (%s). What would have been "
                "exchanged there goes through the process group, on all ranks: slower, but right. "
                "Free memory, or raise the limit of the container.",
                team.rank,
                size_bytes,
                error,
            )
        self._number = team.announce(self._memory)
        self.parts: list[Tensor] | None = None  # of all ranks, as bytes, once they are mapped
        self.is_shared = True  # False once it is known that a rank could not make its part

    @property
    def own(self) -> Tensor | None:
        """This rank's bytes."""
        return None if self._memory is None else _bytes(self._memory.map)

    def map_all(self) -> None:
        """Called when all ranks have made theirs."""
        team = self._team
        parts = []
        for rank in range(team.size):
            size_bytes, fd = team.pages[rank].region(self._number)
            if size_bytes == NOT_MADE:
                self.is_shared = False
                self._memory = None
                return
            if rank == team.rank:
                assert self._memory is not None, "this rank has made its part"
                parts.append(_bytes(self._memory.map))
            else:
                parts.append(_bytes(attach(team.peers[rank].pid, fd, size_bytes)))
        self.parts = parts

    def close_door(self) -> None:
        """All ranks have mapped this one's part."""
        if self._memory is not None:
            self._memory.close_door()
            self._memory = None


def _bytes(memory: Any) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)
