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


def on_order(
    order: Sequence[int], exchange: Exchange, waiter: Waiter, device: torch.device
) -> list[int]:
    """The order in which rank 0 saw gradients become ready."""
    numbers = torch.tensor(order, dtype=torch.int32, device=device)
    waiter.wait(exchange.broadcast(numbers, 0), lambda: "the agreement on a bucket order")
    return [int(n) for n in numbers.tolist()]


def on_changes(
    parameters: Sequence[Tensor], late: set[int], exchange: Exchange, waiter: Waiter
) -> tuple[list[int], set[int]]:
    """Which parameters need gradients on some rank, and which came late on some rank."""
    count = len(parameters)
    numbers = [int(p.requires_grad) for p in parameters]
    numbers += [int(n in late) for n in range(count)]
    answer = torch.tensor(numbers, dtype=torch.int32, device=parameters[0].device)
    waiter.wait(exchange.all_max(answer), lambda: "the agreement on what has changed")
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


def converted_error(name: str, parameter: Tensor) -> ParameterSwapped:
    return ParameterSwapped(
        f"parameter {name} got no gradient because it was converted after wrapping (it is "
        f"{parameter.dtype} on {parameter.device} now; .to(), .half(), .double() and .cuda() do "
        "that), and what autograd adds to it since is not averaged, so replicas would drift apart. "
        "Convert the module before wrapping, or wrap it again."
    )
