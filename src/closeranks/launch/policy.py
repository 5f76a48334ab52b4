"""What to do when a worker has failed: the one place where jobs differ. Pure.

An ordinary job cannot go on without one of its workers: it ends, or starts again as a whole if
`--max-restarts` allows it. A job that made a Ranks loses nothing with a worker: that one is
started again, alone.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from closeranks.observe.failure import Failure

RESILIENT_RESTARTS_MAX = 3


class Action(enum.Enum):
    """What the supervisor is to do."""

    END = "end the job"
    RESTART_ALL = "end all workers and start them again"
    RESTART_ONE = "start this worker again, alone"
    GO_ON = "let the others go on without it"


@dataclass(frozen=True)
class Decision:
    """What, and why."""

    action: Action
    reason: str


@dataclass(frozen=True)
class OrdinaryPolicy:
    """All for one: torchrun's rule."""

    restarts_max: int = 0

    def decide(self, failure: Failure, restarts: int) -> Decision:
        """What follows from a failure, after so many restarts of the job."""
        if restarts < self.restarts_max:
            reason = f"restart {restarts + 1} of {self.restarts_max}"
            return Decision(Action.RESTART_ALL, reason)
        reason = "the others cannot go on without it"
        if self.restarts_max:
            reason = f"all {self.restarts_max} restarts are used up"
        return Decision(Action.END, reason)


@dataclass(frozen=True)
class ResilientPolicy:
    """One for itself: the others do its work until it is back."""

    restarts_max: int = RESILIENT_RESTARTS_MAX

    def decide(self, vain: int) -> Decision:
        """What follows from the death of a worker that was restarted so often without a step."""
        if vain < self.restarts_max:
            reason = f"it is started again ({vain + 1} of {self.restarts_max})"
            return Decision(Action.RESTART_ONE, reason)
        if not self.restarts_max:
            return Decision(Action.GO_ON, "--max-restarts is 0, so it is not started again")
        reason = f"it was started again {vain} times and finished no step, so it is given up"
        return Decision(Action.GO_ON, reason)
