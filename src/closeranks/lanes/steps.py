"""The loop of a training: one step for each global batch, one phase for each loop over a step.

A step is complete when user code comes back for the next one. Between two steps is a boundary.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from closeranks.errors import CheckpointMismatch
from closeranks.lanes import words as w
from closeranks.lanes.assign import block, cut
from closeranks.lanes.data import Source
from closeranks.lanes.lane import Work
from closeranks.lanes.loaders import Loaders, Order
from closeranks.lanes.script import Inside, Script
from closeranks.lanes.seeds import derive, seed_all
from closeranks.lanes.worker import Worker


@dataclass(frozen=True)
class Loop:
    """The arguments of one call of steps()."""

    source: Source
    epochs: int
    lanes: int
    weigh: Callable[[Any], float] | None
    loaders: int = 0  # processes that fetch for one worker
    check_every: int = 0  # steps, after which a lane is done twice


class Step:
    """One global batch. Looping over it is a phase: it yields this worker's lanes."""

    def __init__(self, run: Run, number: int, epoch: int, samples: list[int]) -> None:
        self.number = number  # from 0, in this call of steps()
        self.epoch = epoch
        self.values: dict[str, float] = {}  # weighted means of what was logged, after a phase
        self._run = run
        self._samples = samples
        self._phases = 0

    def log(self, **values: Any) -> None:
        """Note numbers of the lane that is being computed; step.values has their mean."""
        lane = self._run.worker.lane
        if lane is None:
            raise RuntimeError(
                f"step.log({', '.join(values)}) was called outside of `for batch in step`, where "
                "there is no lane that it could be of. Nothing was logged; call it inside."
            )
        for name, value in values.items():
            lane.values[name] = float(value.detach() if isinstance(value, Tensor) else value)

    def __iter__(self) -> Iterator[Any]:
        phase, self._phases = self._phases, self._phases + 1
        return self._loop(phase)

    def _loop(self, phase: int) -> Generator[Any, None, None]:
        loop = self._run.loop
        lanes = cut(len(self._samples), loop.lanes)

        work = Work(
            place=f"step {self.number}, phase {phase} of call {self._run.call}, "
            f"samples {zlib.crc32(repr(self._samples).encode()):08x}",
            names=(self._run.call, self.number, phase),
            sizes=[hi - lo for lo, hi in lanes],
            fetch=lambda lane, again: self._run.fetch(self.order(lane), again),
            twice=self._run.twice(self.number, len(lanes)),
            weigh=loop.weigh,
        )
        self.values |= yield from self._run.worker.phase(work)

    def order(self, lane: int) -> Order:
        lo, hi = cut(len(self._samples), self._run.loop.lanes)[lane]
        return Order((self.number, lane), self.epoch, self._samples[lo:hi])


