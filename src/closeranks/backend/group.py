"""A process group of torch.distributed whose ranks, on one host, exchange through shared memory.

It is a c10d group with gloo behind it, and takes from gloo what memory does better: all_reduce,
reduce_scatter, all_gather, broadcast and barrier of plain tensors on the CPU. Whatever is not
overridden here (sends, gathers, scatters, all_to_all), and what memory cannot do
(sparse tensors, types that gloo refuses, wrong arguments), goes to gloo by torch's own way. If the
ranks do not share a host, everything does; the log says why.

Which way a collective takes depends on what all ranks have in common: type, layout and device.
Must not know how ranks meet in memory or how sums are made (exchange).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.autograd.profiler import record_function

from closeranks.backend import collectives
from closeranks.backend.line import Line
from closeranks.backend.tensors import are_plain
from closeranks.backend.untraced import untraced
from closeranks.exchange.choose import gather
from closeranks.exchange.group import GroupExchange
from closeranks.exchange.hosts_passage import HostsPassage
from closeranks.exchange.meshes import Meshes
from closeranks.exchange.passage import Passage
from closeranks.exchange.purpose import FOLDS
from closeranks.exchange.reduction import Fold, is_known

logger = logging.getLogger("closeranks")

# torch's operations by our names for them.
_FOLDS = {getattr(dist.ReduceOp.RedOpType, name.upper()): name for name in FOLDS}
_CPU = torch.device("cpu")
_said: set[tuple[str, str]] = set()  # once is enough, however many groups there are
_GLOO = dist.ProcessGroup.BackendType.GLOO


def create(options: Any) -> CloseranksGroup:
    """What torch.distributed calls in init_process_group and new_group, on every rank of it."""
    gloo = dist.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, timeout=options.timeout
    )
    passage: Passage | HostsPassage | None = None
    reason = "there is one rank"
    if options.group_size > 1:
        by_group = GroupExchange(cast(dist.ProcessGroup, gloo))
        with _CPU:  # whatever the user has made the default
            gathered = gather(by_group, _wait, options.timeout.total_seconds())
        members = options.global_ranks_in_group or range(options.group_size)
        team, reason = gathered.team, gathered.reason
        if team is not None and gathered.is_on_hosts:
            store = PrefixStore("closeranks/hosts", options.store)
            meshes = Meshes(gathered.crowd, gloo, store, by_columns=True, with_flat=False)
            passage = HostsPassage(team, meshes, list(members))
        elif team is not None:
            passage = Passage(team, list(members))
    group = CloseranksGroup(options, gloo, passage)
    level = logging.DEBUG if (group.way, reason) in _said else logging.INFO
    _said.add((group.way, reason))
    name = options.group_id
    logger.log(level, "rank %d of group %s: %s, %s", group.rank(), name, group.way, reason)
    return group


@untraced
class CloseranksGroup(dist.ProcessGroup):
    """torch's ProcessGroup; without a passage, gloo."""

    only_moves_bytes = True  # so door 1 may go past it, through memory of its own

    def __init__(self, options: Any, gloo: Any, passage: Passage | HostsPassage | None) -> None:
        # The one constructor that can be inherited; torch's stubs know only the other.
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._set_default_backend(_GLOO)
        self._register_backend(_CPU, _GLOO, gloo)
        self._gloo = gloo
        self._passage = passage
        self.way = "group: gloo"
        if passage is not None:
            team = passage.team
            self.way = passage.way
            self._line = Line(f"closeranks-{options.group_id}", passage.close)
            self._folds = {op: Fold(team.kernels, name, team.size) for op, name in _FOLDS.items()}

    def getBackendName(self) -> str:
        return "closeranks"

    # Collectives of plain tensors; all else, and what is wrong, by torch's own method to gloo.

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        opts = _options(dist.AllreduceOptions, opts, "reduceOp", timeout)
        fold = self._fold(opts, tensors) if len(tensors) == 1 else None
        if fold is None:
            return super().allreduce(tensors, opts)
        return self._start(collectives.all_reduce, (tensors, fold), opts, tensors)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        opts = _options(dist.AllreduceCoalescedOptions, opts, "reduceOp")
        fold = self._fold(opts, tensors)
        if fold is None:
            return super().allreduce_coalesced(tensors, opts)
        return self._start(collectives.all_reduce, (tensors, fold), opts, tensors)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        opts = _options(dist.BroadcastOptions, opts, "rootRank", timeout)
        right = 0 <= opts.rootRank < self.size() and len(tensors) == 1 and opts.rootTensor == 0
        if not (right and self._moves(tensors)):
            return super().broadcast(tensors, opts)
        return self._start(collectives.broadcast, (tensors[0], opts.rootRank), opts, tensors)

    def barrier(  # type: ignore[override]
        self, opts: Any = None, timeout: timedelta | None = None
    ) -> Any:
        opts = _options(dist.BarrierOptions, opts, "", timeout)
        if not self._moves(()) or (opts.device is not None and opts.device.type != "cpu"):
            return super().barrier(opts)
        return self._start(Passage.barrier, (), opts, [])

    def allgather(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Any:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _options(AllgatherOptions, opts, "", timeout)
        if len(outputs) != 1 or not self._gathers(outputs, inputs):
            return super().allgather(outputs, inputs, opts)
        return self._start(collectives.all_gather, (outputs, inputs), opts, outputs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Here `outputs` has a list for each rank, and not for each input."""
        opts = _options(AllgatherOptions, opts)
        by_input = [list(column) for column in zip(*outputs, strict=False)]
        if not self._gathers(by_input, inputs):
            return super().allgather_coalesced(outputs, inputs, opts)
        return self._start(collectives.all_gather, (by_input, inputs), opts, outputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = _options(AllgatherOptions, opts)
        if not self._gathers_whole([output], [input]):
            return super().all_gather_single(output, input, opts)
        return self._start(collectives.all_gather_whole, ([output], [input]), opts, [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = _options(AllgatherOptions, opts)
        if not self._gathers_whole(outputs, inputs):
            return super().all_gather_single_coalesced(outputs, inputs, opts)
        return self._start(collectives.all_gather_whole, (outputs, inputs), opts, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Any:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _options(dist.ReduceScatterOptions, opts, "reduceOp", timeout)
        fold = None
        if len(outputs) == len(inputs) == 1 and len(inputs[0]) == self.size():
            mine = inputs[0][self.rank()]
            fold = self._fold(opts, [*outputs, *inputs[0]])
            fold = fold if mine.numel() == outputs[0].numel() else None
        if fold is None:
            return super().reduce_scatter(outputs, inputs, opts)
        return self._start(collectives.reduce_scatter, (outputs[0], inputs[0], fold), opts, outputs)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        opts = _options(dist.ReduceScatterOptions, opts, "reduceOp")
        fold = self._fold_of_parts([output], [tensor], opts)
        if fold is None:
            return super().reduce_scatter_single(output, tensor, opts)
        return self._start(
            collectives.reduce_scatter_whole, ([output], [tensor], fold), opts, [output]
        )

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = _options(dist.ReduceScatterOptions, opts, "reduceOp")
        fold = self._fold_of_parts(outputs, inputs, opts)
        if fold is None:
            return super().reduce_scatter_single_coalesced(outputs, inputs, opts)
        return self._start(collectives.reduce_scatter_whole, (outputs, inputs, fold), opts, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    # What can go through memory.

    def _carries(self, tensors: Any) -> bool:
        """Whether there is memory, and these are plain tensors of one type."""
        if self._passage is None or not are_plain(tensors):
            return False
        return len({tensor.dtype for tensor in tensors}) <= 1

    def _moves(self, tensors: Any) -> bool:
        """The same for collectives that reduce nothing: across hosts gloo moves no more."""
        return self._carries(tensors) and not getattr(self._passage, "only_reduces", True)

    def _fold(self, opts: Any, tensors: Any) -> Fold | None:
        """How to reduce these tensors through memory, if that can be done."""
        if not tensors or not self._carries(tensors):
            return None
        fold = self._folds.get(opts.reduceOp.op)
        return fold if fold and is_known(fold.name, tensors[0].dtype) else None

    def _fold_of_parts(self, outputs: Any, inputs: Any, opts: Any) -> Fold | None:
        size = self.size()
        fits = len(outputs) == len(inputs) and all(
            output.numel() * size == tensor.numel()
            for output, tensor in zip(outputs, inputs, strict=True)
        )
        return self._fold(opts, [*outputs, *inputs]) if fits else None

    def _gathers(self, outputs: Any, inputs: Any) -> bool:
        """Whether there is, for each input, an output for each rank, and all can be carried."""
        rank, size = self.rank(), self.size()
        return len(outputs) == len(inputs) and all(
            len(row) == size and row[rank].numel() == tensor.numel() and self._moves([*row, tensor])
            for row, tensor in zip(outputs, inputs, strict=True)
        )

    def _gathers_whole(self, outputs: Any, inputs: Any) -> bool:
        size = self.size()
        return len(outputs) == len(inputs) and all(
            output.numel() == tensor.numel() * size and self._moves([output, tensor])
            for output, tensor in zip(outputs, inputs, strict=True)
        )

    def _start(self, run: Callable[..., None], args: Any, opts: Any, result: Any) -> Any:
        passage = self._passage
        assert passage is not None, "only what the passage carries is started"
        limit = opts.timeout if opts.timeout > timedelta(0) else self._gloo.options._timeout

        def in_turn() -> None:
            passage.team.timeout_s = limit.total_seconds()
            with torch.inference_mode():  # without it, tensors made in it could not be written
                run(passage, *args)

        if not _profiler_enabled():
            return self._line.start(in_turn, result, opts.asyncOp)
        with record_function(f"closeranks:{run.__name__.removesuffix('_whole')}") as span:
            task = self._line.start(in_turn, result, opts.asyncOp)
            span._call_end_callbacks_on_future(task.get_future())  # it ends with the collective
        return task

    # The end.

    def shutdown(self) -> None:
        self._close()
        super().shutdown()

    def abort(self) -> None:
        self._close()
        super().abort()

    def _close(self) -> None:
        if self._passage is not None:
            self._line.close()
            self._passage.close()


def _wait(pending: Any, _: Any) -> None:
    pending.wait()


def _options(kind: Any, given: Any, field: str = "", timeout: timedelta | None = None) -> Any:
    """The options of a collective, given as such, as its one important field, or not at all."""
    if isinstance(given, kind):
        return given
    options = kind()
    if given is not None:
        setattr(options, field, dist.ReduceOp(given) if field == "reduceOp" else given)
    if timeout is not None:
        options.timeout = timeout
    return options
