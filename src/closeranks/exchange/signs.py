"""What follows from the signs of connections: which ranks are gone, which hosts silent. Pure.

    closed    a connection has ended: the other end's process has, or its kernel said so
    silent    nothing came from a host for a while, though its kernel was asked every second. One
              that sends data at this moment has better things to do than to answer: all of its
              connections count
    stalled   data are not acknowledged though the host answers: small packets pass, others do not

A rank that is stopped or slow is none of them: its kernel answers for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from closeranks.exchange.links import Sign

SILENT_MS = 1600  # healthy hosts are heard every second
STALLED_MS = 8000
QUIET_MS = 1000  # what has not moved for so long will not move


@dataclass(frozen=True)
class Findings:
    """What is wrong at a moment."""

    silent: Mapping[int, int]  # hosts, with the milliseconds since they were heard
    stalled: Mapping[int, int]  # ranks, likewise
    closed: tuple[int, ...]  # ranks
    is_quiet: bool  # no data have moved, and none wait to be read


def judge(signs: Sequence[Sign], host_of: Sequence[int], own: int) -> Findings:
    """From all connections of this process, which is on host `own`."""
    silent, stalled = {}, {}
    closed = {sign.rank for sign in signs if sign.watches and not sign.is_open}
    for host in sorted({host_of[sign.rank] for sign in signs} - {own}):
        here = [sign for sign in signs if host_of[sign.rank] == host]
        heard_ms = min(sign.heard_ms for sign in here)
        if heard_ms >= SILENT_MS and any(sign.watches and sign.is_open for sign in here):
            silent[host] = heard_ms
    for sign in signs:
        waits_ms = sign.waits_ms if sign.is_open and not sign.watches else 0
        if waits_ms >= STALLED_MS and host_of[sign.rank] not in (own, *silent):
            stalled[sign.rank] = waits_ms
    data = [sign for sign in signs if not sign.watches]
    return Findings(
        silent=silent,
        stalled=stalled,
        closed=tuple(sorted(closed)),
        is_quiet=all(sign.moved_ms >= QUIET_MS and not sign.unread for sign in data),
    )
