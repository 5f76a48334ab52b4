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
import functools
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.reducer.hooks import accumulator_of
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
        self._exchanged: set[Tensor] = set()  # .grad of these holds exchanged values only
        self._before: dict[Tensor, Tensor] = {}
        # The mean of equal values is that value: it may see them again.
        trained = [p for p in self.parameters if p.requires_grad and average is not True]
        self._accumulators = [accumulator_of(parameter) for parameter in trained]
        for parameter, node in zip(trained, self._accumulators, strict=True):
            node.register_prehook(functools.partial(self._set_aside, parameter))

    def _set_aside(self, parameter: Tensor, _grads: object = None) -> None:
        """Autograd is about to add to a gradient: what was exchanged leaves it."""
        if parameter.grad is None:
            self._before.pop(parameter, None)  # The user has dropped it since.
        if parameter in self._exchanged and parameter.grad is not None:
            self._before[parameter] = parameter.grad
            parameter.grad = None
        self._exchanged.discard(parameter)

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Average what was accumulated since the last exchange, this block included."""
        yield
        with torch.no_grad():
            weight = self._weight()
            total = self._sum(torch.tensor([weight], dtype=torch.float64)).item()
            for parameter in self.parameters:
                if self.average is not True:
                    self._set_aside(parameter)
                self._exchange_one(parameter, weight, total)
                old = self._before.pop(parameter, None)
                if old is not None:
                    new = parameter.grad
                    parameter.grad = old if new is None else old + new
        self._exchanged = {p for p in self.parameters if p.grad is not None}

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
