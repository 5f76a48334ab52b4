"""Looks out for ranks and hosts that are lost, while others wait for them, and says what it saw.

A thread looks at the connections of one exchange ten times a second: at those of a mesh that
carries nothing, so that it tells about the other end and never about what is sent, and at those
that carry data. What it finds out about a rank, every other rank finds out by itself.

    a host is silent, or its data stall   all data connections are cut at once, and whoever waits,
                                          for the network or for a rank of its own host, is told
    a rank has cut its connections        it has left a note that says why: this rank does the same
    a rank's connections are closed       ranks that talk to it learn so from gloo. The others'
                                          connections are cut when nothing moves any more: what a
                                          rank sent before it ended may be under way still

Knows meshes, ranks and hosts; must not know what is exchanged.
"""

from __future__ import annotations

import select
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from closeranks.errors import PeerLost
from closeranks.exchange.grid import Grid
from closeranks.exchange.links import Sign
from closeranks.exchange.mesh import Mesh
from closeranks.exchange.notes import Notes
from closeranks.exchange.signs import QUIET_MS, STALLED_MS, Findings, judge
from closeranks.observe import points

_PERIOD_S = 0.1
_ANSWER_S = 3.0
_LINGER_S = 0.7
_TOGETHER_S = 0.02  # ranks of one host that end within so little end together
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR


@dataclass(frozen=True)
class Crowd:
    """Who everybody is."""

    rank: int
    grid: Grid
    names: Sequence[str]  # of hosts, by rank, for people

    def host_of(self, rank: int) -> int:
        return next(n for n, row in enumerate(self.grid.rows) if rank in row)


