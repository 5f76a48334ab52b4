"""From summed regions to .grad: where the averages go, so that they look alike on every worker.

A gradient has the strides of its parameter, whoever has computed it: functions like a norm add up
in the order of memory, and would differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from closeranks.lanes.gradient import real


def targets_for(parameters: Sequence[Tensor], recent: Sequence[Tensor | None]) -> list[Tensor]:
    """Where the averages go: gradients that a lane has left, if they look as all workers' do."""
    found = []
    for parameter, gradient in zip(parameters, recent, strict=True):
        detached = parameter.detach()
        usable = (
            gradient is not None
            and gradient.is_contiguous()
            and gradient.stride() == detached.stride()
            and gradient.dtype == detached.dtype
            and gradient.data_ptr() % 64 == 0
            and not gradient.requires_grad
        )
        found.append(gradient if usable and gradient is not None else torch.empty_like(detached))
    return found


def apply(parameters: Sequence[Tensor], averages: Sequence[Tensor], unused: set[int]) -> None:
    for index, (parameter, average) in enumerate(zip(parameters, averages, strict=True)):
        if index in unused:
            continue
        if parameter.grad is None:
            parameter.grad = average
        else:
            with torch.no_grad():
                parameter.grad.add_(average)


def into_flat(targets: Sequence[Tensor], fill: Callable[[Sequence[Tensor]], bool]) -> bool:
    """Let fill() write into flat tensors, and bring what it wrote to the targets."""
    flat = [real(t).view(-1) if t.is_contiguous() else None for t in targets]
    places = [
        torch.empty(real(t).numel(), dtype=t.dtype.to_real()) if f is None else f
        for t, f in zip(targets, flat, strict=True)
    ]
    if not fill(places):
        return False
    for target, place, view in zip(targets, places, flat, strict=True):
        if view is None:
            real(target).copy_(place.view(real(target).shape))
    return True
