"""What a reducer is told once, when it is made. Plain values, checked by whoever makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from closeranks.reducer.plan import ParameterSpec

Average = bool | Callable[[], float]


@dataclass(frozen=True)
class Candidate:
    """A parameter that may need a gradient, now or later."""

    name: str
    parameter: Tensor
    sparse: bool
    dtype: torch.dtype  # of its gradient between ranks; mixed precision changes the parameter's

    def spec(self, number: int) -> ParameterSpec:
        p, dtype = self.parameter, self.dtype
        return ParameterSpec(
            number, p.numel(), dtype.itemsize, str(dtype), str(p.device), self.sparse
        )


@dataclass(frozen=True)
class ReducerOptions:
    """How gradients are averaged and bucketed."""

    caps_bytes: tuple[int, ...]
    average: Average = True
    as_view: bool = False  # .grad are views of the buckets
    batched: bool = False  # copy all gradients of a bucket at once, also large ones
    static_graph: bool = False
    find_unused: bool = False
    skip_unused: bool = False  # do not exchange a bucket of which this rank used nothing
    hold: bool = False  # let no bucket fly before the backward has settled
    hold_first: bool = False  # the same for the first exchange only
