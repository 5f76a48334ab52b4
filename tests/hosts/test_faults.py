"""Ranks, hosts and links that fail in the middle of training: every survivor says which, and where.

A rank notes that it has come to the middle of a step; whatever is to happen to the network happens
then. Nobody asks how long training goes on by itself: what a survivor found must come in time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from closeranks.errors import PeerLost, RankAbsent
from tests.hosts.network import Network
from tests.hosts.places import TWO_BY_TWO, hosts, try_on
from tests.process.faults import arm, happened_at_s, kill_at, note_now, stop_at
from tests.process.reference import wrap
from tests.ranks import Outcome

_CLOSED_S_MAX, _SILENT_S_MAX, _STALLED_S_MAX = 5.0, 6.0, 20.0  # measured: see the notebook
_TIMEOUT_S = 60.0
_CHILD_S = 8.0


@dataclass(frozen=True)
class Seen:
    """What a survivor was told, and when."""

    kind: str
    text: str
    rank: int | None
    host: str | None
    at_s: float


def _train_until_it_fails(rank: int, act: str, who: int, folder: str, width: int) -> Seen:
    torch.manual_seed(0)
    net = wrap(nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)), bucket_cap_mb=1)
    data = torch.ones(2, width)
    note = Path(folder) / "note"
    for step in range(100_000):
        if step == 6 and rank == who:
            _arm(act, note)
        try:
            net(data).sum().backward()
        except (PeerLost, RankAbsent) as error:
            host, number = getattr(error, "host", None), getattr(error, "rank", None)
            return Seen(type(error).__name__, str(error), number, host, time.monotonic())
    raise AssertionError("nothing failed")


def _arm(act: str, note: Path) -> None:
    if act == "kill":
        kill_at("before crossing", note)
    elif act == "kill, and leave a child":
        arm("before crossing", lambda: _leave_a_child_and_die(note))
    elif act == "stop":
        stop_at("before crossing", note)
    else:
        arm("before crossing", lambda: note_now(note))


def _leave_a_child_and_die(note: Path) -> None:
    """As a loader's worker is: forked from the rank, it outlives it, for a while."""
    if os.fork() == 0:
        time.sleep(_CHILD_S)
        os._exit(0)
    note_now(note)
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def when_noted(note: Path, act: Callable[[], object]) -> Iterator[list[float]]:
    """Act on the network once a rank is in the middle of a step; yields when that was."""
    at_s: list[float] = []

    def wait_and_act() -> None:
        happened_at_s(note, deadline_s=40.0)
        act()
        at_s.append(time.monotonic())

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    try:
        yield at_s
    finally:
        thread.join()


def _fail(
    network: Network,
    tmp_path: Path,
    on_network: Callable[[], object] = lambda: None,
    act: str = "note",
    who: int = 3,
    host_of: tuple[int, ...] = TWO_BY_TWO,
    timeout_s: float = _TIMEOUT_S,
    width: int = 600,
) -> tuple[list[Outcome], float]:
    """How all ranks ended, and when the fault was there."""
    with when_noted(tmp_path / "note", on_network) as at_s:
        outcomes = try_on(
            network,
            host_of,
            _train_until_it_fails,
            act,
            who,
            str(tmp_path),
            width,
            group_timeout_s=timeout_s,
            deadline_s=90.0,
        )
    return outcomes, at_s[0]


def _judge(outcomes: list[Outcome], since_s: float, within_s: float, *wanted: str) -> list[Seen]:
    found = []
    for outcome in outcomes:
        assert not outcome.failed, outcome.trace
        seen: Seen = outcome.value
        assert seen.kind == "PeerLost", seen
        assert seen.at_s - since_s < within_s, (seen, seen.at_s - since_s)
        for text in wanted:
            assert text in seen.text, seen
        found.append(seen)
    return found


