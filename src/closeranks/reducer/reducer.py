"""The reducer: watches one backward pass and has its gradients averaged while it still runs.

The life of a backward, and the words used below:

    begin   the first gradient of a backward fires; is it local, or is it an exchange?
    fire    a gradient is complete; when all of a bucket have fired, the bucket may fly
    fly     buckets take off strictly in the order of the plan, whoever fires first
    settle  the backward has ended: what did not fire goes as zero, the tail goes with the last
    land    buckets come back in order; .grad becomes the average
    agree   what the tail says is done by all: late increments, a new plan

Every backward ends in one callback of the autograd engine, so nobody has to know which parameters
a graph reaches: what has not fired by then is unused. An exchange is the same on every rank, step
by step; that is why nothing here may depend on what only this rank knows, except when it flies.

The reducer knows parameters by number, in order of registration, frozen ones included. It must
not know modules, constructor arguments or process groups.
"""

from __future__ import annotations

import enum
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from closeranks.errors import CloseranksError
from closeranks.observe.spans import clock_ns
from closeranks.reducer import agreement, extra, remote, tail
from closeranks.reducer.bucket import Bucket, SparseBucket
from closeranks.reducer.flight import Flight
from closeranks.reducer.increments import Increments
from closeranks.reducer.options import Candidate, ReducerOptions
from closeranks.reducer.plan import BucketPlan, make_plan
from closeranks.reducer.scale import Scale
from closeranks.reducer.static_graph import StaticGraph
from closeranks.reducer.stats import Stats

if TYPE_CHECKING:
    from closeranks.exchange.base import Exchange
    from closeranks.reducer.waiting import Waiter

logger = logging.getLogger("closeranks")

_engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
_current_task: Callable[[], int] = torch._C._current_graph_task_id
_current_node: Callable[[], Any] = torch._C._current_autograd_node  # type: ignore[attr-defined]
_will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node  # type: ignore[attr-defined]


class Mode(enum.Enum):
    """What the backward that is under way is for this reducer."""

    IDLE = enum.auto()  # there is none
    LOCAL = enum.auto()  # its gradients stay on this rank
    EXCHANGE = enum.auto()  # they are averaged


