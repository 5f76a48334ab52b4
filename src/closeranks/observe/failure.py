"""How a rank failed, as a value, and which of several failures was the first.

Pure. When one rank fails, its peers lose their connections and fail as well, sometimes noticed
before it. So the order of noticing proves nothing: a failure that only says that a peer is gone
is a *consequence*, and comes after every failure that says something else; among equals the time
of the exception decides, not that of the exit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from closeranks.observe.frames import Frame

_CONSEQUENCES = ("PeerLost", "RankAbsent", "OutOfData", "ConnectionResetError", "BrokenPipeError")
_CONSEQUENCE_TEXT = re.compile(
    r"connection (was )?(closed|reset|refused)|closed by peer|broken pipe|socket closed"
    r"|timed out waiting|failed to recv|recvValue failed|sendBytes failed|wait timeout",
    re.IGNORECASE,
)
_DISTRIBUTED = ("DistNetworkError", "DistBackendError", "DistStoreError", "RuntimeError")


@dataclass(frozen=True)
class Failure:
    """One rank's end that was not meant to be."""

    rank: int
    at_s: float  # on the clock all processes of a host share
    what: str  # "ValueError: bad batch", "was killed by SIGKILL"
    code: int  # of the exit: the process's own, or 128 + signal
    frames: tuple[Frame, ...] = ()
    causes: tuple[str, ...] = ()  # "KeyError: 'x'": what the exception was raised from
    is_consequence: bool = False
    is_bare: bool = False  # there is no exception: `what` is a verb, "was killed by SIGKILL"
    notes: tuple[str, ...] = ()  # what else is known of a bare end


def is_consequence(class_names: Iterable[str], message: str) -> bool:
    """Whether an exception (its class and bases) says no more than that a peer has gone."""
    names = set(class_names)
    if names & set(_CONSEQUENCES):
        return True
    return bool(names & set(_DISTRIBUTED)) and bool(_CONSEQUENCE_TEXT.search(message))


def first_of(failures: Iterable[Failure]) -> Failure:
    """The failure that came before the others, as far as can be told."""
    return min(failures, key=lambda each: (each.is_consequence, each.at_s))
