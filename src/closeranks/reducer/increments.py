"""Keeps what was exchanged before apart from what this rank has accumulated since.

Averaging a whole `.grad` twice gives the average again, so a plain mean needs nothing of this.
A sum, a weighted mean or a communication hook must see each increment exactly once: before
autograd adds to a gradient that has been exchanged, it is set aside; when the increment has been
exchanged, it is added back.

Between a local backward and the exchange, `.grad` shows the user the sum of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass
class _Shown:
    """A sum shown in .grad after a local backward, and the increment inside it."""

    total: Tensor
    version: int
    increment: Tensor


class Increments:
    """For each parameter: exchanged part and increment."""

    def __init__(self, parameters: Sequence[Tensor], as_view: bool) -> None:
        self._parameters = parameters
        self._as_view = as_view
        self._exchanged: set[int] = set()  # .grad of these holds nothing but exchanged values
        self._base: dict[int, Tensor] = {}
        self._shown: dict[int, _Shown] = {}

    def set_aside(self, number: int) -> None:
        """Called before autograd adds to .grad: what was exchanged leaves it."""
        parameter = self._parameters[number]
        if number in self._shown:
            self._unshow(number)
        elif number in self._exchanged and parameter.grad is not None:
            # In view mode the gradient lies in the bucket, which the increment will overwrite.
            self._base[number] = parameter.grad.clone() if self._as_view else parameter.grad
            parameter.grad = None
        self._exchanged.discard(number)

    def add_back(self, numbers: Iterable[int]) -> None:
        """Called after an exchange: .grad becomes what was there before plus what came."""
        for number in numbers:
            parameter = self._parameters[number]
            base = self._base.pop(number, None)
            if base is not None:
                base = base.to(parameter.dtype)  # Mixed precision has changed it in between.
                if parameter.grad is None:
                    parameter.grad = base
                elif self._as_view or parameter.grad.is_sparse or base.is_sparse:
                    parameter.grad.add_(base)
                else:
                    base.add_(parameter.grad)
                    parameter.grad = base
            if parameter.grad is not None:
                self._exchanged.add(number)

    def show(self) -> None:
        """Called after a local backward: .grad shows everything that has been accumulated."""
        for number, base in self._base.items():
            parameter = self._parameters[number]
            if number not in self._shown and parameter.grad is not None:
                total = base + parameter.grad
                self._shown[number] = _Shown(total, total._version, parameter.grad)
                parameter.grad = total

    def unshow(self) -> None:
        """Called before an exchange: .grad holds the increments alone again."""
        for number in list(self._shown):
            self._unshow(number)

    def _unshow(self, number: int) -> None:
        shown = self._shown.pop(number)
        parameter = self._parameters[number]
        if parameter.grad is shown.total and shown.total._version == shown.version:
            parameter.grad = shown.increment
        else:  # The user zeroed or replaced the gradient: what it was made of is void.
            self._base.pop(number)