class Run:
    """One call of steps(), as one worker goes through it."""

    def __init__(self, script: Script, call: int, loop: Loop) -> None:
        self.script = script
        self.worker: Worker = script.worker
        self.call = call
        self.loop = loop
        self.step: Step | None = None
        self._loaders: Loaders | None = None
        self._compared: dict[str, Any] | None = None  # records of what was done before
        self._inside: Inside = {}  # where this worker is
        self._batches: dict[int, list[list[int]]] = {}  # by epoch

    def __iter__(self) -> Iterator[Step]:
        self.script.refuse_nesting(f"steps() (call {self.call})")
        self._tell_who_stands_by()
        inside: Inside = {"number": 0, "epoch": 0, "index": 0}
        try:
            while True:
                arrived = self.script.arrive(self.call, inside)
                self._compare(is_complete=arrived is None)
                if arrived is None or arrived["epoch"] >= self.loop.epochs:
                    break
                inside = arrived
                number, epoch, index = inside["number"], inside["epoch"], inside["index"]
                batches = self._batches_of(epoch)
                if index >= len(batches):
                    inside = {"number": number, "epoch": epoch + 1, "index": 0}
                    continue
                self._load_ahead(inside)
                yield from self._one(Step(self, number, epoch, batches[index]))
                is_last = index + 1 >= len(batches)
                inside = {"number": number + 1, "epoch": epoch, "index": index + 1}
                if is_last:
                    inside = {"number": number + 1, "epoch": epoch + 1, "index": 0}
                if self.twice(number, 1) is not None and not (self.worker.is_lost or is_last):
                    self.script.compare(f"step {number} of call {self.call}")
                ends_call = is_last and epoch + 1 >= self.loop.epochs
                self.script.after_step(self.call, inside, (is_last, ends_call))
        finally:
            self.step = None
            if self._loaders is not None:
                self._loaders.close()
        seed_all(derive(self.worker.seed, "end", self.call))

    def _one(self, step: Step) -> Iterator[Step]:
        """A step, from its begin to when user code comes back for the next one."""
        self.step = step
        seed_all(derive(self.worker.seed, "before", self.call, step.number))
        self.script.loop = f"the loop over steps() (call {self.call}) at step {step.number}"
        try:
            yield step
        finally:
            self.script.loop = None
        words = self.worker.board.me.words
        words[w.STEPS_DONE] += 1
        words[w.PROGRESS_NS] = time.monotonic_ns()
        self.script.steps_done += 1

    def _compare(self, is_complete: bool) -> None:
        """What an earlier job has begun here is gone on with: it must be the same."""
        records, source = self.script.records, self.loop.source
        if records is self._compared:
            return
        self._compared = records
        now = {"samples": len(source.dataset), "batch_size": source.batch_size}
        was = records.setdefault(f"steps {self.call}", now | {"epochs": self.loop.epochs})
        for name, value in now.items():
            if was[name] != value:
                raise CheckpointMismatch(
                    f"steps() (call {self.call}) was begun with {name} {was[name]}, and is gone on "
                    f"with {name} {value}: its result would be that of neither. Training stopped; "
                    "take the same data and batch_size, or another folder as checkpoint=."
                )
        if is_complete and was["epochs"] != self.loop.epochs:
            self.worker.seat.tell(
                note=f"warning: steps() (call {self.call}) was complete after {was['epochs']} "
                f"epochs; now epochs={self.loop.epochs}, and nothing is trained in it. To train on "
                "from its result, use load() and another folder as checkpoint="
            )

    def _tell_who_stands_by(self) -> None:
        workers = self.worker.board.roster.workers
        samples = min(self.loop.source.batch_size, len(self.loop.source.dataset))
        lanes = len(cut(samples, self.loop.lanes))
        if workers > lanes:
            self.worker.seat.tell(
                note=f"{workers} workers share {lanes} lanes of {samples} samples: "
                f"{workers - lanes} of them stand by, and take over when another one dies. Larger "
                "lanes= or batch_size= would give them work"
            )

    def _batches_of(self, epoch: int) -> list[list[int]]:
        if epoch not in self._batches:
            self._batches = {k: b for k, b in self._batches.items() if k >= epoch - 1}
            self._batches[epoch] = self.loop.source.batches(epoch)
        return self._batches[epoch]

    def twice(self, number: int, lanes: int) -> int | None:
        """The lane that is done twice in this step."""
        every = self.loop.check_every
        return number // every % lanes if every and number % every == 0 else None

    # Batches, here or ahead in loaders.

    def fetch(self, order: Order, again: bool) -> Any:
        """The batch of a lane."""
        if self._loaders is None or again:
            return self._fetch(order.epoch, order.samples)
        batch = self._loaders.take(order)
        self._loaders.expect(self._probable(self._inside))
        return batch

    def _fetch(self, epoch: int, samples: Sequence[int]) -> Any:
        """With one thread, as in a loader: the number of threads may change the bits."""
        threads = torch.get_num_threads()
        if threads == 1:
            return self.loop.source.fetch(epoch, samples)
        torch.set_num_threads(1)
        try:
            return self.loop.source.fetch(epoch, samples)
        finally:
            torch.set_num_threads(threads)

    def _load_ahead(self, inside: Inside) -> None:
        if self.loop.loaders == 0:
            return
        if self._loaders is None:
            note = self.worker.seat.tell
            self._loaders = Loaders(self.loop.loaders, self._fetch, lambda text: note(note=text))
        self._loaders.forget_before(inside["number"])
        self._inside = inside
        self._loaders.expect(self._probable(inside))

    def _probable(self, inside: Inside) -> Iterator[Order]:
        """The lanes that this worker is likely to compute, from a step on."""
        workers, place = self.worker.board.standing()
        number, epoch, index = inside["number"], inside["epoch"], inside["index"]
        while epoch < self.loop.epochs:
            for samples in self._batches_of(epoch)[index:]:
                step = Step(self, number, epoch, samples)
                for lane in block(len(cut(len(samples), self.loop.lanes)), workers, place):
                    yield step.order(lane)
                number += 1
            if self.loop.source.sampler is not None:
                return  # It may be asked only when its epoch begins.
            epoch, index = epoch + 1, 0
