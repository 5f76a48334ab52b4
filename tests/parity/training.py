"""Trains a small model for five steps on one rank and writes down what happened: the trace.

The same training runs with torch's class, with the naive twin and with ours; the schedule is told
in terms of a replica, which hides how each of them is driven. A trace is only compared elsewhere.

Every replica starts from other weights on every rank, so that handing out rank 0's is tested too.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from closeranks.reducer.naive import NaiveReducer
from tests.parity.models import Model, Place

STEPS = 5
Average = bool | Callable[[], float]


class Replica(Protocol):
    """A module whose synchronised backwards end with the same gradients on every rank."""

    module: nn.Module

    def forward(self, *inputs: Any) -> Tensor: ...

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None: ...

    def no_sync(self) -> contextlib.AbstractContextManager[None]: ...


class Wrapped:
    """A replica by torch's class or by one that has its surface."""

    def __init__(self, wrapper: Callable[..., Any], module: nn.Module, **options: Any) -> None:
        self.module = module
        self._ddp = wrapper(module, **options)

    def forward(self, *inputs: Any) -> Tensor:
        return self._ddp(*inputs)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self._ddp.no_sync()


class Naive:
    """A replica by the naive twin. What surrounds the gradients is done here, one by one.

    Buffers follow torch's rule: rank 0's are handed out before a forward, unless they are switched
    off or the forward before it was a local one.
    """

    def __init__(self, module: nn.Module, average: Average, buffers: bool = True) -> None:
        self.module = module
        self._buffers = buffers
        self._local = False
        self._previous_forward_was_local = False
        for tensor in [*module.parameters(), *(module.buffers() if buffers else [])]:
            _from_rank_0(tensor)
        self._reducer = NaiveReducer(module.parameters(), average=average)

    def forward(self, *inputs: Any) -> Tensor:
        if self._buffers and not self._previous_forward_was_local:
            for buffer in self.module.buffers():
                # A graph that waits for its backward must not see this as a change under its feet.
                with torch.autograd._unsafe_preserve_version_counter(buffer):
                    _from_rank_0(buffer)
        self._previous_forward_was_local = self._local
        return self.module(*inputs)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        with contextlib.nullcontext() if self._local else self._reducer.exchange():
            loss.backward(retain_graph=retain_graph)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._local = True
        try:
            yield
        finally:
            self._local = False


def _from_rank_0(tensor: Tensor) -> None:
    raw = tensor.detach()
    flat = (torch.view_as_real(raw) if raw.is_complex() else raw).contiguous()
    dist.broadcast(flat, 0)
    raw.copy_(torch.view_as_complex(flat) if raw.is_complex() else flat)


# Schedules: how one step reaches its gradients. `loss_at(k)` is the forward of micro-batch k.

LossAt = Callable[[int], Tensor]


def plain(replica: Replica, loss_at: LossAt) -> None:
    replica.backward(loss_at(0))


def no_sync(replica: Replica, loss_at: LossAt) -> None:
    """Two local backwards are carried into a synchronised one."""
    with replica.no_sync():
        replica.backward(loss_at(0))
        replica.backward(loss_at(1))
    replica.backward(loss_at(2))


def two_pairs(replica: Replica, loss_at: LossAt) -> None:
    """Forward and backward twice, the second onto the gradients of the first."""
    replica.backward(loss_at(0))
    replica.backward(loss_at(1))


def two_pairs_rescaled(replica: Replica, loss_at: LossAt) -> None:
    """As two_pairs, and in between the gradients are changed in place, as clipping does."""
    replica.backward(loss_at(0))
    for parameter in replica.module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    replica.backward(loss_at(1))


def synced_local_synced(replica: Replica, loss_at: LossAt) -> None:
    """A local backward between two synchronised ones."""
    replica.backward(loss_at(0))
    with replica.no_sync():
        replica.backward(loss_at(1))
    replica.backward(loss_at(2))


def dropped(replica: Replica, loss_at: LossAt) -> None:
    """Gradients of an exchange and of a local backward are given up before another exchange."""
    replica.backward(loss_at(0))
    with replica.no_sync():
        replica.backward(loss_at(1))
    replica.module.zero_grad()
    replica.backward(loss_at(2))


