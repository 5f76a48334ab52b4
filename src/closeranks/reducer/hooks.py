"""Autograd's hooks on parameters: who is told when a gradient has been, or will be, accumulated.

Both kinds sit on the node that accumulates, as torch's own reducer has it: distributed autograd
and mixed precision rely on that, and autograd.grad, which accumulates nothing, does not call them.
Knows parameters by number; must not know why it is asked for hooks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node


class GradientHooks:
    """The hooks on the parameters that take part."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        after: Callable[..., None],
        before: Callable[[int], None],
    ) -> None:
        self._parameters = parameters
        self._after = after
        self._before = before
        self._calls_before = False
        self._handles: dict[int, list[Any]] = {}
        self._nodes: dict[int, Any] = {}

    def watch(self, numbers: Iterable[int]) -> None:
        """Hooks on these parameters, and on no others."""
        wanted = set(numbers)
        for number in set(self._handles) - wanted:
            for handle in self._handles.pop(number):
                handle.remove()
            del self._nodes[number]
        for number in sorted(wanted - set(self._handles)):
            with _trainable(self._parameters[number]):
                node = accumulator_of(self._parameters[number])
                self._nodes[number] = node
                fire = functools.partial(self._after, number)
                self._handles[number] = [node.register_hook(fire)]
            if self._calls_before:
                self._add_before(number)

    def call_before(self) -> None:
        """From now on also tell of a gradient before it is accumulated."""
        if not self._calls_before:
            self._calls_before = True
            for number in self._handles:
                self._add_before(number)

    def _add_before(self, number: int) -> None:
        def before(_grads: object) -> None:
            self._before(number)

        self._handles[number].append(self._nodes[number].register_prehook(before))

    def is_stale(self, number: int) -> bool:
        """Whether autograd accumulates elsewhere by now: the parameter was converted."""
        parameter = self._parameters[number]
        with _trainable(parameter):
            return accumulator_of(parameter) is not self._nodes[number]

    # What the engine is about to do; these may be asked inside a backward only.

    def will_fire(self, number: int) -> bool:
        """Whether the backward under way will accumulate this gradient, as far as is known."""
        return _will_execute(self._nodes[number])

    def any_will_fire(self) -> bool:
        return any(map(_will_execute, self._nodes.values()))


@contextlib.contextmanager
def _trainable(parameter: Tensor) -> Iterator[None]:
    """A parameter that is frozen here, but not on all ranks, can have hooks for later as well."""
    requires_grad = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(requires_grad)


def accumulator_of(parameter: Tensor) -> Any:
    """The node of autograd that adds to .grad of a parameter."""
    with torch.enable_grad():
        view = parameter.expand_as(parameter)
    assert view.grad_fn is not None, "a parameter that takes part requires a gradient"
    return view.grad_fn.next_functions[0][0]


def runs_whole_graph(node: Any) -> bool:
    """Whether the engine executes everything below a node, as backward() does."""
    seen, todo = set(), [node]
    while todo:
        current = todo.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        if not _will_execute(current):
            return False
        todo.extend(child for child, _ in current.next_functions)
    return True
