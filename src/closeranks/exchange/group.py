"""The exchange over any c10d process group: Gloo, NCCL, MPI, or one written in Python.

Calls the group's own methods and not `torch.distributed.all_reduce`, so that groups which were
never registered with torch.distributed work as well. Uses only allreduce and broadcast, because
that is all that a group written by a user is likely to have.

Run on one GPU, never on several: the order of streams is left to the group, which makes the stream
that is current at wait() wait for the result, as torch's own reducer relies on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from closeranks.exchange.base import Pending
    from closeranks.exchange.layout import Layout


class GroupExchange:
    """n ranks of one c10d process group."""

    scales_for_free = False
    is_exact = True
    wire_state = None
    format = "float32"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.transport = group_name(group)
        self.way = f"group: {self.transport}"
        self._sum = dist.AllreduceOptions()
        self._max = dist.AllreduceOptions()
        self._max.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)

    def allocate(
        self, numels: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        return [torch.zeros(numel, dtype=dtype, device=device) for numel in numels]

    def all_reduce(
        self, tensor: Tensor, scale: float = 1.0, layout: Layout | None = None
    ) -> Pending:
        if scale != 1.0:
            tensor.mul_(scale)
        # No group sums complex numbers, and the sum of pairs of reals is the same.
        plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        work: Pending = self.group.allreduce([plain], self._sum)
        return work

    def all_max(self, tensor: Tensor) -> Pending:
        work: Pending = self.group.allreduce([tensor], self._max)
        return work

    def broadcast(self, tensor: Tensor, source: int) -> Pending:
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        work: Pending = self.group.broadcast([tensor], options)
        return work

    def close(self) -> None:
        """The group is not ours to end."""


def group_name(group: dist.ProcessGroup) -> str:
    try:
        return str(group.name())
    except RuntimeError:  # A group written in Python need not have a name.
        return type(group).__name__
