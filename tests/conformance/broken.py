"""Ways to break a DistributedDataParallel class. The tests must notice each of them.

Each function takes a working class and returns a subclass with one fault; only public methods are
used, so that it does not matter whose class it is.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_Future = torch.futures.Future[torch.Tensor]


def never_reduces(base: Any) -> Any:
    """Every step is one of no_sync()."""

    class NeverReduces(base):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.require_backward_grad_sync = False
            return super().forward(*args, **kwargs)

    return NeverReduces


def forgets_to_divide(base: Any) -> Any:
    """Gradients are summed and not averaged."""

    def sum_only(group: Any, bucket: dist.GradBucket) -> _Future:
        return _sum(group, bucket.buffer())

    return _with_hook(base, sum_only)


def skips_last_bucket(base: Any) -> Any:
    """The last bucket of a step keeps this rank's own gradients."""

    def all_but_the_last(group: Any, bucket: dist.GradBucket) -> _Future:
        if not bucket.is_last():
            return _sum(group, bucket.buffer().div_(dist.get_world_size(group)))
        own: _Future = torch.futures.Future()
        own.set_result(bucket.buffer())
        return own

    return _with_hook(base, all_but_the_last)


def averages_twice(base: Any) -> Any:
    """Gradients are divided by the number of ranks once too often."""

    def divide_twice(group: Any, bucket: dist.GradBucket) -> _Future:
        return _sum(group, bucket.buffer().div_(dist.get_world_size(group) ** 2))

    return _with_hook(base, divide_twice)


def keeps_own_state(base: Any) -> Any:
    """Parameters and buffers are never taken over from rank 0."""

    class KeepsOwnState(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("broadcast_buffers", None)
            super().__init__(*args, **kwargs | {"init_sync": False, "forward_sync_buffers": False})

    return KeepsOwnState


def merely_forwards(base: Any) -> Any:
    """No DDP at all: a module around the module."""

    class MerelyForwards(torch.nn.Module):
        def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    return MerelyForwards


def hangs(base: Any) -> Any:
    """One rank never comes back from its forward."""

    class Hangs(base):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            while dist.get_rank() == 1:
                time.sleep(60)
            return super().forward(*args, **kwargs)

    return Hangs


BROKEN: dict[str, Callable[[Any], Any]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        never_reduces,
        forgets_to_divide,
        skips_last_bucket,
        averages_twice,
        keeps_own_state,
        merely_forwards,
        hangs,
    )
}


def _sum(group: Any, tensor: torch.Tensor) -> _Future:
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _with_hook(base: Any, hook: Callable[..., _Future]) -> Any:
    class Hooked(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.register_comm_hook(self.process_group, hook)

    return Hooked
