"""What gradients are multiplied by, and when: before, during and after their flight.

    mean       before: 1/n (or during, where the exchange does it for free)
    sum        nothing
    weights    before: this rank's weight; after: one over the sum of all weights
    hook       nothing: the hook decides

Knows numbers and ranks only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from closeranks.exchange.base import Exchange, Pending
    from closeranks.reducer.options import Average
    from closeranks.reducer.waiting import Waiter


class Scale:
    """The factors of one exchange; begin() sets them."""

    def __init__(self, average: Average, exchange: Exchange, waiter: Waiter) -> None:
        self.average = average
        self.before = 1.0
        self.during = 1.0
        self.weightless = False  # this rank gives nothing to the next exchange
        self._exchange = exchange
        self._waiter = waiter
        self._weights: Tensor | None = None
        self._pending: Pending | None = None
        self._after: float | None = None
        self._uneven = False  # inside join()
        self._forward_pass_work: tuple[Any, bool] | None = None

    def expect_joined(self, work: Any, by_initial_size: bool) -> None:
        """join(): `work` will tell how many ranks still train, None if that was asked before."""
        self._uneven = True
        if work is not None:
            self._forward_pass_work = (work, by_initial_size)

    def begin(self, has_hook: bool) -> None:
        self.before = self.during = 1.0
        self._weights = self._after = None
        if has_hook or self.average is False:
            return
        if self.average is True:
            factor = 1.0 / self._divisor()
            # Some ranks may have joined and then know less: each scales its own.
            if self._exchange.scales_for_free and not (self._uneven or self.weightless):
                self.during = factor
            else:
                self.before = factor
            return
        self.before = 0.0 if self.weightless else _weight(self.average())
        self._weights = torch.tensor([self.before], dtype=torch.float64)
        self._pending = self._exchange.all_reduce(self._weights)

    def finish(self, bucket: Any) -> None:
        """Divide a bucket that has landed by the sum of all weights."""
        factor = self.after()
        if factor != 1.0:
            if bucket.sparse:
                bucket.flat.values().mul_(factor)
            else:
                bucket.flat.mul_(factor)

    def after(self) -> float:
        """One over the sum of all weights; if that sum is zero, so are all gradients."""
        if self._weights is None:
            return 1.0
        if self._after is None:
            assert self._pending is not None, "weights are under way"
            self._waiter.wait(self._pending, lambda: "the exchange of weights")
            total = self._weights.item()
            self._after = 1.0 / total if total > 0 else 0.0
        return self._after

    def _divisor(self) -> float:
        if self._forward_pass_work is None:
            return self._exchange.size
        work, by_initial_size = self._forward_pass_work
        if by_initial_size:
            return self._exchange.size
        work.wait()
        return float(work.result()[0].item())


def _weight(value: object) -> float:
    if not isinstance(value, int | float | Tensor):
        raise TypeError(
            f"average=fn: fn() returned {type(value).__name__}, wanted a number: the weight of "
            "this rank's gradients. Return for instance the number of tokens as a float."
        )
    weight = float(value)
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(
            f"average=fn: fn() returned {weight}, wanted a finite number that is not negative. "
            "Return 0.0 to have this rank's gradients ignored."
        )
    return weight
