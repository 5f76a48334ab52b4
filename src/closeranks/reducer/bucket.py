"""One bucket: gradients that travel as one flat tensor, and the views that place them in it.

A bucket knows where each gradient lies and how to copy it in and out. It must not know when it
may fly, whether a gradient is late, or what the other ranks do.

While a bucket flies, `.grad` of its parameters is None: whatever autograd accumulates then is
late, and is told apart from what is under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from closeranks.exchange.layout import Layout

# From this mean size of a gradient on, copying and scaling each at once, while it is warm in the
# cache, costs less than a second pass over the whole bucket; below it, one call for all does.
EAGER_BYTES_MIN = 32 * 1024


class Bucket:
    """Dense gradients of one dtype and device in one flat tensor."""

    sparse = False

    def __init__(
        self,
        position: int,
        numbers: Sequence[int],
        parameters: Sequence[Tensor],
        memory: Tensor,
        layout: Layout,
        batched: bool,
    ) -> None:
        self.position = position
        self.numbers = list(numbers)
        self.parameters = list(parameters)
        self.memory = memory  # what is exchanged: the gradients, then the tail
        self.layout: Layout | None = layout  # of the gradients
        numel = layout.numel
        self.flat = memory[:numel]
        self.tail = memory[numel:]
        self.views = _views(self.flat, self.parameters)
        self.size_bytes = numel * memory.element_size()
        self.eager = not batched and self.size_bytes >= EAGER_BYTES_MIN * len(self.parameters)
        self.filled = [False] * len(self.parameters)
        self.missing = len(self.parameters)
        self.grads: list[Tensor | None] = []  # what .grad was when the bucket was loaded
        self._kept: dict[int, Tensor] = {}

    def reset(self) -> None:
        """Ready for the next backward."""
        self.missing = len(self.parameters)
        self.filled = [False] * len(self.parameters)
        self.grads = []
        self._kept = {}

    def keep(self, slot: int) -> None:
        """Remember a gradient that may have to stay as it is, where the flight would change it."""
        view = self.views[slot]
        if self.parameters[slot].grad is view:
            self._kept[slot] = view.clone()

    def fill_one(self, slot: int, scale: float, hand_over: bool) -> None:
        """Copy one gradient in, while it is warm; if told so, .grad is the place in the bucket."""
        grad = self.parameters[slot].grad
        assert grad is not None, "a gradient hook fired without a gradient"
        if grad is self.views[slot] and scale != 1.0:
            return  # Autograd may add to it once more: load() scales all of it.
        self._copy_in(slot, grad, scale)
        if hand_over and scale == 1.0:  # else what autograd adds later would be scaled differently
            self.parameters[slot].grad = self.views[slot]

    def load(self, scale: float) -> None:
        """Copy in, times scale, every gradient that is not there yet. Autograd is not recording."""
        grads = self.grads = [p.grad for p in self.parameters]
        if self.eager:
            for slot, filled in enumerate(self.filled):
                if not filled:
                    self._copy_in(slot, grads[slot], scale)
            return
        targets, sources = [], []
        for view, grad in zip(self.views, grads, strict=True):
            if grad is None:
                view.zero_()
            elif grad is not view:
                targets.append(view)
                sources.append(grad.to_dense() if grad.is_sparse else grad)
        if targets:
            torch._foreach_copy_(targets, sources)
        if scale != 1.0:
            self.flat.mul_(scale)

    def load_zeros(self) -> None:
        """This rank has nothing to give."""
        self.grads = [p.grad for p in self.parameters]
        for slot in range(len(self.parameters)):
            self.keep(slot)
        self.flat.zero_()

    def detach(self) -> None:
        """The bucket flies: what autograd accumulates from now on is late."""
        for parameter in self.parameters:
            parameter.grad = None

    def give_back(self, as_view: bool, slots: Sequence[int] | None = None) -> None:
        """Put the result into .grad, of some or of all; a gradient's own tensor is kept."""
        chosen = range(len(self.parameters)) if slots is None else slots
        if as_view:
            for slot in chosen:
                self.parameters[slot].grad = self.views[slot]
            return
        targets, dtype = [], self.flat.dtype
        for slot in chosen:
            parameter, old = self.parameters[slot], self.grads[slot]
            grad = None if old is self.views[slot] else old
            if grad is None or grad.dtype is not dtype or grad.is_sparse:
                grad = torch.empty_like(parameter)
            parameter.grad = grad
            targets.append(grad.detach() if grad.requires_grad else grad)
        if targets:
            views = self.views if slots is None else [self.views[slot] for slot in slots]
            torch._foreach_copy_(targets, views)

    def restore(self, slot: int) -> None:
        """Put back what .grad was when the bucket was loaded: the result is not wanted."""
        if slot in self._kept:
            self.views[slot].copy_(self._kept[slot])
        self.parameters[slot].grad = self.grads[slot]

    def _copy_in(self, slot: int, grad: Tensor | None, scale: float) -> None:
        self.filled[slot] = True
        view = self.views[slot]
        if grad is None:
            view.zero_()
        elif scale != 1.0:
            torch.mul(_dense(grad), scale, out=view)
        elif grad is not view:
            view.copy_(_dense(grad))


