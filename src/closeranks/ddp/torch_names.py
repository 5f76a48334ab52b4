"""The reducer under the names by which torch and its companions reach it.

Pipelining, mixed precision, overlapped optimizers and tests call methods of `ddp.reducer` that
torch binds from C++. Each is one or two lines over our reducer; what has no meaning here says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from closeranks.ddp.comm_hook import GradBucket
from closeranks.reducer.bucket import Bucket
from closeranks.reducer.reducer import Mode, Reducer


class TorchNamedReducer(Reducer):
    """Our reducer with torch's method names."""

    def _autograd_hook(self, number: int) -> None:
        self._on_gradient(number)

    def _get_local_used_map(self) -> Tensor:
        return torch.tensor(self.used_counts(), dtype=torch.int32)

    def _ddp_graph_static(self) -> bool:
        return self.static_graph.unchanged

    def _rebuild_buckets(self) -> bool:
        """Buckets are rebuilt at the end of an exchange; there is nothing left to do."""
        return False

    def _push_all_rebuilt_params(self) -> None:
        """See _rebuild_buckets."""

    def prepare_for_forward(self) -> None:
        """Nothing to prepare: hooks are always armed."""

    def prepare_for_backward(self, outputs: list[Tensor]) -> None:
        """Nothing to prepare: hooks are always armed, and no graph is searched."""

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        self.allocate()
        zeros = []
        for bucket in self.fleet.buckets:
            if isinstance(bucket, Bucket):
                seen = GradBucket(bucket, bucket.position == len(self.fleet.buckets) - 1)
                seen.set_buffer(torch.zeros_like(bucket.flat))
                zeros.append(seen)
        return zeros

    def _run_allreduce_hook(self, bucket: GradBucket) -> Future[Any]:
        """The sum of the bucket over all ranks, not divided."""
        buffer = bucket.buffer()
        pending: Any = self.exchange.all_reduce(buffer)
        future: Future[Any]
        if hasattr(pending, "get_future"):
            future = pending.get_future()
            return future
        self.waiter.wait(pending, lambda: f"bucket {bucket.index()}")
        future = Future()
        future.set_result([buffer])
        return future

    def _run_comm_hook(self, bucket: GradBucket) -> Future[Any]:
        if self.hook is None:
            return self._run_allreduce_hook(bucket)
        future: Future[Any] = self.hook.function(self.hook.state, bucket)
        return future

    def _set_forward_pass_work_handle(self, work: Any, by_initial_size: bool) -> None:
        self.scale.expect_joined(work, by_initial_size)

    def _install_post_backward_futures(self, futures: list[Future[Any]]) -> None:
        for future in futures:
            self.after_exchange.append(future.wait)

    def _check_reducer_finalized(self) -> None:
        if self.mode is not Mode.IDLE:
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration before starting a new "
                "one: a backward pass of this rank is still under way or was cut short by an "
                "exception. Run forward and backward to their end first."
            )

    def _remove_autograd_hooks(self) -> None:
        self.unhook()

    def _set_static_graph(self) -> None:
        self.static_graph.expected = True

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        """Gradients of any dtype are converted on their way into a bucket."""

    def _set_sparse_metadata(self, metadata: dict[str, Tensor]) -> None:
        raise NotImplementedError(
            "Sparse gradients are exchanged with their own indices; there is no metadata to set. "
            "Leave out the call of _set_sparse_metadata()."
        )

    def get_backward_stats(self) -> list[int]:
        """When each planned parameter's gradient fired is not kept; see `stats.spans`."""
        raise NotImplementedError("Use ddp.reducer.stats.spans: when buckets were exchanged.")