def test_a_rank_that_is_killed_is_named_on_both_hosts(tmp_path: Path) -> None:
    with hosts(2) as network:
        outcomes, since_s = _fail(network, tmp_path, act="kill")
    assert outcomes[3].exitcode == -signal.SIGKILL
    for seen in _judge(outcomes[:3], since_s, _CLOSED_S_MAX, "rank 3", "on host", "10.77.0.2"):
        assert seen.rank == 3 and seen.host is not None and "10.77.0.2" in seen.host


def test_a_child_of_a_rank_that_was_killed_does_not_hold_its_connections(tmp_path: Path) -> None:
    with hosts(2) as network:
        outcomes, since_s = _fail(
            network, tmp_path, act="kill, and leave a child", who=2, host_of=(0, 0, 1)
        )
        for seen in _judge(outcomes[:2], since_s, _CLOSED_S_MAX, "rank 2", "10.77.0.2"):
            assert seen.rank == 2
        for pid in network.processes():
            os.kill(pid, signal.SIGKILL)
        while network.processes():
            time.sleep(0.02)


def test_a_host_whose_processes_are_killed_is_named(tmp_path: Path) -> None:
    with hosts(3) as network:

        def kill_all() -> None:
            for pid in network.processes_of(1):
                os.kill(pid, signal.SIGKILL)

        outcomes, since_s = _fail(
            network, tmp_path, kill_all, host_of=(0, 0, 1, 1, 2, 2), who=4, width=300
        )
    for outcome in outcomes[2:4]:
        assert outcome.exitcode == -signal.SIGKILL
    survivors = outcomes[:2] + outcomes[4:]
    for seen in _judge(survivors, since_s, _CLOSED_S_MAX, "on host", "10.77.0.2"):
        assert seen.rank in (2, 3)


def test_a_host_that_vanishes_is_named_within_seconds(tmp_path: Path) -> None:
    """Its cable is pulled: nobody is told anything, and it hears nobody itself."""
    with hosts(2) as network:
        outcomes, since_s = _fail(network, tmp_path, lambda: network.unplug(1), who=0)
    for seen in _judge(outcomes[:2], since_s, _SILENT_S_MAX, "ranks 2, 3", "10.77.0.2"):
        assert seen.rank == 2
    for seen in _judge(outcomes[2:], since_s, _SILENT_S_MAX, "ranks 0, 1", "10.77.0.1"):
        assert "may be the link of this one" in seen.text


def test_a_link_that_is_taken_down_is_named_on_every_host(tmp_path: Path) -> None:
    with hosts(3) as network:
        outcomes, since_s = _fail(
            network, tmp_path, lambda: network.take_down(2), host_of=(0, 0, 1, 2), who=0, width=300
        )
    for seen in _judge(outcomes[:3], since_s, _SILENT_S_MAX, "rank 3", "10.77.0.3"):
        assert seen.rank == 3
    _judge(outcomes[3:], since_s, _SILENT_S_MAX, "is lost", "may be the link of this one")


def test_an_mtu_that_is_too_small_is_named(tmp_path: Path) -> None:
    with hosts(2) as network:
        outcomes, since_s = _fail(network, tmp_path, lambda: network.narrow(1, 1000), who=0)
    _judge(outcomes, since_s, _STALLED_S_MAX, "MTU", "on host", "small packets")


def test_a_rank_that_is_stopped_is_waited_for_until_the_timeout(tmp_path: Path) -> None:
    """Its kernel answers for it, so it is late and not lost."""
    with hosts(2) as network:

        def let_it_end() -> None:
            time.sleep(9.0)
            for pid in network.processes_of(1):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        outcomes, since_s = _fail(network, tmp_path, let_it_end, act="stop", timeout_s=4.0)
    since_s -= 9.0
    for outcome in outcomes[:3]:
        assert not outcome.failed, outcome.trace
        assert outcome.value.kind == "RankAbsent", outcome.value
        assert outcome.value.at_s - since_s > 3.0, "a rank that is stopped is waited for"
    for outcome in outcomes[1:3]:
        assert "rank 3" in outcome.value.text, outcome.value
