"""Distributed autograd (torch.distributed.rpc): gradients live in a context and not in .grad.

For the time of an exchange the context's gradients are put into .grad, so that everything else
need not know where they come from; afterwards .grad is what it was before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from closeranks.reducer.reducer import Reducer


def context_of_thread() -> int | None:
    """The id of the distributed autograd context that this thread is in, None outside of any.

    A forward runs in its context. A distributed backward runs in threads of the engine, which
    are in none, while an ordinary one runs in the thread that called it.
    """
    if not dist.rpc.is_available() or not torch._C._distributed_rpc._is_current_rpc_agent_set():
        return None
    try:
        context: Any = torch._C._distributed_autograd._current_context()
    except RuntimeError:  # There is none.
        return None
    return int(context._context_id())


def context_of_backward(forward_context: int) -> int | None:
    """Called inside a backward: the context in which its gradients are, None if in .grad."""
    return forward_context if context_of_thread() is None else None


@contextlib.contextmanager
def gradients_of(context: int | None, reducer: Reducer) -> Iterator[None]:
    """Within, .grad of the planned parameters are the gradients of the context."""
    if context is None:
        yield
        return
    gradients = torch._C._distributed_autograd.get_gradients(context)
    planned = [reducer.parameters[n] for n in reducer.fleet.planned]
    before = [p.grad for p in planned]
    for parameter in planned:
        parameter.grad = gradients.get(parameter)
    yield
    for parameter, grad in zip(planned, before, strict=True):
        result = parameter.grad
        if parameter in gradients and result is not None:
            gradients[parameter].copy_(result)
        parameter.grad = grad