class SparseBucket:
    """One gradient that may be a sparse tensor; it travels as what it is."""

    sparse = True
    eager = False

    def __init__(self, position: int, number: int, parameter: Tensor) -> None:
        self.position = position
        self.numbers = [number]
        self.parameters = [parameter]
        self.size_bytes = parameter.numel() * parameter.element_size()
        self.missing = 1
        self.layout = None
        self.memory = self.flat = parameter.detach().new_zeros(0)
        self.tail = self.memory
        self.views: list[Tensor] = [parameter.detach()]
        self.grads: list[Tensor | None] = []

    def reset(self) -> None:
        self.missing = 1
        self.grads = []
        self.memory = self.flat = self.memory.new_zeros(0)

    def fill_one(self, slot: int, scale: float, hand_over: bool) -> None:
        raise AssertionError("a sparse gradient is loaded when its bucket flies")

    def keep(self, slot: int) -> None:
        """The gradient has memory of its own, which no flight changes."""

    def load(self, scale: float) -> None:
        """The flat tensor of this flight is a coalesced sparse copy of the gradient."""
        grad = self.parameters[0].grad
        if grad is None:
            self.load_zeros()
            return
        self.grads = [grad]
        sparse = grad.detach() if grad.is_sparse else grad.detach().to_sparse(1)
        self._hold(sparse.coalesce() * scale)

    def load_zeros(self) -> None:
        parameter = self.parameters[0]
        self.grads = [parameter.grad]
        indices = torch.zeros(1, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.detach().new_zeros(0, *parameter.shape[1:])
        self._hold(torch.sparse_coo_tensor(indices, values, parameter.shape).coalesce())

    def detach(self) -> None:
        self.parameters[0].grad = None

    def give_back(self, as_view: bool, slots: Sequence[int] | None = None) -> None:
        if slots is None or slots:
            self.parameters[0].grad = self.flat

    def restore(self, slot: int) -> None:
        self.parameters[0].grad = self.grads[0]

    def _hold(self, sparse: Tensor) -> None:
        self.memory = self.flat = sparse
        self.views = [sparse]


def _dense(grad: Tensor) -> Tensor:
    """The gradient's values alone, also where it is part of a graph or sparse."""
    grad = grad.detach()
    return grad.to_dense() if grad.is_sparse else grad


def _views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """A view for each parameter, with the parameter's strides where these are dense.

    Autograd gives gradients the layout of their parameter, so a channels_last weight gets a
    channels_last view and copying is a plain pass over memory.
    """
    views, offset = [], 0
    for parameter in parameters:
        size, numel = parameter.size(), parameter.numel()
        if numel and _is_dense(parameter):
            views.append(flat.as_strided(size, parameter.stride(), flat.storage_offset() + offset))
        else:
            views.append(flat[offset : offset + numel].view(size))
        offset += numel
    return views


def as_matrix(parameter: Tensor) -> tuple[int, int]:
    """Rows and columns of a gradient as it lies in a bucket: a row for each step of the dimension
    whose steps are longest."""
    size, numel = parameter.size(), parameter.numel()
    if numel == 0 or len(size) < 2:
        return numel, 1
    rows = size[0]
    if _is_dense(parameter):
        rows = max(zip(parameter.stride(), size, strict=True), key=lambda pair: _steps(*pair))[1]
    return rows, numel // rows


def _steps(stride: int, size: int) -> int:
    return stride if size > 1 else 0


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, each place once, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
