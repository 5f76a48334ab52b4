"""The exception tree: one class for each thing a caller can do about it.

    CloseranksError (RuntimeError)
    +-- ModelMismatch      the ranks built different models: make them equal
    +-- ParameterSwapped   a parameter was replaced after wrapping: wrap again
    +-- HookFailed         a communication hook returned something else than its promise: mend it
    +-- LoopDiverged       workers of a Ranks do different things: mend the script
    +-- LaneDeadly         a lane kills whoever computes it: look at its samples
    +-- LaneUnsteady       a lane has other bits when it is done again: make it deterministic
    +-- WorkersDiffer      workers of a Ranks are not alike: make their conditions or values equal
    +-- CheckpointMismatch a checkpoint is of another training: take its settings, or another folder
    +-- CheckpointDamaged  a checkpoint is not what was written: take another one
    +-- CheckpointInUse    another job writes to the folder: end it, or take another folder
    +-- ExchangeFailed     an exchange between ranks did not end
        +-- RankAbsent     a rank did not come: look at that rank
        |   +-- OutOfData  it left its training loop before the others: use join()
        +-- PeerLost       a rank or its host died: restart the job

Wrong arguments are ValueError or TypeError, as in torch. Every message says what happened, what
was expected, what follows, and what to do next. This file imports nothing.
"""


class CloseranksError(RuntimeError):
    """Anything that closeranks itself has to report."""


class ModelMismatch(CloseranksError):
    """The ranks built different models. Raised on every rank, with the same message."""


class ParameterSwapped(CloseranksError):
    """A parameter that the reducer knows is no longer part of the module."""


class HookFailed(CloseranksError):
    """A communication hook returned something that cannot be a reduced bucket."""


class LoopDiverged(CloseranksError):
    """Workers of a Ranks do different things at the same place. Raised on every worker."""


class LaneDeadly(CloseranksError):
    """Two workers were killed by a signal while they computed the same lane."""


class CheckpointMismatch(CloseranksError):
    """A checkpoint belongs to another training than the one that wants to go on with it."""


class CheckpointDamaged(CloseranksError):
    """A checkpoint is torn, altered, or not one at all."""


class CheckpointInUse(CloseranksError):
    """Another job holds the checkpoint folder."""


class LaneUnsteady(CloseranksError):
    """A lane was done twice by one worker, and had other bits the second time."""


class WorkersDiffer(CloseranksError):
    """Workers of a Ranks compute under different conditions, or hold different values."""


class ExchangeFailed(CloseranksError):
    """An exchange between ranks ended with an error of the process group."""


class RankAbsent(ExchangeFailed):
    """A rank did not come to an exchange before the group's timeout."""


class OutOfData(RankAbsent):
    """A rank left its training loop while others still train."""


class PeerLost(ExchangeFailed):
    """A rank or its host died."""

    def __init__(
        self,
        message: str,
        rank: int | None = None,
        host: str | None = None,
        is_silent: bool = False,
    ) -> None:
        super().__init__(message)
        self.rank = rank  # which, where it is known for sure
        self.host = host  # of it, where ranks are on several
        self.is_silent = is_silent  # its whole host is; whoever is asked there will not answer