def peeked(replica: Replica, loss_at: LossAt) -> None:
    """Somebody asks for gradients of their own in between, which must leave .grad alone."""
    replica.backward(loss_at(0))
    torch.autograd.grad(loss_at(1), list(replica.module.parameters()))


def two_forwards(replica: Replica, loss_at: LossAt) -> None:
    """Two forwards, then their two backwards."""
    first, second = loss_at(0), loss_at(1)
    replica.backward(first)
    replica.backward(second)


def summed(replica: Replica, loss_at: LossAt) -> None:
    """Two forwards, then one backward of the sum of their losses."""
    replica.backward(loss_at(0) + loss_at(1))


def retained(replica: Replica, loss_at: LossAt) -> None:
    """Two backwards through the same graph."""
    loss = loss_at(0)
    replica.backward(loss, retain_graph=True)
    replica.backward(loss)


Schedule = Callable[[Replica, LossAt], None]
SCHEDULES: dict[str, Schedule] = {
    schedule.__name__: schedule
    for schedule in (
        plain,
        no_sync,
        two_pairs,
        two_pairs_rescaled,
        synced_local_synced,
        dropped,
        peeked,
        two_forwards,
        summed,
        retained,
    )
}
# Where torch's class leaves the second backward unsynchronised, it cannot be the measure.
TORCH_DOES_NOT_SYNCHRONISE = frozenset({"two_forwards", "retained"})
# How many of a step's backwards are synchronised, so how often a weight is asked for.
EXCHANGES = {"plain": 1, "no_sync": 1, "peeked": 1, "summed": 1}
EXCHANGES |= {name: 2 for name in SCHEDULES if name not in EXCHANGES}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "sgd_plain": lambda parameters: torch.optim.SGD(parameters, lr=0.05),  # takes sparse gradients
    # The default eps of 1e-8 would blow up gradients that are nothing but rounding, such as those
    # of the key bias in attention, into steps of full length.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-4),
}


@dataclass(frozen=True)
class Step:
    """What a rank held after the backwards of a step; strides are those of dense gradients."""

    gradients: dict[str, Tensor | None]
    strides: dict[str, tuple[int, ...] | None]
    buffers: dict[str, Tensor]


@dataclass
class Trace:
    """One rank's record of a training."""

    steps: list[Step] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    digests: list[str] = field(default_factory=list)  # of gradients and weights, after each step


def train(
    replica: Replica, model: Model, schedule: str, optimizer: str, set_to_none: bool = True
) -> Trace:
    """Train for five steps. Reseeds torch, by rank, so that dropout repeats the next time."""
    rank, size = dist.get_rank(), dist.get_world_size()
    stepper = OPTIMIZERS[optimizer](replica.module.parameters())
    trace = Trace()
    torch.manual_seed(1000 + rank)
    for step in range(STEPS):

        def loss_at(micro: int, step: int = step) -> Tensor:
            return model.loss(replica.forward(*model.inputs(Place(rank, size, step, micro))))

        stepper.zero_grad(set_to_none=set_to_none)
        SCHEDULES[schedule](replica, loss_at)
        trace.steps.append(_look(replica.module))
        stepper.step()
        trace.digests.append(_digest(trace.steps[-1], replica.module))
    trace.weights = {n: p.detach().clone() for n, p in replica.module.named_parameters()}
    return trace


def _look(module: nn.Module) -> Step:
    gradients: dict[str, Tensor | None] = {}
    strides: dict[str, tuple[int, ...] | None] = {}
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        dense = gradient is not None and gradient.layout == torch.strided
        strides[name] = gradient.stride() if dense else None
        gradients[name] = None if gradient is None else _dense(gradient.detach())
    return Step(gradients, strides, {n: b.detach().clone() for n, b in module.named_buffers()})


def _dense(gradient: Tensor) -> Tensor:
    """A copy. Entries of a sparse tensor for the same place are added up first, as torch would."""
    return gradient.coalesce().to_dense() if gradient.is_sparse else gradient.clone()


def _digest(step: Step, module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        for tensor in (step.gradients[name], parameter.detach()):
            if tensor is not None:
                flat = tensor.resolve_conj().contiguous().reshape(-1)
                digest.update(flat.view(torch.uint8).numpy().tobytes())
            digest.update(name.encode())
    return digest.hexdigest()
