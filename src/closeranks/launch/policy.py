"""What to do when a worker has failed: the one place where jobs differ. Pure.

An ordinary job cannot go on without one of its workers: it ends, or starts again as a whole if
`--max-restarts` allows it. A job that survives the loss of a worker brings another policy, which
answers RESTART_ONE; the supervisor knows what to do with each answer and asks nothing else.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from closeranks.observe.failure import Failure


class Action(enum.Enum):
    """What the supervisor is to do."""

    END = "end the job"
    RESTART_ALL = "end all workers and start them again"
    RESTART_ONE = "start this worker again, alone"


@dataclass(frozen=True)
class Decision:
    """What, and why."""

    action: Action
    reason: str


class DeathPolicy(Protocol):
    """The seam: one question."""

    def decide(self, failure: Failure, restarts: int) -> Decision:
        """What follows from a failure, after so many restarts (of that worker, or of the job)."""


@dataclass(frozen=True)
class OrdinaryPolicy:
    """All for one: torchrun's rule."""

    restarts_max: int = 0

    def decide(self, failure: Failure, restarts: int) -> Decision:
        if restarts < self.restarts_max:
            reason = f"restart {restarts + 1} of {self.restarts_max}"
            return Decision(Action.RESTART_ALL, reason)
        reason = "the others cannot go on without it"
        if self.restarts_max:
            reason = f"all {self.restarts_max} restarts are used up"
        return Decision(Action.END, reason)
