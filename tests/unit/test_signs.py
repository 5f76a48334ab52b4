"""What follows from the signs of connections: who is gone, who is silent, and who is only slow."""

from __future__ import annotations

import socket
from dataclasses import replace

from closeranks.exchange.links import Link, Sign
from closeranks.exchange.signs import QUIET_MS, SILENT_MS, STALLED_MS, judge

# Ranks 0 and 1 are on this host, 2 and 3 on the next, 4 on a third.
_HOSTS = (0, 0, 1, 1, 2)
_DATA = Sign(2, False, True, heard_ms=50, moved_ms=50, waits_ms=0, unread=0)


def _watch(rank: int, heard_ms: int = 900, is_open: bool = True) -> Sign:
    return Sign(rank, True, is_open, heard_ms, 60_000, 0, 0)


_WELL = [_watch(rank) for rank in (1, 2, 3, 4)]


def test_all_is_well() -> None:
    found = judge([*_WELL, _DATA], _HOSTS, 0)
    assert not found.silent and not found.stalled and not found.closed and not found.is_quiet


def test_a_host_is_silent_if_nothing_comes_on_any_connection() -> None:
    quiet = [_watch(1), _watch(2, SILENT_MS), _watch(3, SILENT_MS + 70), _watch(4)]
    assert judge(quiet, _HOSTS, 0).silent == {1: SILENT_MS}
    assert not judge([*quiet, _DATA], _HOSTS, 0).silent, "it sends data at this moment"
    late = replace(_DATA, heard_ms=SILENT_MS + 5)
    assert judge([*quiet, late], _HOSTS, 0).silent == {1: SILENT_MS}


def test_the_own_host_is_never_silent() -> None:
    assert not judge([_watch(1, 60_000)], _HOSTS, 0).silent


def test_a_connection_that_has_ended_is_not_silent() -> None:
    found = judge([_watch(1), _watch(2, 60_000, is_open=False), _watch(4)], _HOSTS, 0)
    assert found.closed == (2,) and not found.silent


def test_data_stall_where_the_host_answers_and_they_are_not_acknowledged() -> None:
    stuck = replace(_DATA, heard_ms=STALLED_MS, waits_ms=STALLED_MS)
    assert judge([*_WELL, stuck], _HOSTS, 0).stalled == {2: STALLED_MS}
    assert not judge([*_WELL, replace(stuck, waits_ms=0)], _HOSTS, 0).stalled, "idle, or stopped"
    assert not judge([*_WELL, replace(stuck, waits_ms=STALLED_MS - 1)], _HOSTS, 0).stalled
    assert not judge([*_WELL, replace(stuck, rank=1)], _HOSTS, 0).stalled, "it shares this host"
    silent = [_watch(1), _watch(2, 9000), _watch(3, 9000), _watch(4), stuck]
    found = judge(silent, _HOSTS, 0)
    assert found.silent and not found.stalled, "a host that is silent has more than stalled"


def test_data_wait_from_when_they_are_sent_and_not_from_when_something_was_heard() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        end = socket.create_connection(server.getsockname())
    with end:
        link = Link(1, 0, end.fileno(), end)
        assert link.waits_ms(0, 25_000, now_s=100.0) == 0
        assert link.waits_ms(3, 25_000, now_s=100.1) == 0, "sent at this moment"
        assert link.waits_ms(3, 25_100, now_s=100.2) == 100
        assert link.waits_ms(3, 40, now_s=109.0) == 40, "something was acknowledged"
        assert link.waits_ms(3, 9_000, now_s=118.0) == 9_000
        assert link.waits_ms(0, 10, now_s=119.0) == 0
        assert link.waits_ms(1, 9_000, now_s=130.0) == 0


def test_what_moves_or_waits_to_be_read_is_not_quiet() -> None:
    still = replace(_DATA, moved_ms=QUIET_MS)
    assert judge([*_WELL, still], _HOSTS, 0).is_quiet
    assert not judge([*_WELL, replace(still, unread=1)], _HOSTS, 0).is_quiet
    assert not judge([*_WELL, still, _DATA], _HOSTS, 0).is_quiet