class Reducer:
    """Averages the gradients of one replica with those of its peers."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        exchange: Exchange,
        waiter: Waiter,
        options: ReducerOptions,
        wants_sync: Callable[[], bool],
    ) -> None:
        self.candidates = list(candidates)
        self.parameters = [c.parameter for c in self.candidates]
        self.exchange = exchange
        self.waiter = waiter
        self.options = options
        self.stats = Stats()
        self.hook: Any = None  # a comm_hook.Hook, once one is registered
        self.static_graph = StaticGraph(options.static_graph)
        self.scale = Scale(options.average, exchange, waiter)
        self.increments = Increments(self.parameters, options.as_view)
        self.used_counts: list[int] | None = None  # of the planned, in the newest exchange
        self.has_rebuilt_buckets = False
        self.order_observed: list[int] = []  # how gradients fired in the newest exchange
        self.after_exchange: list[Callable[[], object]] = []  # called once, then forgotten
        self.at_end: Callable[[], None] | None = None  # called at the end of every exchange
        self.on_backward_done: Callable[[], None] | None = None  # called before .grad is set
        self.on_error: Callable[[Exception], None] = lambda error: None
        self.is_replaced: Callable[[int], bool] = lambda number: False
        self._wants_sync = wants_sync
        self._handles: dict[int, list[Any]] = {}
        self._accumulators: dict[int, Any] = {}
        self._tracks_increments = options.average is not True
        self._agreement = agreement.Agreement(exchange, waiter)
        self._wait_for_end: set[int] = set()  # fired after their bucket flew in some backward
        self._saw_inner = False
        self._hold = options.hold_first
        self._unfired_checked: tuple[int, ...] = ()
        # Forwards since the last backward, by what they announced.
        self._forwards_sync = self._forwards_local = 0
        self._unsettled_forward = False
        self._forward_context: int | None = None
        self._warned_no_sync = False
        self._tail: Tensor | None = None
        self._adopt(tuple(n for n, p in enumerate(self.parameters) if p.requires_grad), None)
        self._reset()

    # The plan and its hooks.

    def _adopt(self, planned: tuple[int, ...], order: Sequence[int] | None) -> None:
        """Plan anew; memory is allocated when the next backward begins."""
        if self._tail is not None:
            self._tail = self._tail.clone()  # Let go of the memory of the old buckets.
        self.planned = planned
        self._planned_at = {number: i for i, number in enumerate(planned)}
        self.plan: tuple[BucketPlan, ...] = make_plan(
            [self.candidates[n].spec(n) for n in planned], self.options.caps_bytes, order
        )
        self.order = [n for bucket in self.plan for n in bucket.indices]
        self.buckets: list[Bucket | SparseBucket] = []
        self._frozen = [n for n in range(len(self.parameters)) if n not in self._planned_at]
        for number in list(self._handles):
            if number not in self._planned_at:
                self._unhook(number)
        for number in planned:
            if number not in self._handles:
                self._hook(number)

    def _hook(self, number: int) -> None:
        """Have autograd tell us when the gradient of a parameter has been accumulated.

        The hook sits on the node that accumulates, as torch's own reducer has it: this is what
        distributed autograd and torch's mixed precision rely on.
        """
        parameter = self.parameters[number]
        with torch.enable_grad():
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self._accumulators[number] = node
        fire = functools.partial(self._on_gradient, number)
        self._handles[number] = [node.register_hook(fire)]  # type: ignore[union-attr]
        if self._tracks_increments:
            self._hook_before(number)

    def _hook_before(self, number: int) -> None:
        def before(_grad: Tensor) -> None:
            self.increments.set_aside(number)

        self._handles[number].append(self.parameters[number].register_hook(before))

    def _unhook(self, number: int) -> None:
        for handle in self._handles.pop(number, []):
            handle.remove()
        self._accumulators.pop(number, None)

    def unhook_all(self) -> None:
        for number in list(self._handles):
            self._unhook(number)

    def close(self) -> None:
        """The module is no longer wrapped: leave its parameters alone."""
        self.unhook_all()
        self.waiter.close()

    def set_hook(self, hook: Any) -> None:
        """From now on a hook exchanges buckets, and it sees only what is new."""
        if self.mode is not Mode.IDLE:
            raise CloseranksError("a hook is registered inside a backward; do it between steps.")
        self.hook = hook
        self.buckets = []
        if not self._tracks_increments:
            self._tracks_increments = True
            for number in self._handles:
                self._hook_before(number)

    def _allocate(self) -> None:
        """Give the buckets of the plan their memory; the last dense one may carry the tail."""
        if self.buckets:
            return
        last = self.plan[-1]
        carries = self.hook is None and not self.options.skip_unused
        for position, bucket in enumerate(self.plan):
            first = self.candidates[bucket.indices[0]]
            if first.sparse:
                number = bucket.indices[0]
                self.buckets.append(SparseBucket(position, number, self.parameters[number]))
                continue
            tail_count = 0
            if carries and bucket is last and tail.can_carry(first.dtype, self.exchange.size):
                tail_count = tail.tail_length(len(self.planned))
            members = [self.parameters[n] for n in bucket.indices]
            self.buckets.append(
                Bucket(
                    position,
                    bucket.indices,
                    members,
                    first.dtype,
                    self.exchange,
                    tail_count,
                    self.options.batched,
                )
            )
        self._bucket_of: dict[int, Bucket | SparseBucket] = {}
        self._slot_of: dict[int, int] = {}
        for made in self.buckets:
            for slot, number in enumerate(made.numbers):
                self._bucket_of[number] = made
                self._slot_of[number] = slot
        self._ready_buckets()

    def _ready_buckets(self) -> None:
        for bucket in self.buckets:
            bucket.reset()
            if self._wait_for_end and not self._wait_for_end.isdisjoint(bucket.numbers):
                bucket.missing += 1  # This one does not fly before the backward has settled.

    # Begin.

    def note_forward(self, sync: bool, training: bool) -> None:
        """A forward of the module begins; sync: its backward is meant to be an exchange."""
        if self.mode is not Mode.IDLE and _current_task() == -1:
            self._abandon()
        self.stats.forward_began()
        self._forward_context = remote.context_of_thread()
        if sync:
            self._forwards_sync += 1
            self._unsettled_forward = training
        else:
            self._forwards_local += 1

    def _is_local(self) -> bool:
        """A backward is local inside no_sync(), or if every forward since the last one was."""
        if not self.planned:
            return True
        wanted = self._wants_sync()
        forwards_local = self._forwards_local > 0 and self._forwards_sync == 0
        forwards_sync = self._forwards_sync > 0
        local = not wanted or forwards_local
        if (wanted and forwards_local) or (not wanted and forwards_sync):
            self._warn_no_sync_differs()
        if local:
            self._forwards_local = max(0, self._forwards_local - 1)
        else:
            self._forwards_local = 0
        self._forwards_sync = 0
        return local

    def _warn_no_sync_differs(self) -> None:
        if not self._warned_no_sync:
            self._warned_no_sync = True
            logger.warning(
                "no_sync() was around the forward or the backward of a step, but not around both. "
                "Gradients of such a backward stay on this rank and go with the next exchange. "
                "Put both inside `with ddp.no_sync():` or neither. (Said once.)"
            )

    def _enter(self, task: int) -> None:
        """The first sign of a graph task: have its end told to us."""
        self._task = task
        if task in self._tasks:
            return
        self._tasks.add(task)
        _engine.queue_callback(self._on_task_end)
        if self.mode is Mode.IDLE:
            self._begin(self._is_local())

    def _begin(self, local: bool) -> None:
        self._unsettled_forward = False
        if local:
            self.mode = Mode.LOCAL
            return
        self.mode = Mode.EXCHANGE
        self.waiter.exchange_number += 1
        self.stats.backward_began()
        self.order_observed = []
        self._alone = self.exchange.size == 1 and self.hook is None
        if self._alone:
            return
        self._allocate()
        in_backward = _current_task() != -1
        if in_backward and self._forward_context is not None:
            self._remote = remote.context_of_backward(self._forward_context)
        self._last = len(self.buckets) - 1 if not (self._hold or self._remote) else 0
        self.scale.begin(self.hook is not None)
        self.increments.unshow()
        seen_before = self.waiter.exchange_number > 1 and not self._saw_inner
        if self.options.find_unused and in_backward and seen_before:
            self._expect_unused()

    def _expect_unused(self) -> None:
        """Do not wait for parameters that this graph will not reach, as far as it can tell."""
        with torch.profiler.record_function("search_unused_parameters"):
            for number in self.planned:
                if not _will_execute(self._accumulators[number]):
                    self._expected_unused.add(number)
                    self._bucket_of[number].missing -= 1

    # Fire.

    def _on_gradient(self, number: int, *_: object) -> None:
        task = _current_task()
        if task != self._task:
            self._enter(task)
        if self.parameters[number].grad is None and not self._remote:
            return  # The gradient is undefined: the parameter counts as not reached.
        self._used[number] = True
        if self.mode is Mode.LOCAL:
            return
        if self._alone:
            self._fired[number] = True
            return
        bucket = self._bucket_of[number]
        if bucket.position < self._next:
            self._late.add(number)
            return
        if bucket.eager and not self._remote:
            with torch.no_grad():
                bucket.fill_one(self._slot_of[number], self.scale.before)  # type: ignore[union-attr]
        if self._fired[number]:
            return
        self._fired[number] = True
        self.order_observed.append(number)
        if number in self._expected_unused:
            self._expected_unused.discard(number)
            return
        bucket.missing -= 1
        if bucket.missing == 0 and bucket.position == self._next:
            self._fly_ready()

    def on_output_gradient(self, node: Any, _grad: Tensor) -> None:
        """A gradient reached an output of the module: is this a backward that we must settle?

        If it will reach a parameter, that parameter fires and begins. If it will reach none, it
        is either autograd.grad, which stays local, or a backward() in which this rank has nothing
        to give, but in which the others wait for it.
        """
        if self.mode is not Mode.IDLE:
            return
        try:
            if any(map(_will_execute, self._accumulators.values())):
                return
            if _runs_whole_graph(node):
                self._enter(_current_task())
        except RuntimeError:  # The engine's answer for a leaf that autograd.grad asks for.
            return

    # Fly.

    def _fly_ready(self) -> None:
        while self._next < self._last and self.buckets[self._next].missing == 0:
            self._fly(self.buckets[self._next])

    @torch.no_grad()
    def _fly(self, bucket: Bucket | SparseBucket, zeros: bool = False) -> None:
        assert bucket.position == self._next, "buckets fly in the order of the plan"
        self._next += 1
        if zeros:
            bucket.load_zeros()
        else:
            bucket.load(self.scale.before)
        start_ns = clock_ns()
        if self.hook is not None:
            if self.hook.chained and self._flights:
                self.waiter.wait(self._flights[-1].pending, lambda: self.describe(bucket))
            is_last = bucket.position == len(self.buckets) - 1
            pending = self.hook.start(bucket, is_last)
        else:
            pending = self.exchange.all_reduce(bucket.memory, self.scale.during)
        bucket.detach()
        self._flights.append(Flight(bucket, pending, start_ns, self.stats))

    # Settle.

    def _on_task_end(self) -> None:
        """Called by the engine when a graph task has ended."""
        node = _current_node()
        if node is not None:
            # An inner backward has ended inside an outer one (reentrant checkpointing): there is
            # more to come. When the node that ran it is done, watch for the end of the outer one.
            self._saw_inner = True
            node.register_hook(lambda *_: self._enter(_current_task()))
        elif self.mode is Mode.LOCAL:
            if self.on_backward_done is not None:
                self.on_backward_done()
            if self._tracks_increments:
                self.increments.show()
            self._reset()
        elif self.mode is Mode.EXCHANGE:
            self._finish()

    def join_in(self, zeros: bool = False, discard: bool = False) -> None:
        """Take part in one exchange of the others without a backward of one's own."""
        assert self.mode is Mode.IDLE, "a backward is under way"
        self._begin(local=False)
        self._finish(zeros, discard)

    def shadow(self) -> None:
        """Take part with zeros for a rank that has joined; it keeps its own gradients."""
        self.scale.weightless = True
        try:
            self.join_in(zeros=True, discard=True)
        finally:
            self.scale.weightless = False

    @property
    def has_unsettled_forward(self) -> bool:
        """Whether a forward was meant to be exchanged and no backward has followed."""
        return self._unsettled_forward and self.mode is Mode.IDLE

    def settle_forward(self) -> None:
        """The optimizer steps: a forward whose backward never reached us is settled now."""
        if self.has_unsettled_forward:
            self.join_in()

    def _abandon(self) -> None:
        """The last backward was cut short by an exception. Others may wait for us: end it."""
        if self.mode is Mode.EXCHANGE and not self._alone:
            logger.warning(
                "exchange %d: the backward of this rank was cut short by an exception. Its "
                "missing gradients go as zero, so that the other ranks do not wait; the result "
                "is dropped here. Skip a batch on all ranks or on none.",
                self.waiter.exchange_number,
            )
            self._finish(zeros=True, discard=True)
        self._reset()

    def _finish(self, zeros: bool = False, discard: bool = False) -> None:
        """Bring an exchange to its end, whatever state this rank is in."""
        compute_end_ns = clock_ns()
        try:
            if not self._alone:
                with torch.no_grad(), remote.gradients_of(self._remote, self):
                    self._settle(zeros)
                    if self.on_backward_done is not None:
                        self.on_backward_done()
                    self._land(discard)
            elif self.on_backward_done is not None:
                self.on_backward_done()
            if self.at_end is not None and not discard:
                self.at_end()
            self.stats.backward_ended(compute_end_ns)
            self.waiter.attendance.took_part(self.waiter.exchange_number)
            self._check_graph(zeros)
        except RuntimeError as error:
            self.on_error(error)
            raise
        finally:
            self._reset()
            for call in self.after_exchange:
                call()
            self.after_exchange.clear()

    def _settle(self, zeros: bool) -> None:
        """What has not fired goes as zero; the last bucket, or one more exchange, has the tail."""
        self._unfired = [n for n in self.planned if not self._fired[n]]
        for number in self._unfired:
            if self._tracks_increments:
                self.increments.set_aside(number)
            if not zeros:
                self._bucket_of[number].keep(self._slot_of[number])
        used = None if not self._unfired else [self._used[n] for n in self.planned]
        flags = tail.Flags(bool(self._late), self._grads_changed())
        for bucket in self.buckets[self._next :]:
            if self.options.skip_unused and not any(self._used[n] for n in bucket.numbers):
                self._next += 1
                continue
            if bucket.tail.numel():
                tail.write_tail(bucket.tail, used, flags)
            self._fly(bucket, zeros)
        self._tail = self.buckets[-1].tail
        self._tail_alone = not self._tail.numel()
        if self._tail_alone:
            length = tail.tail_length(len(self.planned))
            self._tail = torch.empty(length, dtype=torch.int32, device=self._device)
            tail.write_tail(self._tail, used, flags)

    @property
    def _device(self) -> torch.device:
        return self.parameters[self.planned[0]].device

    def _grads_changed(self) -> bool:
        """Whether a parameter needs a gradient that did not, when the plan was made."""
        return any(self.parameters[n].requires_grad for n in self._frozen)

    # Land.

    def _land(self, discard: bool) -> None:
        late = {n: self.parameters[n].grad for n in self._late}
        unfired = set(self._unfired)
        for flight in self._flights:
            self._wait(flight)
            slots = None
            if unfired and not unfired.isdisjoint(flight.bucket.numbers):
                slots = [s for s, n in enumerate(flight.bucket.numbers) if n not in unfired]
            if not discard:
                flight.bucket.give_back(self.options.as_view, slots)
        assert self._tail is not None, "every exchange has a tail"
        if self._tail_alone:  # Only now: a hook may have started exchanges of its own until here.
            pending = self.exchange.all_reduce(self._tail)
            self.waiter.wait(pending, lambda: "the end of the backward")
        flags = tail.read_flags(self._tail)
        self.used_counts = None
        if discard:
            self._restore_all()
        elif self._unfired:
            self._give_to_unfired()
        if flags.late or flags.grads_changed:
            self._agree_on_changes(late, discard)
        if self._tracks_increments and not discard:
            self.increments.add_back(self.planned)
        self._agree_on_order()

    def _wait(self, flight: Flight) -> None:
        if self.hook is not None:
            self.hook.finish(flight, self.waiter, self.describe)
        else:
            self.waiter.wait(flight.pending, lambda: self.describe(flight.bucket))
        flight.landed()
        self.scale.finish(flight.bucket)

    def read_used_counts(self) -> list[int]:
        """On how many ranks each planned parameter was used in the newest exchange."""
        if self.used_counts is None:
            if self._tail is None:
                self.used_counts = [self.exchange.size] * len(self.planned)
            else:
                unit = 1.0 if self._tail_alone else self.scale.during
                self.used_counts = tail.read_used_counts(self._tail, unit)
        return self.used_counts

    def _give_to_unfired(self) -> None:
        """A parameter unused here gets the average if another rank used it, else keeps .grad."""
        counts = self.read_used_counts()
        flown = {flight.bucket.position for flight in self._flights}
        for number in self._unfired:
            bucket, slot = self._bucket_of[number], self._slot_of[number]
            if bucket.position not in flown:
                continue
            if counts[self._planned_at[number]]:
                bucket.give_back(self.options.as_view, [slot])
            else:
                bucket.restore(slot)

    def _restore_all(self) -> None:
        for flight in self._flights:
            for slot in range(len(flight.bucket.numbers)):
                flight.bucket.restore(slot)

    # Agree.

    def _agree_on_changes(self, late: dict[int, Tensor | None], discard: bool) -> None:
        """Some rank has late increments, or a parameter that needs gradients since a moment ago."""
        self.read_used_counts()  # While the numbers of the plan are those of the tail.
        wanted, late_anywhere = self._agreement.on_changes(self.parameters, self._late)
        new = [n for n in wanted if n not in self._planned_at]
        given = {n: late.get(n) for n in late_anywhere}
        given |= {n: self.parameters[n].grad for n in new}
        scale = self.scale
        if self.hook is not None:  # A hook sees buckets only; what comes late is averaged.
            scale = Scale(True, self.exchange, self.waiter)
            scale.begin(has_hook=False)
        extra.exchange(given, self.parameters, new, self.exchange, self.waiter, scale, discard)
        if new or not late_anywhere <= self._wait_for_end:
            self._wait_for_end |= late_anywhere
            planned = tuple(sorted({*self.planned, *new}))
            order = [n for n in [*self.order, *new] if n not in self._wait_for_end]
            self._adopt(planned, order + sorted(self._wait_for_end))
            self.static_graph.forget()

    def _agree_on_order(self) -> None:
        """After the first exchange that all ranks saw alike, plan in the order they saw."""
        if self.has_rebuilt_buckets:
            return
        if self.options.find_unused and not self.static_graph.expected:
            counts = self.read_used_counts()
            if any(0 < count < self.exchange.size for count in counts):
                return
        self.has_rebuilt_buckets = True
        self._hold = self.options.hold
        observed = [n for n in self.order_observed if n in self._planned_at]
        fired = set(observed)
        mine = observed + [n for n in self.order if n not in fired]
        order = self._agreement.on_order(mine, self._device)
        order = [n for n in order if n not in self._wait_for_end]
        order += sorted(self._wait_for_end)
        if order != self.order:
            self._adopt(self.planned, order)

    # End.

    def _check_graph(self, zeros: bool) -> None:
        if zeros:
            return
        unfired = tuple(n for n in self.planned if not self._fired[n])
        if unfired and unfired != self._unfired_checked:
            self._unfired_checked = unfired
            for number in unfired:
                if self.is_replaced(number):
                    raise agreement.swapped_error(self.candidates[number].name)
        self.static_graph.check([self._used[n] for n in self.planned], self)

    def _reset(self) -> None:
        """Idle, and nothing known of any backward."""
        count = len(self.parameters)
        if getattr(self, "mode", None) is not Mode.LOCAL:
            self._used = [False] * count  # since the last exchange, local backwards included
        self.mode = Mode.IDLE
        self._task = -1
        self._tasks: set[int] = set()
        self._alone = False
        self._remote: int | None = None
        self._fired = [False] * count  # in this backward
        self._late: set[int] = set()
        self._expected_unused: set[int] = set()
        self._unfired: list[int] = []
        self._flights: list[Flight] = []
        self._next = 0
        self._last = 0
        self._ready_buckets()

    def describe(self, bucket: Bucket | SparseBucket) -> str:
        """What an error or a warning says of a bucket."""
        names = [self.candidates[n].name for n in bucket.numbers]
        shown = ", ".join(names[:3]) + (f", ... {names[-1]}" if len(names) > 3 else "")
        size = bucket.size_bytes
        amount = f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size} bytes"
        number = self.waiter.exchange_number
        return f"exchange {number}, bucket {bucket.position} ({shown}; {amount})"


def _runs_whole_graph(node: Any) -> bool:
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
