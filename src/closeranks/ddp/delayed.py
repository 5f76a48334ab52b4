"""delay_all_reduce_named_params: parameters that are averaged together when one other is ready.

They leave the buckets and travel as one flat tensor, launched by the gradient hook of the
parameter given as param_to_hook_all_reduce, and are waited for at the end of the backward. It is
for the user to choose one whose gradient is ready last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from closeranks.exchange.base import Exchange, Pending
    from closeranks.reducer.waiting import Waiter

_engine: Any = torch.autograd.Variable._execution_engine


class DelayedParameters:
    """The delayed parameters of one wrapped module."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        trigger: Tensor,
        exchange: Exchange,
        waiter: Waiter,
        wants_sync: Callable[[], bool],
    ) -> None:
        self.parameters = list(parameters)
        self._exchange = exchange
        self._waiter = waiter
        self._wants_sync = wants_sync
        self._under_way: list[tuple[Tensor, Pending, list[Tensor]]] = []
        trigger.register_post_accumulate_grad_hook(self._launch)

    def broadcast(self) -> None:
        """Start from rank 0's values."""
        for parameter in self.parameters:
            pending = self._exchange.broadcast(parameter.detach(), 0)
            self._waiter.wait(pending, lambda: "the broadcast of delayed parameters")

    @torch.no_grad()
    def _launch(self, _trigger: Tensor) -> None:
        if not self._wants_sync():
            return
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in self.parameters:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for members in kinds.values():
            flat = torch.cat([self._gradient(p).reshape(-1) for p in members])
            pending = self._exchange.all_reduce(flat, 1.0 / self._exchange.size)
            self._under_way.append((flat, pending, members))
        _engine.queue_callback(self._land)

    @staticmethod
    def _gradient(parameter: Tensor) -> Tensor:
        if parameter.grad is None:
            return torch.zeros_like(parameter)
        return parameter.grad.detach().to_dense()

    @torch.no_grad()
    def _land(self) -> None:
        for flat, pending, members in self._under_way:
            self._waiter.wait(pending, lambda: "the exchange of delayed parameters")
            pieces = flat.split([p.numel() for p in members])
            for parameter, piece in zip(members, pieces, strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(piece.view(parameter.shape))
        self._under_way.clear()
