"""An exchange that is chosen when it is first needed, because choosing it takes all ranks.

A copy of a wrapped module may be made by one rank alone, to look at or to save; nobody else would
come to choose. Knows nothing of how an exchange is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from closeranks.exchange.base import Exchange, Pending, WireState
    from closeranks.exchange.layout import Layout


class LateExchange:
    """Stands for the exchange that `make` will choose, on every rank at the same collective."""

    def __init__(
        self, group: dist.ProcessGroup, make: Callable[[], Exchange], is_exact: bool
    ) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.is_exact = is_exact  # told, because it is asked for before there is an exchange
        self._make = make
        self._chosen: Exchange | None = None

    @property
    def scales_for_free(self) -> bool:
        return self._now().scales_for_free

    @property
    def wire_state(self) -> WireState | None:
        return self._now().wire_state

    @property
    def way(self) -> str:
        return "chosen at the first exchange" if self._chosen is None else self._chosen.way

    def allocate(
        self, numels: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        return self._now().allocate(numels, dtype, device)

    def all_reduce(
        self, tensor: Tensor, scale: float = 1.0, layout: Layout | None = None
    ) -> Pending:
        return self._now().all_reduce(tensor, scale, layout)

    def all_max(self, tensor: Tensor) -> Pending:
        return self._now().all_max(tensor)

    def broadcast(self, tensor: Tensor, source: int) -> Pending:
        return self._now().broadcast(tensor, source)

    def close(self) -> None:
        if self._chosen is not None:
            self._chosen.close()

    def _now(self) -> Exchange:
        if self._chosen is None:
            self._chosen = self._make()
        return self._chosen
