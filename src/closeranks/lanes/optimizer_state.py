"""State that an optimizer would create at its first step, created before it.

So memory is taken at the start, and what cannot be kept is refused at prepare(). The optimizer
takes a trial step, in which all gradients are NaN, on parameters that are put back afterwards; of
each value it keeps the first one that it stored. One that is NaN was made of the gradient (the
first momentum of SGD is), so it cannot exist before there is one, and is left to the first step.

Only for torch's own optimizers: what another does in a step is not known.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer, SparseAdam


def create(optimizer: Optimizer) -> None:
    """Give every parameter that gets gradients the state it would begin with."""
    step = inspect.unwrap(type(optimizer).step)
    if not step.__module__.startswith("torch.optim") or isinstance(optimizer, LBFGS | SparseAdam):
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    new = [p for p in parameters if p.requires_grad and not optimizer.state.get(p)]
    if not new:
        return
    aside = [(p, p.grad, p.detach().clone()) for p in parameters]
    state, groups = optimizer.state, [dict(group) for group in optimizer.param_groups]
    trial: defaultdict[Tensor, _FirstValues] = defaultdict(_FirstValues)
    try:
        with torch.no_grad():
            for p in parameters:
                p.grad = torch.full_like(p, float("nan")) if any(p is n for n in new) else None
            optimizer.state = trial
            step(optimizer)
    finally:
        optimizer.state = state
        with torch.no_grad():
            for p, gradient, value in aside:
                p.copy_(value)
                p.grad = gradient
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)
    for p in new:
        first = trial[p].first if p in trial else {}
        if first and not any(_is_nan(value) for value in first.values()):
            state[p].update(first)


class _FirstValues(dict[str, Any]):
    """A parameter's state that remembers what each value was when it was stored first."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.first:
            self.first[name] = value.clone() if isinstance(value, Tensor) else value
        super().__setitem__(name, value)


def _is_nan(value: Any) -> bool:
    if isinstance(value, Tensor):
        return bool(value.isnan().any())
    return isinstance(value, float) and value != value
