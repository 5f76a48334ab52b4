"""Optimizers that meet the exchange: steps inside the backward, and steps without a backward.

Inside: parameters given to torch's _apply_optimizer_in_backward step as soon as their average is
there, and their gradients are freed. Without: a rank whose loss ignored the module's output takes
part in the exchange when its optimizer steps, before the update.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from closeranks.reducer.reducer import Reducer


def take_over_in_backward(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those with an optimizer in the backward; it no longer steps by itself, before the average."""
    mine = [p for p in parameters if hasattr(p, "_in_backward_optimizers")]
    if mine:
        from torch.distributed.optim.apply_optimizer_in_backward import (
            param_to_optim_hook_handle_map as handles,
        )

        for parameter in mine:
            for handle in handles.get(parameter, []):
                handle.remove()
    return mine


def step_in_backward(parameters: Iterable[Tensor]) -> None:
    """Step each parameter's own optimizers on its averaged gradient, and free that gradient."""
    with torch.enable_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
                    optimizer.step()
            parameter.grad = None


_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()
_registered = False


def settle_before_steps(reducer: Reducer) -> None:
    """From now on, no optimizer of the reducer's parameters steps past an unsettled forward."""
    global _registered
    _reducers.add(reducer)
    if not _registered:
        _registered = True
        register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Any, _args: object, _kwargs: object) -> None:
    for reducer in list(_reducers):
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(id(p) in owned for p in reducer.parameters):
            if reducer.has_unsettled_forward:
                reducer.join_in()
            reducer.forwards.stepped()
