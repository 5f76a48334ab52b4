"""How the launchers of several machines meet, and what they tell each other from then on.

    1. Meet: the first machine listens at the endpoint, the others knock and say how many workers
       they have.
    2. Number: the first gives every machine its number and its first rank, and all of them the
       place where the ranks meet.
    3. Tell: a failure or an end on one machine is heard on all; the first passes on.
    4. Part: nobody leaves before all are done.

JSON lines over TCP, to the endpoint that the user has named and nowhere else. Knows numbers of
workers; must not know how they are started.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from closeranks.launch.channel import Channel, Message
from closeranks.launch.loop import Loop
from closeranks.observe.failure import Failure

_LIMIT_S = 600.0  # as long as torchrun waits
_HELLO_LIMIT_S = 5.0
_SAY_AFTER_S = 2.0
_VERSION = 1


@dataclass(frozen=True)
class Wanted:
    """What a launcher brings to the meeting."""

    endpoint: tuple[str, int]
    nodes: int
    node: int | None  # its number, if the user has given one
    workers: int
    run_id: str


@dataclass
class Membership:
    """One machine's place among the machines."""

    node: int
    nodes: int
    first_rank: int
    size: int  # of the world
    address: str  # where the ranks meet
    port: int
    peers: Peers
    listener: socket.socket | None = None  # on the first machine: rank 0's


@dataclass
class Peers:
    """The other launchers, from one of them."""

    node: int = 0  # our own
    channels: dict[int, Channel] = field(default_factory=dict)  # by node; a guest has node 0 only
    done: set[int] = field(default_factory=set)
    are_all_done: bool = False

    def watch(self, loop: Loop, hear: Callable[[Message], None]) -> None:
        for node, channel in self.channels.items():
            channel.end.setblocking(False)
            loop.watch(channel.fileno(), lambda n=node: self._read(n, loop, hear))  # type: ignore[misc]

    def tell(self, message: Message, but: int | None = None) -> None:
        """To all others: from a guest by way of the first."""
        for node, channel in self.channels.items():
            if node != but and channel.is_open:
                channel.send(message)

    def failed(self, culprit: Failure) -> None:
        """One of our ranks has; the job is over."""
        what = culprit.what.splitlines()[0][:200]
        words = what if culprit.is_bare else f"failed first: {what}"
        why = f"rank {culprit.rank} on {socket.gethostname()} {words}"
        self.tell({"kind": "ended", "why": why, "code": culprit.code})

    def ended(self, why: str, code: int) -> None:
        """Somebody or something else has ended the job here."""
        why = f"{why} on {socket.gethostname()}"
        self.tell({"kind": "ended", "why": why, "code": code})

    def finish(self) -> None:
        """Our own workers have all ended well."""
        if self.node not in self.done:
            self.tell({"kind": "done", "node": self.node})
            self._is_done(self.node)

    def close(self) -> None:
        for channel in self.channels.values():
            with contextlib.suppress(OSError):
                channel.close()

    def _is_done(self, node: int) -> None:
        self.done.add(node)
        if self.node == 0 and self.done >= {0, *self.channels}:
            self.tell({"kind": "all done"})
            self.are_all_done = True

    def _read(self, node: int, loop: Loop, hear: Callable[[Message], None]) -> None:
        channel = self.channels[node]
        while messages := channel.receive():
            for message in messages:
                if message["kind"] == "done":
                    self._is_done(message["node"])
                elif message["kind"] == "all done":
                    self.are_all_done = True
                else:
                    if self.node == 0:
                        self.tell(message, but=node)
                    hear(message)
        if not channel.is_open:
            loop.forget(channel.fileno())
            channel.close()
            if not self.are_all_done:
                hear({"kind": "gone", "node": node})


def meet(wanted: Wanted) -> Membership:
    """Phases 1 and 2. ValueError if the machines cannot come together."""
    listener = None if wanted.node else _listen(wanted)
    if listener is None:
        return _join(wanted)
    with listener:
        return _gather(wanted, listener)


def _listen(wanted: Wanted) -> socket.socket | None:
    """The endpoint's socket, if it is on this machine and free."""
    try:
        return socket.create_server(wanted.endpoint)
    except OSError as error:
        elsewhere = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
        if wanted.node is None and error.errno in elsewhere:
            return None
        raise ValueError(
            f"this is the first machine (--node-rank 0), but it cannot listen at "
            f"{_shown(wanted)}: {os.strerror(error.errno or 0)}. Nothing was started; name an "
            "address of this machine and a free port"
        ) from error


