"""One more exchange for what the plan could not carry: late increments, new parameters.

Late: the gradient fired again after its bucket had flown (a layer in two reentrant checkpoints).
New: the parameter was frozen when the plan was made. Both are rare, so simple beats fast here:
one flat tensor for each dtype and device, with a count of givers for each parameter behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from closeranks.exchange.base import Exchange
    from closeranks.reducer.scale import Scale
    from closeranks.reducer.waiting import Waiter


def exchange(
    given: dict[int, Tensor | None],
    parameters: Sequence[Tensor],
    replaces: Sequence[int],
    by: Exchange,
    waiter: Waiter,
    scale: Scale,
    discard: bool,
) -> None:
    """Average what is given, by parameter number, and add it to .grad.

    Args:
        given: this rank's tensor for each number, None where it has none. All ranks pass the
            same numbers.
        replaces: the numbers whose .grad is what was given, so that the result replaces it.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number in sorted(given):
        parameter = parameters[number]
        kinds.setdefault((parameter.dtype, parameter.device), []).append(number)
    for numbers in kinds.values():
        pieces = [_flat(given[n], parameters[n]) * scale.before for n in numbers]
        givers = torch.tensor(
            [float(given[n] is not None) for n in numbers],
            dtype=pieces[0].dtype,
            device=pieces[0].device,
        )
        memory = torch.cat([*pieces, givers])
        pending = by.all_reduce(memory, scale.during)
        waiter.wait(pending, lambda: "the exchange of late gradients")
        if discard:
            continue
        factor = scale.after()
        *results, givers = memory.split([p.numel() for p in pieces] + [len(numbers)])
        for number, result, count in zip(numbers, results, givers.tolist(), strict=True):
            if count:
                _apply(parameters[number], result * factor, number in replaces)


def _flat(tensor: Tensor | None, parameter: Tensor) -> Tensor:
    if tensor is None:
        return parameter.detach().new_zeros(parameter.numel())
    tensor = tensor.detach()
    return (tensor.to_dense() if tensor.is_sparse else tensor).reshape(-1)


def _apply(parameter: Tensor, result: Tensor, replaces: bool) -> None:
    result = result.view(parameter.shape)
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter).copy_(result)
    elif replaces:
        parameter.grad.copy_(result)
    else:
        parameter.grad.add_(result)
