"""Which rank do the others wait for? Pure: what is known of every rank in, a verdict out.

A rank *waits* if it says so (an exchange of ours), if it is in a call of torch.distributed, or if
it has started more collectives than another rank and has not moved since. Whoever has waited for
longer than the limit is *stuck*. A job hangs if somebody is stuck; then the *absent* are

    1. the ranks that do not wait: they compute, sleep, are stopped, do not answer, or have ended;
    2. if all wait, the ranks that have started fewer collectives than others.

If there are neither, all ranks wait for one another in places that do not meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from closeranks.observe.frames import Frame


@dataclass(frozen=True)
class Seen:
    """One rank as it was last seen."""

    rank: int
    pid: int = 0
    has_ended: bool = False  # with exit code 0: failures are not hangs
    is_stopped: bool = False
    is_silent: bool = False  # asked, and did not answer
    wait: tuple[str, float] | None = None  # what an exchange of ours waits for, since when
    call: str | None = None  # of torch.distributed
    unmoved_since_s: float = 0.0  # since when call, groups and stack were as they are
    groups: Mapping[str, int] = field(default_factory=dict)  # collectives started, by group
    span: tuple[str, float] | None = None
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class Hang:
    """Somebody waits in vain."""

    since_s: float
    stuck: tuple[Seen, ...]
    absent: tuple[Seen, ...]

    @property
    def key(self) -> tuple[int, ...]:
        """Equal for two looks at the same hang: whoever is missing, more and more wait for it."""
        return tuple(seen.rank for seen in self.absent or self.stuck)


def judge(ranks: Sequence[Seen], limit_s: float, now_s: float) -> Hang | None:
    """The hang that these ranks are in, if they are in one for so long."""
    most = _most_started(ranks)
    waits = {seen.rank: since for seen in ranks if (since := _waits_since(seen, ranks)) is not None}
    if len(ranks) < 2 or not any(now_s - since >= limit_s for since in waits.values()):
        return None
    # With the first that has waited for so long, those count who came not much later.
    stuck = tuple(s for s in ranks if s.rank in waits and now_s - waits[s.rank] >= limit_s / 2)
    absent = tuple(seen for seen in ranks if seen.rank not in waits)
    if not absent:
        absent = tuple(seen for seen in ranks if _is_behind(seen, most))
    names = {seen.rank for seen in absent}
    stuck = tuple(seen for seen in stuck if seen.rank not in names) or stuck
    return Hang(min(waits[seen.rank] for seen in stuck), stuck, absent)


def where(seen: Seen) -> str:
    """What a rank waits in, in words."""
    if seen.wait is not None:
        return seen.wait[0]
    if seen.call is not None:
        return seen.call
    started = " and ".join(f"collective {n} of {name}" for name, n in seen.groups.items() if n)
    return f"{started or 'a collective'}, the last it has started"


def _waits_since(seen: Seen, ranks: Iterable[Seen]) -> float | None:
    if seen.has_ended or seen.is_stopped or seen.is_silent:
        return None
    if seen.wait is not None:
        return seen.wait[1]
    if seen.call is not None:
        return seen.unmoved_since_s
    others = [other.groups for other in ranks if other.rank != seen.rank]
    ahead = any(
        count > other.get(name, count) for name, count in seen.groups.items() for other in others
    )
    return seen.unmoved_since_s if ahead else None


def _most_started(ranks: Iterable[Seen]) -> dict[str, int]:
    most: dict[str, int] = {}
    for seen in ranks:
        for name, count in seen.groups.items():
            most[name] = max(count, most.get(name, 0))
    return most


def _is_behind(seen: Seen, most: Mapping[str, int]) -> bool:
    return any(count < most[name] for name, count in seen.groups.items())
