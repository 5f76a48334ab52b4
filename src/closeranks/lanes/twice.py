"""Whether a lane that was done twice by one worker gave the same bits both times. Pure.

If it did not, somebody else would have got other bits as well, and the promise is broken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from closeranks.checkpoint.format import as_bytes
from closeranks.lanes.lane import Lane


@dataclass(frozen=True)
class Attempt:
    """What one computation of a lane has left."""

    lane: Lane
    gradients: Sequence[Tensor | None]
    buffers: Tensor  # packed


def difference(first: Attempt, second: Attempt, names: Sequence[str]) -> str:
    """What differs, or nothing; the names are those of the parameters."""
    differing = []
    for name, a, b in zip(names, first.gradients, second.gradients, strict=True):
        if (a is None) != (b is None):
            differing.append(f"{name} (one time without a gradient)")
        elif a is not None and b is not None and not _same(a, b):
            differing.append(f"{name} (by up to {_distance(a, b):.1g})")
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        return f"the gradients of {', '.join(differing[:3])}{more}"
    if first.lane.told() != second.lane.told():
        return f"what was logged: {first.lane.values}, then {second.lane.values}"
    if not torch.equal(first.buffers, second.buffers):
        return "the modules' buffers"
    return ""


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(as_bytes(_dense(a)), as_bytes(_dense(b)))


def _distance(a: Tensor, b: Tensor) -> float:
    return float((_dense(a) - _dense(b)).abs().max()) if a.shape == b.shape else float("inf")


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor
