"""Resilient training, as the user sees it: Ranks.

Knows the script's calls; how they are done together with other workers is told in worker.py,
where a worker is in its script in script.py, and what a step is in steps.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from closeranks.lanes import words as w
from closeranks.lanes.data import Source
from closeranks.lanes.evaluation import Evaluation
from closeranks.lanes.failure import watch
from closeranks.lanes.script import Inside, Script
from closeranks.lanes.seat import take_seat
from closeranks.lanes.seeds import derive, seed_all
from closeranks.lanes.state import Prepared
from closeranks.lanes.steps import Loop, Run, Step
from closeranks.lanes.worker import Worker


class Ranks:
    """The workers of a job, of which this process is one; alone, it is the only one.

    Every global batch is cut into `lanes` parts, whatever the number of workers, and whoever
    computes a lane gets the same bits. So the weights at the end depend on the script, the data,
    `lanes` and `seed`, and not on how many workers there were or which of them died.

    lanes: into how many parts a batch is cut. At least the number of workers that should have work.
    seed: of everything random. Make the Ranks before the model: it seeds all generators.
    threads: of torch in each worker; another number may give other bits.
    """

    def __init__(self, lanes: int = 8, seed: int = 0, threads: int = 1) -> None:
        if not 1 <= lanes <= w.LANES_MAX:
            raise ValueError(
                f"lanes={lanes}: wanted 1 to {w.LANES_MAX}. Nothing was started; a good number is "
                "two to four times the largest number of workers."
            )
        if threads < 1:
            raise ValueError(f"threads={threads}: wanted at least 1. Nothing was started.")
        self.lanes = lanes
        self.seed = seed
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self._prepared = Prepared()
        self._worker = Worker(take_seat(os.environ), self._prepared, seed)
        self._script = Script(self._worker)
        watch(self._worker)
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
        sampler: Iterable[int] | None = None,
        weight: Callable[[Any], float] | None = None,
    ) -> Iterator[Step]:
        """One step for each global batch of batch_size samples, on every worker."""
        source = Source(
            dataset,
            batch_size,
            self.seed,
            shuffle=shuffle,
            drop_last=drop_last,
            collate_fn=collate_fn,
            sampler=sampler,
        )
        loop = Loop(source, epochs, self.lanes, weight, self._after_step)
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

        if self._script.loop is None:
            call = self._script.next_call()
            if self._script.arrive(call, {}) is None:
                return
            self._worker.pieces(f"once() of call {call}", 1, compute, may_repeat=False)
        else:
            self._worker.pieces(f"once() in {self._script.loop}", 1, compute, may_repeat=False)

    def print(self, *values: object, sep: str = " ") -> None:
        """Print one line once in the job, whoever comes here first."""
        where = self._script.loop or f"after call {self._script.call}"
        number = self._prints[where] = self._prints.get(where, 0) + 1
        text = sep.join(map(str, values))
        self._worker.seat.tell(print=text, key=f"{where}, line {number}")

    def digest(self) -> str:
        """sha256 over everything prepared, in hexadecimal. Local."""
        return self._prepared.digest()

    def _after_step(self, call: int, inside: Inside, ends_epoch: bool) -> None:
        """For checkpoints."""
