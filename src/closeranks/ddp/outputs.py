"""What leaves the module's forward: where a backward will come in.

A hook on each output tells the reducer that a backward has reached the module, so that a rank
whose backward reaches no parameter takes part as well. The outputs are returned as they are.
Knows tensors in nested structures; must not know what the reducer does with the news.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree


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
    tied = pytree.tree_map_only(Tensor, _tie, output)
    for tensor in tensors_in(tied):
        if tensor.grad_fn is not None:
            tensor.register_hook(functools.partial(on_gradient, tensor.grad_fn))
    return tied


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
