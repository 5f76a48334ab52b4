"""The loop of a training: one step for each global batch, one phase for each loop over a step.

A step is complete when user code comes back for the next one. Between two steps is a boundary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from closeranks.lanes import words as w
from closeranks.lanes.assign import cut
from closeranks.lanes.data import Source
from closeranks.lanes.script import Inside, Script
from closeranks.lanes.seeds import derive, seed_all
from closeranks.lanes.worker import Work, Worker


@dataclass(frozen=True)
class Loop:
    """The arguments of one call of steps()."""

    source: Source
    epochs: int
    lanes: int
    weigh: Callable[[Any], float] | None


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

        def fetch(lane: int) -> Any:
            lo, hi = lanes[lane]
            return loop.source.fetch(self.epoch, self._samples[lo:hi])

        work = Work(
            place=f"step {self.number}, phase {phase} of call {self._run.call}",
            names=(self._run.call, self.number, phase),
            sizes=[hi - lo for lo, hi in lanes],
            fetch=fetch,
            weigh=loop.weigh,
        )
        self.values |= yield from self._run.worker.phase(work)


class Run:
    """One call of steps(), as one worker goes through it."""

    def __init__(self, script: Script, call: int, loop: Loop) -> None:
        self.script = script
        self.worker: Worker = script.worker
        self.call = call
        self.loop = loop
        self.step: Step | None = None

    def __iter__(self) -> Iterator[Step]:
        script, words = self.script, self.worker.board.me.words
        script.refuse_nesting(f"steps() (call {self.call})")
        inside: Inside = {"number": 0, "epoch": 0, "index": 0}
        batches: list[list[int]] = []
        epoch_of_batches = -1
        while True:
            arrived = script.arrive(self.call, inside)
            if arrived is None or arrived["epoch"] >= self.loop.epochs:
                break
            inside = arrived
            number, epoch, index = inside["number"], inside["epoch"], inside["index"]
            if epoch != epoch_of_batches:
                batches, epoch_of_batches = self.loop.source.batches(epoch), epoch
            if index >= len(batches):
                inside = {"number": number, "epoch": epoch + 1, "index": 0}
                continue
            seed_all(derive(self.worker.seed, "before", self.call, number))
            self.step = Step(self, number, epoch, batches[index])
            script.loop = f"the loop over steps() (call {self.call}) at step {number}"
            try:
                yield self.step
            finally:
                script.loop = None
            self.step = None
            words[w.STEPS_DONE] += 1
            words[w.PROGRESS_NS] = time.monotonic_ns()
            script.steps_done += 1
            is_last = index + 1 >= len(batches)
            inside = {"number": number + 1, "epoch": epoch, "index": index + 1}
            if is_last:
                inside = {"number": number + 1, "epoch": epoch + 1, "index": 0}
            ends_call = is_last and epoch + 1 >= self.loop.epochs
            script.after_step(self.call, inside, (is_last, ends_call))
        self.step = None
        seed_all(derive(self.worker.seed, "end", self.call))
