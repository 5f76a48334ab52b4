"""The readable twin: what the reducer computes, with one all-reduce for each gradient.

Not fast, and it overlaps nothing with the backward. Read it to understand what the reducer must
give; the tests use it as an oracle.

    naive = NaiveReducer(model.parameters())
    with naive.exchange():
        loss_of(model(x)).backward()

A backward outside `exchange()` is local: its gradients are added to `.grad` and go with the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.reducer.options import Average


class NaiveReducer:
    """Averages gradients after each backward."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        group: dist.ProcessGroup | None = None,
        average: Average = True,
    ) -> None:
        self.parameters = list(dict.fromkeys(parameters))
        self.group = group if group is not None else dist.group.WORLD
        self.average = average
        self._exchanged: dict[Tensor, Tensor] = {}  # a copy of .grad after the last exchange

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Average what was accumulated since the last exchange, this block included."""
        # What was exchanged leaves .grad, so that only what is new is exchanged. A plain mean
        # may see all of it: the mean of equal values is that value.
        before = {} if self.average is True else self._set_aside()
        yield
        with torch.no_grad():
            weight = self._weight()
            total = self._sum(torch.tensor([weight], dtype=torch.float64)).item()
            for parameter in self.parameters:
                self._exchange_one(parameter, weight, total)
                old = before.get(parameter)
                if old is not None:
                    new = parameter.grad
                    parameter.grad = old if new is None else old + new
        self._exchanged = {p: p.grad.clone() for p in self.parameters if p.grad is not None}

    def _set_aside(self) -> dict[Tensor, Tensor]:
        before = {}
        for parameter, old in self._exchanged.items():
            # A gradient that was zeroed, replaced or added to is not what was exchanged.
            if parameter.grad is not None and _same(parameter.grad, old):
                before[parameter] = parameter.grad
                parameter.grad = None
        return before

    def _weight(self) -> float:
        return float(self.average()) if callable(self.average) else 1.0

    def _exchange_one(self, parameter: Tensor, weight: float, total: float) -> None:
        grad = parameter.grad
        used = self._sum(torch.tensor([float(grad is not None)])).item()
        if not used:
            return  # on every rank: .grad stays as it is
        given = torch.zeros_like(parameter) if grad is None else _dense(grad.detach())
        if self.average is True:
            result = self._sum(given * (1.0 / dist.get_world_size(self.group)))
        elif self.average is False:
            result = self._sum(given.clone())
        else:
            result = self._sum(given * weight) * (1.0 / total if total > 0 else 0.0)
        parameter.grad = result.to_sparse(1) if grad is not None and grad.is_sparse else result

    def _sum(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        dist.all_reduce(
            torch.view_as_real(tensor) if tensor.is_complex() else tensor, group=self.group
        )
        return tensor


def _dense(grad: Tensor) -> Tensor:
    """Entries for the same row are summed by coalesce(), as everywhere: order decides bits."""
    return grad.coalesce().to_dense() if grad.is_sparse else grad


def _same(a: Tensor, b: Tensor) -> bool:
    return a.is_sparse == b.is_sparse and torch.equal(a.to_dense(), b.to_dense())
