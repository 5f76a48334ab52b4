"""Processes that fetch batches ahead for one worker, and die with it.

    worker -> loader   a parcel: step, lane, epoch and samples
    loader -> worker   step, lane, and the batch as a parcel; none if fetching has raised

A parcel is memory of its own that has no name (parcel.py), so nothing is left behind whoever is
killed. What user code changes in a batch, nobody else sees: the next phase of the same step gets it
as it was fetched.

Loaders only help. What they have not begun, the worker fetches itself; what raises in a loader is
fetched once more by the worker, where it raises with a traceback of its own; and a loader that is
killed is started again, but not twice at the same samples.

Knows processes and batches; what a batch is, says data.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from closeranks.lanes import parcel

AHEAD = 2  # batches that each loader has to do
_PDEATHSIG = 1

Key = tuple[int, int]  # step, lane
Fetch = Callable[[int, Sequence[int]], Any]  # epoch, samples


@dataclass(frozen=True)
class Order:
    """A batch to fetch."""

    key: Key
    epoch: int
    samples: Sequence[int]


@dataclass
class Loader:
    """One process, and what it was asked for and has not brought."""

    pid: int
    line: socket.socket
    orders: list[Order] = field(default_factory=list)


class Loaders:
    """The loaders of one worker, for one call of steps()."""

    def __init__(self, count: int, fetch: Fetch, warn: Callable[[str], None]) -> None:
        self._fetch = fetch
        self._warn = warn
        self._fatal: Key | None = None  # what killed a loader
        self._ready: dict[Key, parcel.Parcel | None] = {}  # None: it raised
        self._taken: set[Key] = set()
        self._loaders: list[Loader] = []
        for _ in range(count):
            self._loaders.append(self._start())

    @property
    def pids(self) -> list[int]:
        return [loader.pid for loader in self._loaders]

    def expect(self, orders: Iterable[Order]) -> None:
        """Fetch these ahead, the first first, as far as the loaders are free."""
        self._receive(0.0)
        under_way = {order.key for loader in self._loaders for order in loader.orders}
        waiting = self._ready.keys() - self._taken
        room = AHEAD * len(self._loaders) - len(under_way) - len(waiting)
        known = under_way | self._ready.keys() | self._taken
        for order in orders:
            if room <= 0:
                return
            if order.key not in known:
                self._send(min(self._loaders, key=lambda loader: len(loader.orders)), order)
                room -= 1

    def take(self, order: Order) -> Any:
        """The batch, as nobody has touched it."""
        self._receive(0.0)
        while any(order.key == o.key for loader in self._loaders for o in loader.orders):
            self._receive(0.1)
        self._taken.add(order.key)
        found = self._ready.get(order.key)
        return self._fetch(order.epoch, order.samples) if found is None else found.open()

    def forget_before(self, step: int) -> None:
        """Steps before this one are complete."""
        self._taken = {key for key in self._taken if key[0] >= step}
        for key in [key for key in self._ready if key[0] < step]:
            gone = self._ready.pop(key)
            if gone is not None:
                gone.close()

    def close(self) -> None:
        for loader in self._loaders:
            loader.line.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(loader.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(loader.pid, 0)
        self._loaders = []
        for gone in self._ready.values():
            if gone is not None:
                gone.close()
        self._ready = {}

    # Processes.

    def _start(self) -> Loader:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for loader in self._loaders:
                loader.line.close()
            _live(parent, theirs, self._fetch)
        theirs.close()
        return Loader(pid, ours)

    def _send(self, loader: Loader, order: Order) -> None:
        loader.orders.append(order)
        # A loader that has died is noticed when it is read from.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            _post(loader.line, order.key, (order.epoch, list(order.samples)))

    def _receive(self, timeout_s: float) -> None:
        """Take what has come, and start loaders again that have died."""
        lines = {loader.line.fileno(): loader for loader in self._loaders}
        ready, _, _ = select.select(list(lines), [], [], timeout_s)
        for number in ready:
            loader = lines[number]
            while True:
                try:
                    posted = _collect(loader.line, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    break
                if posted is None:
                    self._replace(loader)
                    break
                key, found = posted
                loader.orders = [order for order in loader.orders if order.key != key]
                self._ready[key] = found

    def _replace(self, dead: Loader) -> None:
        code = 0
        with contextlib.suppress(ChildProcessError):  # User code may have waited for it.
            code = os.waitstatus_to_exitcode(os.waitpid(dead.pid, 0)[1])
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        dead.line.close()
        begun = dead.orders[0] if dead.orders else None
        if begun is not None and begun.key == self._fatal:
            self._loaders.remove(dead)
            raise RuntimeError(
                f"a loader {how} while it fetched samples {_some(begun.samples)}, and so was "
                "another one before it. This worker stops; look at these samples, at the memory "
                "that is left, or use num_workers=0 to see where it happens."
            )
        self._fatal = None if begun is None else begun.key
        self._warn(f"a loader {how}; it is started again")
        self._loaders[self._loaders.index(dead)] = fresh = self._start()
        for order in dead.orders:
            self._send(fresh, order)


def _some(samples: Sequence[int]) -> str:
    shown = ", ".join(map(str, samples[:8]))
    return shown if len(samples) <= 8 else f"{shown}, ... ({len(samples)} in all)"


# Inside a loader.


def _live(parent: int, line: socket.socket, fetch: Fetch) -> NoReturn:
    """Fetch what is asked for until nobody asks any more."""
    try:
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Whoever interrupts means the worker.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            torch.set_num_threads(1)
            while True:
                posted = _collect(line)
                if posted is None:
                    break
                key, order = posted
                assert order is not None, "an order is a parcel"
                epoch, samples = order.open()
                order.close()
                _answer(line, key, fetch, epoch, samples)
    finally:
        os._exit(0)


def _answer(
    line: socket.socket, key: Key, fetch: Fetch, epoch: int, samples: Sequence[int]
) -> None:
    try:
        _post(line, key, fetch(epoch, samples))
    except Exception:  # noqa: BLE001 - the worker fetches it again, where it raises as it should
        line.send(json.dumps([*key, 0]).encode())


# Both sides of the line.


def _post(line: socket.socket, key: Key, value: Any) -> None:
    fd, size = parcel.pack(value)
    try:
        socket.send_fds(line, [json.dumps([*key, size]).encode()], [fd])
    finally:
        os.close(fd)


def _collect(line: socket.socket, flags: int = 0) -> tuple[Key, parcel.Parcel | None] | None:
    """What has come, and None if the other side is gone."""
    try:
        # Not socket.recv_fds: it does not pass the flags on.
        raw, told, _, _ = line.recvmsg(4096, socket.CMSG_SPACE(4), flags | socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None
    if not raw:
        return None
    step, lane, size = json.loads(raw)
    if not told:
        return (step, lane), None
    return (step, lane), parcel.Parcel(int.from_bytes(told[0][2], sys.byteorder), size)
