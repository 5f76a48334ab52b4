"""Memory of the same size on every rank of a host, each made by its rank and mapped by all.

    make     each rank makes its own part by itself and tells where it is
    map      when all have told, each maps the others'
    settle   when all have mapped: if one rank could not make or map, none uses the region

Several tensors lie in a region; the first of them that is used has it mapped and settled for all.

Knows bytes and tensors; must not know what is reduced.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from closeranks.observe import points
from closeranks.segment.memory import Memory, attach
from closeranks.segment.page import UNUSABLE

if TYPE_CHECKING:
    from closeranks.segment.team import Team

logger = logging.getLogger("closeranks")


class Region:
    """One rank's view of the parts of all."""

    def __init__(self, team: Team, size_bytes: int) -> None:
        self._team = team
        self._memory: Memory | None = None
        self._parts: list[Tensor] | None = None  # of all ranks, as bytes, once they are mapped
        self._was_mapped = self._is_settled = False
        try:
            points.reach("allocate", size_bytes=size_bytes)
            self._memory = Memory(size_bytes)
        except OSError as error:
            self._warn(f"{size_bytes} bytes could not be made", error)
        self._number = team.announce(self._memory)

    @property
    def own(self) -> Tensor | None:
        """This rank's bytes."""
        return None if self._memory is None else _bytes(self._memory.map)

    def map_all(self) -> None:
        """Called when all ranks have told where their parts are."""
        if self._was_mapped:
            return
        self._was_mapped = True
        team = self._team
        try:
            points.reach("map", number=self._number)
            where = [page.region(self._number) for page in team.pages]
            if self._memory is None or any(size_bytes == UNUSABLE for size_bytes, _ in where):
                return
            self._parts = [
                _bytes(
                    self._memory.map
                    if rank == team.rank
                    else attach(team.peers[rank].pid, fd, size_bytes)
                )
                for rank, (size_bytes, fd) in enumerate(where)
            ]
        except OSError as error:
            self._warn("the memory of another rank could not be mapped", error)
            team.withdraw(self._number)

    def settle(self) -> list[Tensor] | None:
        """Called when all ranks have tried to map; the parts of all, or None on every rank."""
        if self._is_settled:
            return self._parts
        self._is_settled = True
        if self._memory is not None:
            self._memory.close_door()
        if any(page.region(self._number)[0] == UNUSABLE for page in self._team.pages):
            self._parts = None
        return self._parts

    def _warn(self, what: str, error: OSError) -> None:
        """Once: the next regions will most likely fail for the same reason."""
        if self._team.warned:
            return
        self._team.warned = True
        logger.warning(
            "rank %d: %s (%s). Gradients do not live in shared memory then, but are copied through "
            "the little that was made at the start: slower, but right, on all ranks. Free memory "
            "or descriptors, or raise the limits of the container.",
            self._team.rank,
            what,
            error,
        )


def _bytes(memory: Any) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)
