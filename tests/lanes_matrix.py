"""Every fault of a job of Ranks: where, what, how many workers; and few cases that pair all.

The ordinary tests run cases() that hold every pair of two of these once; the chaos tests run all.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass

from tests.lanes_scripts import SCRIPTS
from tests.workers import SLEEP, STOP, Fault, Job, run_job

_EVALUATION = {"place": "evaluate() in the loop over steps() (call 1) at step 5, batch 0"}

# Name: point, facts. Those of a rejoin happen while somebody comes for one that was killed before.
POINTS = {
    "task begun": {"tick": 5},
    "before forward": {"tick": 6},
    "after backward": {"tick": 6},
    "record written": {"tick": 7},
    "fold half written": {"tick": 7},
    "between lanes": {"tick": 8},
    "region half summed": {"tick": 8},
    "complete but not applied": {"tick": 9},
    "boundary": {"number": 3},  # applied by some
    "piece computed": _EVALUATION,
    "giving state": {},
    "state half given": {},
    "taking state": {},
}
LANES = ("before forward", "after backward", "record written", "fold half written", "between lanes")
ALONE = ("task begun", "region half summed")
REJOIN = ("giving state", "state half given", "taking state")
ACTIONS = ("kill", "stop for a while", "stop for ever", "sleep", "kill two", "kill all")
WORKERS = (2, 3, 4)


@dataclass(frozen=True)
class Case:
    """One job to run."""

    point: str
    action: str
    workers: int

    @property
    def script(self) -> str:
        return "mlp" if self.point == "piece computed" else "conv"

    @property
    def is_possible(self) -> bool:
        """One worker at a time gives or takes state; of two workers, two are all.

        A task that has begun is a lane that has (see LANES), and there is one region to sum.
        """
        crowd = self.action in ("kill two", "kill all")
        if self.point in REJOIN and (crowd or self.workers == 2):
            return False
        return self.action != "kill two" or (self.workers > 2 and self.point not in ALONE)

    def faults(self) -> list[Fault]:
        facts = dict(POINTS[self.point])
        if self.point in REJOIN:
            whom = self.workers if self.point == "taking state" else None
            first = Fault("after backward", incarnation=1, count=4)
            return [first, self._fault(facts, incarnation=whom)]
        if self.action == "kill two" and self.point in LANES:
            # At a lane of its own each: two deaths at one lane end the job, as they should.
            return [Fault(self.point, incarnation=k, facts={"lane": 3 * k}) for k in (0, 1)]
        if self.action == "kill two":
            return [Fault(self.point, incarnation=k, count=2) for k in (0, 1)]
        return [self._fault(facts)]

    def _fault(self, facts: dict[str, object], incarnation: int | None = None) -> Fault:
        if self.action == "stop for a while":
            return Fault(self.point, STOP, 0.3, incarnation, facts)
        if self.action == "stop for ever":
            return Fault(self.point, STOP, None, incarnation, facts)
        if self.action == "sleep":
            return Fault(self.point, SLEEP, 0.3, incarnation, facts)
        return Fault(
            self.point, facts=facts, incarnation=incarnation, everybody="all" in self.action
        )

    def __str__(self) -> str:
        return f"{self.point}-{self.action}-{self.workers}"


@functools.cache
def _undisturbed(script: str) -> str:
    return run_job(1, SCRIPTS[script], True).digest


def survive(case: Case) -> Job:
    """Run the script under the faults of a case: they fire, and the bits are the plain loop's."""
    faults = case.faults()
    job = run_job(case.workers, SCRIPTS[case.script], False, faults=faults)
    assert len(job.fired) >= len(faults), job
    assert job.ended is None, job
    assert job.digest == _undisturbed(case.script), job
    return job


def everything() -> list[Case]:
    cases = (Case(*each) for each in itertools.product(POINTS, ACTIONS, WORKERS))
    return [case for case in cases if case.is_possible]


def pairwise() -> list[Case]:
    """Few cases that hold every possible pair of two values."""
    left = everything()
    random.Random(1).shuffle(left)
    wanted = {pair for case in left for pair in _pairs(case)}
    chosen: list[Case] = []
    while wanted:
        best = max(left, key=lambda case: len(wanted & set(_pairs(case))))
        chosen.append(best)
        wanted -= set(_pairs(best))
    return sorted(chosen, key=str)


def _pairs(case: Case) -> Iterable[tuple[object, object]]:
    return itertools.combinations((case.point, case.action, case.workers), 2)
