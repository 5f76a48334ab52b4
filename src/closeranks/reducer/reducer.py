"""The reducer: watches one backward pass and has its gradients averaged while it still runs.

The life of a backward, and the words used below:

    begin   the first gradient of a backward fires; is it local, or is it an exchange?
    fire    a gradient is complete; when all of a bucket have fired, the bucket may fly
    fly     buckets take off strictly in the order of the plan, whoever fires first
    settle  the backward has ended: what did not fire goes as zero, then the tail (`settling`)
    land    buckets come back in order, .grad becomes the average, news are agreed (`landing`)

Every backward ends in one callback of the autograd engine, so nobody has to know which parameters
a graph reaches: what has not fired by then is unused. An exchange is the same on every rank, step
by step; that is why nothing here may depend on what only this rank knows, except when it flies.

The reducer knows parameters by number, in order of registration, frozen ones included. It must
not know modules, constructor arguments or process groups.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from closeranks.errors import CloseranksError
from closeranks.observe.spans import clock_ns
from closeranks.reducer import landing, remote, settling, tail
from closeranks.reducer.agreement import converted_error, swapped_error
from closeranks.reducer.bucket import Bucket, SparseBucket
from closeranks.reducer.fleet import Fleet
from closeranks.reducer.flight import Flight
from closeranks.reducer.forwards import Forwards
from closeranks.reducer.hooks import GradientHooks, runs_whole_graph
from closeranks.reducer.increments import Increments
from closeranks.reducer.options import Candidate, ReducerOptions
from closeranks.reducer.round import Round
from closeranks.reducer.scale import Scale
from closeranks.reducer.static_graph import StaticGraph
from closeranks.reducer.stats import Stats

if TYPE_CHECKING:
    from closeranks.exchange.base import Exchange
    from closeranks.reducer.waiting import Waiter

logger = logging.getLogger("closeranks")

_engine: Any = torch.autograd.Variable._execution_engine
_current_task: Callable[[], int] = torch._C._current_graph_task_id
_current_node: Callable[[], Any] = torch._C._current_autograd_node


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
        self.forwards = Forwards()
        self.fleet = Fleet(self.candidates, exchange, options)
        self.increments = Increments(self.parameters, options.as_view)
        # What is exchanged twice gives the same average again, but only if nothing is lost.
        self.tracks_increments = options.average is not True or not exchange.is_exact
        self.news: tail.News | None = None  # of the newest exchange with others
        self.observed: list[int] = []  # how gradients fired in the newest exchange
        self.has_rebuilt_buckets = False
        # What others want to be told, or to decide.
        self.after_exchange: list[Callable[[], object]] = []  # called once, then forgotten
        self.at_end: Callable[[], None] | None = None  # called at the end of every exchange
        self.on_backward_done: Callable[[], None] | None = None  # called before .grad is set
        self.on_error: Callable[[Exception], None] = lambda error: None
        self.is_replaced: Callable[[int], bool] = lambda number: False
        self._wants_sync = wants_sync
        self._forward_context: int | None = None
        self._saw_inner = False
        self._unfired_checked: list[int] = []
        # One rank has nothing to exchange, but weights are asked for, and sparse gradients come
        # back coalesced, however many ranks there are.
        plain = isinstance(options.average, bool) and not any(c.sparse for c in self.candidates)
        self._may_be_alone = exchange.size == 1 and plain
        self.mode = Mode.IDLE
        self.used = [False] * len(self.parameters)  # since the last exchange
        self._hooks = GradientHooks(self.parameters, self._on_gradient, self.increments.set_aside)
        if self.tracks_increments:
            self._hooks.call_before()
        self.adopt([n for n, p in enumerate(self.parameters) if p.requires_grad], None)
        self._reset()

    @property
    def device(self) -> torch.device:
        """Where small messages between ranks live."""
        return self.parameters[self.fleet.planned[0]].device

    def adopt(self, planned: Sequence[int], order: Sequence[int] | None) -> None:
        """Plan anew; memory is allocated when the next exchange begins."""
        if self.news is not None:
            self.news.release()
        self.fleet.adopt(planned, order)
        self._hooks.watch(self.fleet.planned)

    def set_hook(self, hook: Any) -> None:
        """From now on a hook exchanges buckets, and it sees only what is new."""
        if self.mode is not Mode.IDLE:
            raise CloseranksError("a hook is registered inside a backward; do it between steps.")
        self.hook = hook
        self.fleet.release()
        self.tracks_increments = True
        self._hooks.call_before()

    def unhook(self) -> None:
        """Leave the parameters alone."""
        self._hooks.watch([])

    def close(self) -> None:
        """The module is no longer wrapped."""
        self.unhook()
        self.waiter.close()

    # Begin.

    def note_forward(self, synced: bool, training: bool) -> None:
        """A forward of the module begins; synced: its backward is meant to be an exchange."""
        if self.mode is not Mode.IDLE and _current_task() == -1:
            self._abandon()
        self.stats.forward_began()
        self.static_graph.begin_step()
        self._forward_context = remote.context_of_thread()
        self.forwards.note(synced, training)

    def _enter(self, task: int) -> None:
        """The first sign of a graph task: have its end told to us."""
        self._task = task
        if task in self._tasks:
            return
        self._tasks.add(task)
        _engine.queue_callback(self._on_task_end)
        if self.mode is Mode.IDLE:
            local = self.forwards.backward_is_local(not self._wants_sync())
            self._begin(local or not self.fleet.planned, in_backward=True)

    def _begin(self, local: bool, in_backward: bool) -> None:
        if local:
            self.mode = Mode.LOCAL
            self.forwards.unsettled = False
            return
        self.forwards.exchange_begins()
        self.mode = Mode.EXCHANGE
        self.waiter.exchange_number += 1
        self.stats.backward_began()
        state = self.round
        state.alone = self._may_be_alone and self.hook is None
        if state.alone:
            return
        self.allocate()
        if in_backward and self._forward_context is not None:
            state.remote = remote.context_of_backward(self._forward_context)
        first = not self.has_rebuilt_buckets
        hold = self.options.hold or (self.options.hold_first and first)
        if not hold and state.remote is None:
            state.last = len(self.fleet.buckets) - 1
        self.scale.begin(self.hook is not None)
        self.increments.unshow()
        seen_before = self.waiter.exchange_number > 1 and not self._saw_inner
        if self.options.find_unused and in_backward and seen_before:
            self._expect_unused()

    def allocate(self) -> None:
        """Give the buckets memory, if they have none."""
        by_hook = self.hook is not None
        carries_tail = not by_hook and not self.options.skip_unused and self.exchange.is_exact
        self.fleet.allocate(carries_tail, by_hook)

    def _expect_unused(self) -> None:
        """Do not wait for parameters that this graph will not reach, as far as it can tell."""
        with torch.profiler.record_function("search_unused_parameters"):
            for number in self.fleet.planned:
                if not self._hooks.will_fire(number):
                    self.round.expected_unused.add(number)
                    self.fleet.bucket_of[number].missing -= 1

    # Fire.

    def _on_gradient(self, number: int, *_: object) -> None:
        task = _current_task()
        if task != self._task:
            self._enter(task)
        state = self.round
        if self.parameters[number].grad is None and state.remote is None:
            return  # The gradient is undefined: the parameter counts as not reached.
        self.used[number] = True
        if self.mode is Mode.LOCAL:
            return
        if state.alone:
            state.fired[number] = True
            return
        bucket = self.fleet.bucket_of[number]
        if bucket.position < state.next:
            state.late.add(number)
            return
        if bucket.eager and state.remote is None:
            with torch.no_grad():
                # In view mode each gradient is then there once at any time.
                hand_over = self.options.as_view and not self.tracks_increments
                bucket.fill_one(self.fleet.slot_of[number], self.scale.before, hand_over)
        if state.fired[number]:
            return
        state.fired[number] = True
        state.observed.append(number)
        if number in state.expected_unused:
            state.expected_unused.discard(number)
            return
        bucket.missing -= 1
        if bucket.missing == 0 and bucket.position == state.next:
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
            begins = not self._hooks.any_will_fire() and runs_whole_graph(node)
        except RuntimeError:  # The engine's answer for a leaf that autograd.grad asks for.
            return
        if begins:
            self._enter(_current_task())

    # Fly.

    def _fly_ready(self) -> None:
        state, buckets = self.round, self.fleet.buckets
        while state.next < state.last and buckets[state.next].missing == 0:
            self.fly(buckets[state.next])

    @torch.no_grad()
    def fly(self, bucket: Bucket | SparseBucket, zeros: bool = False) -> None:
        state = self.round
        assert bucket.position == state.next, "buckets fly in the order of the plan"
        state.next += 1
        if zeros:
            bucket.load_zeros()
        else:
            bucket.load(self.scale.before)
        start_ns = clock_ns()
        if self.hook is not None:
            if self.hook.chained and state.flights:
                self.waiter.wait(state.flights[-1].pending, lambda: self.describe(bucket))
            is_last = bucket.position == len(self.fleet.buckets) - 1
            pending = self.hook.start(bucket, is_last)
        else:
            pending = self.exchange.all_reduce(bucket.memory, self.scale.during, bucket.layout)
        bucket.detach()
        state.flights.append(Flight(bucket, pending, start_ns, self.stats))

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
            if self.tracks_increments:
                self.increments.show()
            self._reset()
        elif self.mode is Mode.EXCHANGE:
            self._finish()

    def join_in(self, zeros: bool = False, discard: bool = False) -> None:
        """Take part in one exchange of the others without a backward of one's own."""
        assert self.mode is Mode.IDLE, "a backward is under way"
        self._begin(local=False, in_backward=False)
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
        """Whether a forward was meant to be exchanged and nothing has been."""
        return self.forwards.unsettled and self.mode is Mode.IDLE and bool(self.fleet.planned)

    def _abandon(self) -> None:
        """The last backward was cut short by an exception. Others may wait for us: end it."""
        if self.mode is Mode.EXCHANGE and not self.round.alone:
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
            with torch.no_grad(), remote.gradients_of(self.round.remote, self):
                if not self.round.alone:
                    settling.settle(self, zeros)
                if self.on_backward_done is not None:
                    self.on_backward_done()
                if not self.round.alone:
                    landing.land(self, discard)
            if self.at_end is not None and not discard:
                self.at_end()
            self.stats.backward_ended(compute_end_ns)
            self.waiter.attendance.took_part(self.waiter.exchange_number)
            self.observed = self.round.observed
            if not zeros:
                self._check_graph()
        except RuntimeError as error:
            self.on_error(error)
            raise
        finally:
            self._reset()
            for call in self.after_exchange:
                call()
            self.after_exchange.clear()

    # End.

    def _check_graph(self) -> None:
        """After the exchange, so that no rank waits for one that finds its graph wrong."""
        unfired = [n for n in self.fleet.planned if not self.round.fired[n]]
        if unfired and unfired != self._unfired_checked:
            self._unfired_checked = unfired
            for number in unfired:
                if self.is_replaced(number):
                    raise swapped_error(self.candidates[number].name)
                if self._hooks.is_stale(number):
                    raise converted_error(self.candidates[number].name, self.parameters[number])
        self.static_graph.check([self.used[n] for n in self.fleet.planned], self)

    def _reset(self) -> None:
        """Idle, and nothing known of any backward."""
        count = len(self.parameters)
        if self.mode is not Mode.LOCAL:
            self.used = [False] * count
        self.mode = Mode.IDLE
        self._task = -1
        self._tasks: set[int] = set()
        self.round = Round([False] * count)
        self.fleet.make_ready()

    def used_counts(self) -> list[int]:
        """On how many ranks each planned parameter was used in the newest exchange."""
        if self.news is None:
            return [self.exchange.size] * len(self.fleet.planned)
        return self.news.counts()

    def describe(self, bucket: Bucket | SparseBucket) -> str:
        """What an error or a warning says of a bucket."""
        names = self.fleet.names(bucket.numbers)
        shown = ", ".join(names[:3]) + (f", ... {names[-1]}" if len(names) > 3 else "")
        size = bucket.size_bytes
        amount = f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size} bytes"
        number = self.waiter.exchange_number
        return f"exchange {number}, bucket {bucket.position} ({shown}; {amount})"
