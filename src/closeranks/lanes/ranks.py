"""Resilient training, as the user sees it: Ranks.

Knows the script's calls; how they are done together with other workers is told in worker.py,
where a worker is in its script in script.py, and what a step is in steps.py.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from closeranks.lanes import words as w
from closeranks.lanes.data import Source
from closeranks.lanes.durable import Durable, Rhythm
from closeranks.lanes.evaluation import Evaluation
from closeranks.lanes.failure import watch
from closeranks.lanes.likeness import Likeness
from closeranks.lanes.resume import find, made_by
from closeranks.lanes.script import COMPLETE, Script
from closeranks.lanes.seat import take_seat
from closeranks.lanes.seeds import derive, seed_all
from closeranks.lanes.state import Prepared
from closeranks.lanes.steps import Loop, Run, Step
from closeranks.lanes.threads import settle
from closeranks.lanes.worker import Worker


class Ranks:
    """The workers of a job, of which this process is one; alone, it is the only one.

    Every global batch is cut into `lanes` parts, whatever the number of workers, and whoever
    computes a lane gets the same bits. So the weights at the end depend on the script, the data,
    `lanes` and `seed`, and not on how many workers there were or which of them died.

    lanes: into how many parts a batch is cut. At least the number of workers that should have work.
    seed: of everything random. Make the Ranks before the model: it seeds all generators.
    checkpoint: a folder. A job that ended there, however it did, goes on from where it was.
    every: so many steps lie between two checkpoints; None: one at the end of each epoch.
    keep: so many checkpoints are kept.
    threads: of torch in each worker; another number may give other bits.
    check_every: after so many steps one lane is done twice and compared, and so are the workers'
        values; 0: never, except for the values at the end of each epoch.
    """

    def __init__(
        self,
        lanes: int = 8,
        seed: int = 0,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int | None = None,
        keep: int = 3,
        threads: int = 1,
        check_every: int = 0,
    ) -> None:
        if not 1 <= lanes <= w.LANES_MAX:
            raise ValueError(
                f"lanes={lanes}: wanted 1 to {w.LANES_MAX}. Nothing was started; a good number is "
                "two to four times the largest number of workers."
            )
        if threads < 1:
            raise ValueError(f"threads={threads}: wanted at least 1. Nothing was started.")
        if check_every < 0:
            raise ValueError(f"check_every={check_every}: wanted at least 0. Nothing was started.")
        if every is not None and checkpoint is None:
            raise ValueError(
                f"every={every} without checkpoint=: wanted a folder to write to. Nothing was "
                "started; name one, or leave every out."
            )
        rhythm = None if checkpoint is None else Rhythm(Path(checkpoint), every, keep)
        self.lanes = lanes
        self.seed = seed
        self.check_every = check_every
        settle(threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self._prepared = Prepared()
        self._worker = Worker(take_seat(os.environ), self._prepared, seed)
        spare = self.size - lanes
        if spare > 0:
            self._worker.seat.tell(
                note=f"{self.size} workers share {lanes} lanes, so {spare} of them stand by until "
                f"another is lost; Ranks(lanes={self.size}) or more would give all of them work"
            )
        watch(self._worker)
        durable = None if rhythm is None else Durable(self._worker, rhythm, lanes)
        self._told_until = 0 if durable is None else durable.open()
        self._durable = durable
        conditions = made_by() | {"lanes": lanes, "seed": seed}
        likeness = Likeness(self._worker.records, self._prepared, conditions)
        self._script = Script(self._worker, likeness, durable)
        if durable is not None:
            weakref.finalize(self, durable.finish)  # At the end of the script, or of this object.
        self._prints: dict[str, int] = {}
        self._run: Run | None = None
        seed_all(derive(seed, "start"))

    @property
    def rank(self) -> int:
        """The number of this worker. Do not decide by it: worker 0 may be the one that dies."""
        return self._worker.seat.worker

    @property
    def size(self) -> int:
        """How many workers the job was started with."""
        return self._worker.board.roster.workers

    @property
    def state(self) -> dict[str, Any]:
        """Values of your own (numbers, strings, tensors, containers) that travel with the rest."""
        return self._prepared.state

    def prepare(self, *objects: Any) -> Any:
        """Take modules, optimizers, schedulers, or whatever has state_dict(); returns them."""
        for thing in objects:
            self._prepared.add(thing)
        return objects[0] if len(objects) == 1 else objects

    def steps(
        self,
        dataset: Any,
        batch_size: int,
        epochs: int = 1,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        sampler: Iterable[int] | None = None,
        weight: Callable[[Any], float] | None = None,
    ) -> Iterator[Step]:
        """One step for each global batch of batch_size samples, on every worker.

        num_workers: processes that fetch ahead, for each worker.
        weight: how much a lane's mean counts, given its batch; by default its number of samples.
        """
        if num_workers < 0:
            raise ValueError(f"num_workers={num_workers}: wanted at least 0. Nothing was trained.")
        source = Source(
            dataset,
            batch_size,
            self.seed,
            shuffle=shuffle,
            drop_last=drop_last,
            collate_fn=collate_fn,
            sampler=sampler,
        )
        loop = Loop(source, epochs, self.lanes, weight, num_workers, self.check_every)
        self._run = Run(self._script, self._script.next_call(), loop)
        return iter(self._run)

    def evaluate(
        self, dataset: Any, batch_size: int, fn: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """The sums over the whole dataset of what fn(batch) returns, each sample exactly once.

        Modules are in evaluation mode meanwhile, and no gradients are recorded. The same on every
        worker, in whatever way the batches were shared.
        """
        source = Source(dataset, batch_size, derive(self.seed, "evaluate"))
        return Evaluation(self._script, source, fn).run()

    def once(self, fn: Callable[[], object]) -> None:
        """Call fn on one worker only, once in the job, at this point of the script.

        The others wait. If that worker dies before fn has returned, another one calls it again.
        """

        def compute(_: int) -> str:
            fn()
            return ""

        script = self._script
        if script.loop is not None:
            place = f"once() in {script.loop}"
            self._worker.pieces(place, 1, compute, may_repeat=False)
            seed_all(derive(self.seed, "end", place))
            return
        call = script.next_call()
        place = f"once() of call {call}"
        if script.arrive(call, {}) is not None:
            self._worker.pieces(place, 1, compute, may_repeat=False)
            script.complete(call)
        seed_all(derive(self.seed, "end", place))  # fn may have drawn numbers, on one worker.

    def print(self, *values: object, sep: str = " ") -> None:
        """Print one line once in the job, whoever comes here first."""
        if self._script.loop is None and self._script.call < self._told_until:
            return  # An earlier job has printed it.
        where = self._script.loop or f"after call {self._script.call}"
        number = self._prints[where] = self._prints.get(where, 0) + 1
        text = sep.join(map(str, values))
        self._worker.seat.tell(print=text, key=f"{where}, line {number}")

    def digest(self) -> str:
        """sha256 over everything prepared, in hexadecimal. Local."""
        return self._prepared.digest()

    def save(self) -> None:
        """Write a checkpoint now: inside a loop over steps() at the end of this step.

        Outside of it all workers wait until the checkpoint is durable, or cannot be written.
        """
        script, durable = self._script, self._durable
        if durable is None:
            raise ValueError(
                "save() was called, but this Ranks has no folder for checkpoints. Nothing was "
                "written; make it as Ranks(checkpoint=FOLDER)."
            )
        if script.loop is not None:
            durable.ask()
            return
        call = script.next_call()
        if script.arrive(call, {}) is None:
            return
        capture = functools.partial(script.capture, call, COMPLETE)
        steps = script.steps_done

        def compute(_: int) -> str:
            return durable.write_now(capture, steps, call)

        self._worker.pieces(f"save() of call {call}", 1, compute, may_repeat=False)
        script.complete(call)

    def load(self, path: str | os.PathLike[str]) -> int:
        """Load what a checkpoint says of everything prepared; returns after how many steps it was.

        path: a folder that was given as checkpoint=, of which the newest is taken, or one of the
        folders in it. Less may be prepared than when it was written, like a model alone. Only the
        state is loaded: training goes on from where this script is, at its start.
        """
        if self._script.loop is not None or self._script.call:
            raise RuntimeError(
                "load() was called after other calls on this Ranks. Nothing was loaded; call it "
                "after prepare() and before everything else."
            )
        found = find(Path(path))
        self._prepared.restore_known(found.tree["prepared"], str(found.path))
        return int(found.facts["steps"])
