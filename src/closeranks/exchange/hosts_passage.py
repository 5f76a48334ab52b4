"""Reductions of tensors that lie anywhere, over ranks on several hosts, from begin to end.

    reduce    inside a host, through slots: each rank of a column has the host's sum of its slice
    cross     the ranks of a column reduce their slices across hosts
    gather    inside a host, through slots: every rank has all slices

A tensor goes in parts, so that one part crosses while the next one is reduced. Only what is made of
these three is here; the rest of a group's collectives moves no less by any other way than gloo's.

As `passage`, this works in the caller's thread until the collective has ended. One at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.exchange.meshes import Meshes
from closeranks.exchange.passage import Passage
from closeranks.exchange.purpose import FOLDS
from closeranks.exchange.reduction import Fold
from closeranks.observe import points
from closeranks.segment.team import Team
from closeranks.segment.twin import share

_PART_BYTES = 8 << 20


@dataclass
class _Part:
    """A part of a tensor that is crossing."""

    slices: list[Tensor]  # of the part, one for each rank of this host
    own: Tensor  # this rank's, with the host's reduction and then with that of all
    work: Any  # None without a slice


class HostsPassage:
    """What a process group over several hosts does better than gloo."""

    only_reduces = True

    def __init__(self, team: Team, meshes: Meshes, members: Sequence[int]) -> None:
        """`members` are the numbers of the group's ranks in the job, for messages."""
        self.team = team
        self.way = f"hosts: {meshes.crowd.grid.shape}, shm inside, {meshes.transport} between"
        team.host = meshes.crowd.names[meshes.crowd.rank]
        team.look_further = meshes.lookout.raise_if_lost
        self._meshes = meshes
        self._columns = meshes.crowd.grid.columns
        self.size = len(meshes.crowd.names)
        self._inside = Passage(team, members)
        self._folds = {name: Fold(team.kernels, name, team.size) for name in FOLDS}
        self._options = {name: _reduction(name) for name in FOLDS}

    def all_reduce(self, tensor: Tensor, fold: Fold) -> None:
        """Replace the flat tensor by the fold of all ranks' tensors."""
        length = _PART_BYTES // tensor.element_size()
        try:
            before: _Part | None = None
            for piece in tensor.split(length) if tensor.numel() else ():
                part = self._set_off(piece, fold.name)
                if before is not None:
                    self._arrive(before, fold.name)
                before = part
            if before is not None:
                self._arrive(before, fold.name)
        except RuntimeError as error:
            explained = self._meshes.explained(error, self.team)
            if explained is error:
                raise
            raise explained from error

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], fold: Fold) -> None:
        """Put the fold of what all ranks have for this one into the output."""
        whole = torch.cat(list(inputs))
        self.all_reduce(whole, fold)
        rank = self._meshes.crowd.rank
        start = sum(tensor.numel() for tensor in inputs[:rank])
        output.copy_(whole[start : start + output.numel()])

    def close(self) -> None:
        """This rank comes to no further collective."""
        self.team.close()
        self._meshes.close()

    def _set_off(self, piece: Tensor, name: str) -> _Part:
        bounds = [
            share(piece.numel(), self._columns, rank) if rank < self._columns else (0, 0)
            for rank in range(self.team.size)
        ]
        slices = [piece[start:stop] for start, stop in bounds]
        own = torch.empty_like(slices[self.team.rank])
        inside = "sum" if name == "avg" else name  # Divided once, when all have been added.
        self._inside.reduce_scatter(own, slices, self._folds[inside])
        work = None
        if own.numel():
            assert self._meshes.column is not None, "who has a slice has a column"
            points.reach("before crossing")
            work = self._meshes.column.group.allreduce([own], self._options[name])
        return _Part(slices, own, work)

    def _arrive(self, part: _Part, name: str) -> None:
        if part.work is not None:
            part.work.wait()
            if name == "avg":
                part.own.div_(self.size)
        self._inside.all_gather(part.slices, part.own)


def _reduction(name: str) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(
        getattr(dist.ReduceOp, "SUM" if name == "avg" else name.upper())
    )
    return options