class Lookout:
    """One rank's view of the others' connections."""

    def __init__(self, crowd: Crowd, watch: Mesh, meshes: Sequence[Mesh], notes: Notes) -> None:
        """`watch` carries nothing, `meshes` carry data; `notes` are for ranks on other hosts."""
        self._crowd = crowd
        self._watch = watch
        self._meshes = meshes
        self._notes = notes
        self._hosts = [crowd.host_of(rank) for rank in range(len(crowd.names))]
        self._own = self._hosts[crowd.rank]
        self._closed_s: dict[int, float] = {}  # when it was noticed, by rank
        self._verdict: PeerLost | None = None
        self._is_cut = False
        self._stop = threading.Event()
        self._lock = threading.Lock()
        for link in watch.links:
            link.probe()
        links = {link.end.fileno(): (link.rank, True) for link in watch.links}
        for mesh in meshes:
            links |= {link.end.fileno(): (link.rank, False) for link in mesh.links}
        reference = weakref.ref(self)  # the thread must not keep the exchange alive
        self._thread = threading.Thread(
            target=_keep_looking,
            args=(reference, self._stop, links),
            name="closeranks-lookout",
            daemon=True,
        )
        self._thread.start()

    def raise_if_lost(self) -> None:
        """For a wait that others will not end: raise if it is known that it is in vain."""
        if self._verdict is not None:
            raise self._again(self._verdict)

    def explain(self, error: RuntimeError) -> RuntimeError:
        """A collective has failed: what is lost, if anything is; otherwise the error itself."""
        is_late = "timed out" in str(error).lower()
        deadline = time.monotonic() + (0.0 if is_late else _ANSWER_S)
        while self._verdict is None:
            found = self._of_closed()
            if found is not None or time.monotonic() >= deadline or self._stop.is_set():
                # Who was closed may have left because of somebody else, and said so.
                return self._notes.read() or found or error
            time.sleep(0.02)
        return self._again(self._verdict)

    def tell(self, error: RuntimeError) -> None:
        """This rank leaves because of an error; nobody is to take it for the cause."""
        self._notes.leave(error)
        if isinstance(error, PeerLost):
            self.cut()

    def cut(self) -> None:
        """Nothing is exchanged any more; whoever waits for this rank is told."""
        with self._lock:
            if not self._is_cut:
                self._is_cut = True
                for mesh in self._meshes:
                    mesh.cut()

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    # The thread's.

    def note_end(self, rank: int, of_process: bool) -> None:
        """A connection has ended: with the process, or because the rank there has cut it."""
        if of_process:
            self._closed_s.setdefault(rank, time.monotonic())
        elif self._verdict is None and not self._is_cut:
            reason = self._notes.read()
            if isinstance(reason, PeerLost):
                self._verdict = reason
                self.cut()

    def look(self) -> None:
        """One look at everything."""
        try:
            signs = self._signs()
        except OSError:  # closed meanwhile
            return
        findings = judge(signs, self._hosts, self._own)
        for rank in findings.closed:
            self.note_end(rank, of_process=True)
        if self._verdict is None and (findings.silent or findings.stalled):
            lost = self._of_silence(findings)
            points.reach("host lost", silent=dict(findings.silent))
            self.tell(lost)
            if not lost.is_silent:  # Others read the note, maybe in this process, before it ends.
                self._stop.wait(_LINGER_S)
            self._verdict = lost
        elif self._closed_s and findings.is_quiet:
            since_s = time.monotonic() - min(self._closed_s.values())
            if since_s * 1000 >= QUIET_MS:
                self.cut()

    def _signs(self) -> list[Sign]:
        signs = self._watch.signs(watches=True)
        for mesh in self._meshes:
            signs += mesh.signs(watches=False)
        return signs

    # Words.

    def _of_silence(self, findings: Findings) -> PeerLost:
        crowd = self._crowd
        if findings.silent:
            host = next(iter(findings.silent))
            ranks = crowd.grid.rows[host]
            name, waited_s = crowd.names[ranks[0]], findings.silent[host] / 1000
            text = (
                f"host {name} with {ranks_named(ranks)} is lost: nothing has come from it for "
                f"{waited_s:.1f} s, not even from its kernel, which was asked every second; the "
                "machine, its link or a switch is down"
            )
            if len(findings.silent) == len(crowd.grid.rows) - 1:
                own = crowd.names[crowd.rank]
                text += f". No other host is heard either: it may be the link of this one, {own}"
            return PeerLost(text, ranks[0], name, is_silent=True)
        rank, waited_ms = next(iter(findings.stalled.items()))
        return PeerLost(
            f"rank {rank} on host {crowd.names[rank]} gets nothing of what rank {crowd.rank} on "
            f"host {crowd.names[crowd.rank]} has sent for {waited_ms / 1000:.1f} s, though its "
            "kernel answers small packets: an MTU on the way between them is too small for what "
            f"is sent, or nearly all packets are lost (given up after {STALLED_MS // 1000} s)",
            rank,
            crowd.names[rank],
        )

    def _of_closed(self) -> PeerLost | None:
        """Whose process ended first; those that followed it did so because of it."""
        if not self._closed_s:
            return None
        crowd, closed_s = self._crowd, dict(self._closed_s)
        first = min(closed_s, key=lambda rank: closed_s[rank])
        row = crowd.grid.row_of(first)
        ranks = [r for r in row if closed_s.get(r, 1e300) - closed_s[first] < _TOGETHER_S]
        verb = "is" if len(ranks) == 1 else "are"
        return PeerLost(
            f"{ranks_named(ranks)} on host {crowd.names[first]} {verb} gone: its connections were "
            "closed, as when a process ends",
            ranks[0],
            crowd.names[first],
        )

    def _again(self, lost: PeerLost) -> PeerLost:
        """An error of its own for everybody who raises it."""
        return PeerLost(str(lost), lost.rank, lost.host, is_silent=lost.is_silent)


def _keep_looking(
    reference: weakref.ref[Lookout], stop: threading.Event, links: dict[int, tuple[int, bool]]
) -> None:
    poll = select.poll()
    for fd in links:
        poll.register(fd, _GONE)
    while not stop.is_set():
        events = poll.poll(_PERIOD_S * 1000)
        lookout = reference()
        if lookout is None:
            return
        for fd, _ in events:
            poll.unregister(fd)
            lookout.note_end(*links[fd])
        lookout.look()
        del lookout


def ranks_named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"
