"""Which format a link deserves: from measured speeds to a format and its reason. Pure.

An exchange of a gradient takes, for each format, about

    bytes / bandwidth  +  messages * latency  +  work

and all formats are compared by that sum. A lossy format must be clearly faster than the exact one,
and one that loses more clearly faster than one that loses less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A format is taken over a more faithful one if it takes at most this fraction of its time.
WORTH = 0.85
# A measurement says something else than the last one if it differs by this factor.
DRIFT = 1.5


@dataclass(frozen=True)
class Link:
    """What was measured between ranks."""

    latency_s: float  # of the smallest collective
    bytes_per_s: float  # that a rank can send


@dataclass(frozen=True)
class Candidate:
    """What one exchange costs in a format."""

    name: str
    bytes_sent: float  # by each rank
    messages: int  # one after the other
    work_s: float  # of encoding and decoding

    def seconds(self, link: Link) -> float:
        return self.bytes_sent / link.bytes_per_s + self.messages * link.latency_s + self.work_s


@dataclass(frozen=True)
class Choice:
    name: str
    reason: str


def choose(candidates: Sequence[Candidate], link: Link) -> Choice:
    """The format to use.

    Args:
        candidates: from the exact one on, each loses more than the one before it.
    """
    exact = best = candidates[0]
    for candidate in candidates[1:]:
        if candidate.seconds(link) <= WORTH * best.seconds(link):
            best = candidate
    times = ", ".join(f"{c.name} {_milliseconds(c.seconds(link))}" for c in candidates)
    where = f"{link.bytes_per_s * 8e-6:.0f} Mbit/s, {_milliseconds(link.latency_s)} latency"
    if best is exact:
        verdict = "no lossy format is clearly faster than exact"
    else:
        ratio = exact.seconds(link) / best.seconds(link)
        verdict = f"{best.name} takes 1/{ratio:.1f} of the time of exact"
    return Choice(best.name, f"{verdict} ({where}; {times})")


def has_drifted(before: Link, now: Link) -> bool:
    """Whether a link is so different that the choice should be made again."""
    ratio = now.bytes_per_s / before.bytes_per_s
    return not 1 / DRIFT <= ratio <= DRIFT


def _milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"
