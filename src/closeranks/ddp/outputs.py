"""What leaves the module's forward: where a backward will come in.

A hook on each output tells the reducer that a backward has reached the module, so that a rank
whose backward reaches no parameter takes part as well. The outputs are returned as they are.
Knows tensors in nested structures; must not know what the reducer does with the news.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def tensors_in(output: object) -> Iterator[Tensor]:
    """All tensors of nested lists, tuples, dicts, dataclasses and local RRefs."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, list | tuple):
        for item in output:
            yield from tensors_in(item)
    elif isinstance(output, dict):
        for item in output.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors_in(getattr(output, field.name))
    elif dist.rpc.is_available() and isinstance(output, dist.rpc.RRef) and output.is_owner():
        yield from tensors_in(output.local_value())


def watch(output: Any, training: bool, on_gradient: Callable[[Any, Tensor], None]) -> Any:
    """Have on_gradient called when a backward reaches an output; returns the output.

    If no output requires a gradient although the module trains, nothing in it used a parameter.
    Other ranks may have used some and will wait, so the outputs are tied to a graph: backward()
    then works here as it does there, and this rank takes part with zeros.
    """
    tensors = list(tensors_in(output))
    with_graph = [t for t in tensors if t.grad_fn is not None]
    for tensor in with_graph:
        tensor.register_hook(functools.partial(on_gradient, tensor.grad_fn))
    if with_graph or not training or any(t.requires_grad for t in tensors):
        return output
    tied = _tied(output)
    for tensor in tensors_in(tied):
        if tensor.grad_fn is not None:
            tensor.register_hook(functools.partial(on_gradient, tensor.grad_fn))
    return tied


def _tied(output: Any) -> Any:
    """The same structure with its tensors tied; containers are copied, other objects are not."""
    if isinstance(output, Tensor):
        return _tie(output)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        twin: Any = copy.copy(output)
        for field in dataclasses.fields(output):
            # Not by the class's own method, which a frozen one does not have.
            object.__setattr__(twin, field.name, _tied(getattr(output, field.name)))
        if isinstance(twin, dict):  # Some keep their fields as items too.
            twin.update({key: _tied(value) for key, value in twin.items()})
        return twin
    if isinstance(output, tuple):
        items = [_tied(item) for item in output]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    if isinstance(output, list):
        twin = copy.copy(output)
        twin[:] = [_tied(item) for item in output]
        return twin
    if isinstance(output, dict):
        twin = copy.copy(output)
        for key, value in output.items():
            twin[key] = _tied(value)
        return twin
    return output


def _tie(tensor: Tensor) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    token = torch.zeros((), requires_grad=True)
    tied: Tensor = _Tie.apply(tensor, token)
    return tied


class _Tie(torch.autograd.Function):
    """The same values, with a graph that leads to nothing."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, token: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None
