"""An all-reduce in PowerSGD's format: two sums over ranks, of factors much smaller than the tensor.

    start   the left factors, and what is no matrix, are summed
    turn    the right factors are
    end     the tensor becomes their product

Where the left factors are not finite, on every rank alike because they are sums, the tensor is
summed as it is instead: infinities and NaNs arrive where they were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from closeranks.wire.powersgd import shape_of

if TYPE_CHECKING:
    from closeranks.exchange.group import GroupExchange
    from closeranks.exchange.layout import Layout
    from closeranks.wire.powersgd import PowerSgd


class Factored:
    """One all-reduce."""

    def __init__(
        self,
        groups: tuple[GroupExchange, GroupExchange],
        by: PowerSgd,
        layout: Layout,
        values: Tensor,
        residual: Tensor,
        scale: float,
    ) -> None:
        """`groups` are those of the first and of the second collectives."""
        self._group, self._turns = groups
        self._by = by
        self._shape = shape_of(layout.matrices, layout.numel, by.rank)
        self._values = values
        self._given = residual  # plus the values, until the factors have been made of it
        self._scale = scale
        self._left = self._right = values
        self.works: list[Any] = []
        self._is_finite = True

    def start(self) -> None:
        self._given.add_(self._values)
        self._left = self._by.left(self._shape, self._given)
        self.works = [self._group.all_reduce(self._left)]

    def turn(self) -> None:
        self._wait()
        self._is_finite = bool(torch.isfinite(self._left).all())
        if not self._is_finite:
            self._values.copy_(self._given)
            self._given.zero_()
            self.works = [self._turns.all_reduce(self._values)]
            return
        own = self._by.right(self._shape, self._left, self._given)
        self._right = own.clone()
        if own.numel():
            self.works = [self._turns.all_reduce(self._right)]
        self._by.keep_rest(self._shape, self._left, own, self._given)

    def end(self) -> None:
        self._wait()
        if self._is_finite:
            self._by.product(self._shape, self._left, self._right, self._values, self._scale)
        else:
            self._values.mul_(self._scale)

    def _wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []
