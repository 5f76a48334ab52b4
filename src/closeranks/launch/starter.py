"""Two ways to make worker processes: fork them from a warm server, or start each one anew.

Both hand the worker the same descriptors and the same job, and both make it the launcher's own
child. Knows processes; must not know what a job is.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from closeranks.launch import kernel
from closeranks.launch.channel import Channel, Message
from closeranks.launch.worker import ERR, OUT

_GOT_LIMIT_S = 30.0


@dataclass(frozen=True)
class Order:
    """One worker to start: its job, and the descriptors that become its own."""

    job: Message
    fds: tuple[int, ...]
    control: Channel  # the launcher's end; a worker started anew reads its job from it


class Starter(Protocol):
    """The seam between the two."""

    def start(self, orders: Sequence[Order], report: Callable[[int, int], None]) -> None:
        """Start them, now or soon; report(rank, pid) for each. Closes the orders' descriptors."""

    def cancel(self) -> list[int]:
        """Start nobody more; returns the ranks that were still to be started."""

    def close(self) -> None:
        """The end of it."""


class ExecStarter:
    """A Python of its own for each worker, for what must not be forked (CUDA)."""

    def start(self, orders: Sequence[Order], report: Callable[[int, int], None]) -> None:
        for order in orders:
            listed = ",".join(map(str, order.fds))
            command = [sys.executable, "-m", "closeranks.launch.worker", listed, kernel.PADDING]
            environ = os.environ | order.job["env"]
            process = subprocess.Popen(
                command,
                stdin=workers_stdin(),
                stdout=order.fds[OUT],
                stderr=order.fds[ERR],
                pass_fds=order.fds,
                env=environ,
                process_group=0,
            )
            for fd in order.fds:
                os.close(fd)
            order.control.send(order.job)
            report(order.job["rank"], process.pid)
            process.returncode = 0  # The launcher waits for its children by itself.

    def cancel(self) -> list[int]:
        return []

    def close(self) -> None:
        pass


class ForkStarter:
    """One server, started at once, so that it warms up while the launcher does other things."""

    def __init__(self, modules: Sequence[str], environ: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self._noise, writing = os.pipe()
        names = ",".join(modules)
        command = [sys.executable, "-m", "closeranks.launch.server", str(theirs.fileno())]
        process = subprocess.Popen(
            [*command, str(os.getpid()), names, kernel.PADDING],
            stdin=workers_stdin(),
            stdout=writing,
            stderr=writing,
            pass_fds=[theirs.fileno()],
            env=os.environ | environ,
            process_group=0,  # A Ctrl-C on the terminal is the launcher's business.
        )
        os.close(writing)
        theirs.close()
        process.returncode = 0  # The launcher waits for its children by itself.
        self.pid = process.pid
        self.channel = Channel(ours)
        self.noise = self._noise  # what the server itself has to say, to be watched by the launcher
        self._is_ready = False
        self._waiting: list[Order] = []
        self._report: Callable[[int, int], None] = lambda rank, pid: None

    def start(self, orders: Sequence[Order], report: Callable[[int, int], None]) -> None:
        self._report = report
        self._waiting += orders
        if self._is_ready:
            self._send()

    def heard(self) -> None:
        """The server has said something."""
        for message in self.channel.receive():
            self._take(message)
        if self._is_ready and self._waiting:
            self._send()

    def _take(self, message: Message) -> bool:
        """Whether it was the answer to an order; other news may come before it."""
        if message["kind"] == "ready":
            self._is_ready = True
        elif message["kind"] == "started":
            for rank, pid in message["pids"]:
                self._report(rank, pid)
        return bool(message["kind"] == "got")

    def cancel(self) -> list[int]:
        orders, self._waiting = self._waiting, []
        for order in orders:
            for fd in order.fds:
                os.close(fd)
        return [order.job["rank"] for order in orders]

    def close(self) -> None:
        self.cancel()
        self.channel.close()

    def _send(self) -> None:
        """One message for each worker; the server answers at once, and forks after the last."""
        orders, self._waiting = self._waiting, []
        self.channel.end.settimeout(_GOT_LIMIT_S)
        for order in orders:
            message: dict[str, Any] = {"job": order.job, "last": order is orders[-1]}
            if self.channel.send(message, order.fds):
                was_got = False
                while self.channel.is_open and not was_got:
                    for each in self.channel.receive():
                        was_got |= self._take(each)
            for fd in order.fds:
                os.close(fd)
        self.channel.end.settimeout(None)


def workers_stdin() -> int | None:
    """Workers read what is piped in, but no terminal: it would stop them for trying."""
    try:
        return subprocess.DEVNULL if os.isatty(0) else None
    except OSError:
        return subprocess.DEVNULL
