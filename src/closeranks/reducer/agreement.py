"""Small questions that all ranks answer together, when a tail says that there is something to ask.

Each costs one small exchange and happens at most a few times in a training run: the order of
gradients after the first backward, and which parameters came late or need gradients now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from closeranks.errors import ParameterSwapped

if TYPE_CHECKING:
    from closeranks.exchange.base import Exchange
    from closeranks.reducer.waiting import Waiter


class Agreement:
    """The questions, asked over one exchange."""

    def __init__(self, exchange: Exchange, waiter: Waiter) -> None:
        self._exchange = exchange
        self._waiter = waiter

    def on_order(self, order: Sequence[int], device: torch.device) -> list[int]:
        """The order in which rank 0 saw gradients become ready."""
        numbers = torch.tensor(order, dtype=torch.int32, device=device)
        pending = self._exchange.broadcast(numbers, 0)
        self._waiter.wait(pending, lambda: "the agreement on a bucket order")
        return [int(n) for n in numbers.tolist()]

    def on_changes(
        self, parameters: Sequence[Tensor], late: set[int]
    ) -> tuple[list[int], set[int]]:
        """Which parameters need gradients on some rank, and which came late on some rank."""
        count = len(parameters)
        numbers = [int(p.requires_grad) for p in parameters]
        numbers += [int(n in late) for n in range(count)]
        answer = torch.tensor(numbers, dtype=torch.int32, device=parameters[0].device)
        pending = self._exchange.all_max(answer)
        self._waiter.wait(pending, lambda: "the agreement on parameters that have changed")
        values = answer.tolist()
        wanted = [n for n in range(count) if values[n]]
        return wanted, {n for n in range(count) if values[count + n]}


def swapped_error(name: str) -> ParameterSwapped:
    return ParameterSwapped(
        f"parameter {name} got no gradient because it is no longer part of the module: it was "
        "replaced after wrapping (by load_state_dict(assign=True), a new nn.Parameter, or tying "
        "weights). The new one is not averaged, so replicas would drift apart. Change parameters "
        "before wrapping, or wrap the module again."
    )
