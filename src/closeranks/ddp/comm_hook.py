"""Communication hooks: how torch's hooks and the user's own exchange a bucket in our place.

Translates between a Bucket and what a hook expects: an object with the methods of torch's
GradBucket, which has no constructor of its own. Must not know when buckets fly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BuiltinCommHookType
from torch._C._distributed_c10d import GradBucket as TorchGradBucket
from torch.futures import Future

from closeranks.errors import HookFailed

if TYPE_CHECKING:
    from closeranks.reducer.bucket import Bucket, SparseBucket
    from closeranks.reducer.flight import Flight
    from closeranks.reducer.waiting import Waiter


class GradBucket:
    """What a hook sees of a bucket; the methods are those of torch.distributed.GradBucket."""

    def __init__(self, bucket: Bucket | SparseBucket, is_last: bool) -> None:
        self._bucket = bucket
        self._buffer = bucket.flat
        self._is_last = is_last

    def index(self) -> int:
        """The position of the bucket in the order of launching."""
        return self._bucket.position

    def buffer(self) -> Tensor:
        """All gradients of the bucket as one flat tensor."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Have another tensor of the same length stand for the gradients."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """A view for each parameter; of the tensor given to set_buffer, once there is one."""
        if self._buffer is self._bucket.flat:
            return list(self._bucket.views)
        pieces = self._buffer.split([p.numel() for p in self._bucket.parameters])
        return [
            piece.as_strided(view.size(), view.stride())
            for piece, view in zip(pieces, self._bucket.views, strict=True)
        ]

    def parameters(self) -> list[Tensor]:
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Whether it is the last bucket of this backward."""
        return self._is_last


class Hook:
    """A registered hook with its state."""

    def __init__(self, state: object, function: Callable[[Any, Any], Future[Any]]) -> None:
        self.state = state
        self.function = function
        self.name = getattr(function, "__qualname__", type(function).__qualname__)
        # Such a hook starts further collectives when the first has ended, in a thread of the
        # group; another bucket must not start its own in between, or ranks would pair them
        # differently. A user's hook says so by an attribute `chained = True`.
        home = getattr(function, "__module__", "")
        self.chained = getattr(function, "chained", home.endswith("powerSGD_hook"))

    def start(self, bucket: Bucket | SparseBucket, is_last: bool) -> Future[Any]:
        """Hand the bucket to the hook; the future ends with the reduced gradients."""
        future = self.function(self.state, GradBucket(bucket, is_last))
        if not isinstance(future, Future | torch._C.Future):
            raise HookFailed(
                f"communication hook {self.name}: returned {type(future).__name__} for bucket "
                f"{bucket.position}, wanted torch.futures.Future[torch.Tensor]. Return "
                "work.get_future() of an async_op=True collective, or a Future with set_result()."
            )
        return future

    def finish(self, flight: Flight, waiter: Waiter, describe: Callable[[Any], str]) -> None:
        """Wait for the future and put what it holds into the bucket."""
        bucket = flight.bucket
        waiter.wait(flight.pending, lambda: f"{describe(bucket)}, hook {self.name}")
        result = flight.pending.value()
        if isinstance(result, list | tuple) and len(result) == 1:
            result = result[0]
        self._check(result, bucket)
        if bucket.sparse:
            bucket.views = [result]
            bucket.flat = result
        elif result.data_ptr() != bucket.flat.data_ptr() or result.dtype != bucket.flat.dtype:
            bucket.flat.copy_(result.view_as(bucket.flat))

    def _check(self, result: object, bucket: Bucket | SparseBucket) -> None:
        wanted = f"a tensor of {bucket.flat.numel()} elements like bucket.buffer()"
        if not isinstance(result, Tensor):
            got = type(result).__name__
        elif result.numel() != bucket.flat.numel() and not bucket.sparse:
            got = f"a tensor of {result.numel()} elements"
        else:
            return
        raise HookFailed(
            f"communication hook {self.name}: the future of bucket {bucket.position} holds {got}, "
            f"wanted {wanted}. No gradient of this bucket was changed. Let the future end with the "
            "reduced buffer."
        )


def check_hook(function: object) -> None:
    """Refuse what cannot be a hook, as torch does, and say what would be."""
    form = "Wanted: def hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]."
    if not callable(function):
        raise TypeError(f"Communication hook must be callable. Got {function!r}. {form}")
    signature = inspect.signature(function)
    if "bucket" not in signature.parameters:
        raise ValueError(f"Communication hook has no argument named `bucket`. {form}")
    bucket = signature.parameters["bucket"].annotation
    if not _means(bucket, inspect.Parameter.empty, TorchGradBucket, GradBucket):
        raise ValueError(
            "Communication hook: bucket annotation should be dist.GradBucket. "
            f"Got {bucket!r}. {form}"
        )
    returned = signature.return_annotation
    if not _means(returned, inspect.Signature.empty, Future[Tensor], Future):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. "
            f"Got {returned!r}. {form}"
        )


def _means(annotation: object, *wanted: object) -> bool:
    """Whether an annotation, perhaps still a string, is one of these."""
    if isinstance(annotation, str):
        name = annotation.replace(" ", "").rsplit("[", 1)[0].rsplit(".", 1)[-1]
        return name in {getattr(w, "__name__", "") for w in wanted} or name == "Future"
    return annotation in wanted


def builtin_hook(kind: BuiltinCommHookType, group: dist.ProcessGroup) -> Hook:
    """What torch's two hooks in C++ do: the mean, in full or in half precision."""
    if kind not in (
        BuiltinCommHookType.ALLREDUCE,
        BuiltinCommHookType.FP16_COMPRESS,
    ):
        raise ValueError(
            f"_register_builtin_comm_hook: got {kind!r}, wanted "
            "dist.BuiltinCommHookType.ALLREDUCE or FP16_COMPRESS."
        )
    half = kind == BuiltinCommHookType.FP16_COMPRESS

    def mean(state: dist.ProcessGroup, bucket: GradBucket) -> Future[Any]:
        buffer = bucket.buffer()
        sent = (buffer.half() if half else buffer).div_(state.size())
        future: Future[Any] = state.allreduce([sent]).get_future()
        return future.then(lambda f: buffer.copy_(f.value()[0]))

    mean.__qualname__ = str(kind)
    return Hook(group, mean)