def _gather(wanted: Wanted, listener: socket.socket) -> Membership:
    """The first machine's part."""
    guests: dict[int, tuple[Channel, int]] = {}  # by node: workers
    unnumbered: list[tuple[Channel, int]] = []
    for _ in _attempts(wanted, lambda: wanted.nodes - 1 - len(guests) - len(unnumbered)):
        listener.settimeout(0.2)
        try:
            end, _address = listener.accept()
        except TimeoutError:
            continue
        channel, hello = Channel(end), _hello(end)
        why = _objection(wanted, hello, guests)
        if why:
            channel.send({"kind": "refused", "why": why})
            channel.close()
        elif hello["node"] is None:
            unnumbered.append((channel, hello["workers"]))
        else:
            guests[hello["node"]] = (channel, hello["workers"])
    free = [node for node in range(1, wanted.nodes) if node not in guests]
    guests.update(zip(free, unnumbered, strict=True))
    return _number(wanted, guests)


def _number(wanted: Wanted, guests: dict[int, tuple[Channel, int]]) -> Membership:
    """Everybody has come: who is who, and where the ranks meet."""
    host = wanted.endpoint[0]
    ranks = socket.create_server((host, 0), backlog=socket.SOMAXCONN)
    counts = [wanted.workers] + [guests[node][1] for node in range(1, wanted.nodes)]
    port = ranks.getsockname()[1]
    world = {"kind": "world", "size": sum(counts), "address": host, "port": port}
    for node, (channel, _) in guests.items():
        channel.send(world | {"node": node, "first_rank": sum(counts[:node])})
    peers = Peers(0, {node: channel for node, (channel, _) in guests.items()})
    return Membership(0, wanted.nodes, 0, sum(counts), host, port, peers, ranks)


def _join(wanted: Wanted) -> Membership:
    """A guest's part."""
    for _ in _attempts(wanted, lambda: 1):
        try:
            end = socket.create_connection(wanted.endpoint, timeout=_HELLO_LIMIT_S)
        except OSError:
            time.sleep(0.1)
            continue
        hello = {"kind": "join", "version": _VERSION, "node": wanted.node}
        hello |= {"workers": wanted.workers, "nodes": wanted.nodes, "id": wanted.run_id}
        channel = Channel(end)
        channel.send(hello)
        end.settimeout(_LIMIT_S)
        answer = (channel.receive() or [{"kind": "closed"}])[0]
        if answer["kind"] == "refused":
            raise ValueError(f"the first machine refuses: {answer['why']}. Nothing was started")
        if answer["kind"] == "world":
            peers = Peers(answer["node"], {0: channel})
            place = (answer["node"], wanted.nodes, answer["first_rank"], answer["size"])
            return Membership(*place, answer["address"], answer["port"], peers)
        channel.close()
        time.sleep(0.1)
    raise AssertionError("the attempts end with an error")


def _attempts(wanted: Wanted, missing: Callable[[], int]) -> Iterator[None]:
    """Until nobody is missing, or it takes too long."""
    started, has_said = time.monotonic(), False
    while missing() > 0:
        waited_s = time.monotonic() - started
        what = f"{missing()} of {wanted.nodes} machines did not come to {_shown(wanted)}"
        if waited_s > _LIMIT_S:
            raise ValueError(f"{what} within {_LIMIT_S:.0f} s. Nothing was started")
        if waited_s > _SAY_AFTER_S and not has_said:
            has_said = True
            sys.stderr.write(f"closeranks: {what} yet; waiting\n")
        yield


def _hello(end: socket.socket) -> Message:
    """What somebody says who knocks: anybody may, so nothing is believed."""
    end.settimeout(_HELLO_LIMIT_S)
    try:
        messages = Channel(end).receive()
    except ValueError:
        return {}
    message = messages[0] if messages else {}
    return message if isinstance(message, dict) else {}


def _objection(wanted: Wanted, hello: Message, guests: dict[int, tuple[Channel, int]]) -> str:
    workers, node = hello.get("workers"), hello.get("node")
    if hello.get("version") != _VERSION or not isinstance(workers, int) or workers < 1:
        return "it runs another version of closeranks"
    if hello.get("id") != wanted.run_id:
        return f"--rdzv-id {hello.get('id')} there, {wanted.run_id} here: two jobs, one endpoint"
    if hello.get("nodes") != wanted.nodes:
        return f"--nnodes {hello.get('nodes')} there, {wanted.nodes} here"
    if node is not None and (not isinstance(node, int) or not 0 < node < wanted.nodes):
        return f"--node-rank {node} there; the first machine is 0, others 1 to {wanted.nodes - 1}"
    if node in guests:
        return f"--node-rank {node} has come already"
    return ""


def _shown(wanted: Wanted) -> str:
    return f"{wanted.endpoint[0]}:{wanted.endpoint[1]}"
