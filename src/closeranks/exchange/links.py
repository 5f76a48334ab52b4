"""The connections of a gloo group, as the kernel sees them: found, watched, and cut.

Gloo waits for a peer that has vanished until the group's timeout, and a rank that is not next to
the lost one waits as long. The kernel knows more, and lets its connections be looked at from
outside of gloo: they are found by comparing this process's sockets before and after the group is
made. A copy of each descriptor stays here, so that what became of a connection can be read, and it
can be shut down, whatever gloo does with its own.

Knows sockets and numbers of ranks; must not know what they carry. Linux only, as its readers are.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import termios
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

_ESTABLISHED = 1
_INFO = struct.Struct("8B24I")  # the first 104 bytes of the kernel's struct tcp_info
_UNACKED, _DATA_SENT, _DATA_RECV, _ACK_RECV = 8 + 4, 8 + 9, 8 + 11, 8 + 12
_KEEPALIVE = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 9))
_VANISHED_MS = 2000


@dataclass(frozen=True)
class Sign:
    """What the kernel knows of one connection at a moment. Times are milliseconds ago."""

    rank: int  # at the other end
    watches: bool  # it carries nothing but the kernel's own probes
    is_open: bool
    heard_ms: int  # since anything came from the other end, an acknowledgement included
    moved_ms: int  # since data were sent or received
    waits_ms: int  # for an acknowledgement of what was sent, with nothing heard meanwhile
    unread: int  # bytes that have come and gloo has not read


class Link:
    """One connection."""

    def __init__(self, rank: int, inode: int, fd: int, end: socket.socket) -> None:
        self.rank = rank
        self.inode = inode
        self.fd = fd  # gloo's own
        self.end = end  # the copy
        self._unacked_since_s: float | None = None

    def waits_ms(self, unacked: int, heard_ms: int, now_s: float) -> int:
        """How long data have waited: the last sign of life may be older, if nothing was sent."""
        if not unacked:
            self._unacked_since_s = None
            return 0
        if self._unacked_since_s is None:
            self._unacked_since_s = now_s
        return min(heard_ms, round((now_s - self._unacked_since_s) * 1000))

    def sign(self, watches: bool) -> Sign:
        info = _INFO.unpack(self.end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
        unread = fcntl.ioctl(self.end.fileno(), termios.FIONREAD, b"\0\0\0\0")
        heard_ms = min(info[_DATA_RECV], info[_ACK_RECV])
        return Sign(
            rank=self.rank,
            watches=watches,
            is_open=info[0] == _ESTABLISHED,
            heard_ms=heard_ms,
            moved_ms=min(info[_DATA_RECV], info[_DATA_SENT]),
            waits_ms=self.waits_ms(info[_UNACKED], heard_ms, time.monotonic()),
            unread=int.from_bytes(unread, "little"),
        )

    def probe(self) -> None:
        """Have the kernel ask the other end every second whether it is there."""
        _ask_every_second(self.end)

    def cut(self) -> None:
        with contextlib.suppress(OSError):  # it has been cut already
            self.end.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """In a process that was forked: an end held here would keep the connection alive."""
        nothing = os.open(os.devnull, os.O_RDWR)
        with contextlib.suppress(OSError):
            for fd in (self.fd, self.end.fileno()):
                if os.fstat(fd).st_ino == self.inode:
                    os.dup2(nothing, fd, inheritable=False)
        os.close(nothing)


def made_by(make: Callable[[], T]) -> tuple[T, dict[int, int]]:
    """What make() returns, and the sockets (inode and descriptor) that came with it."""
    before = _sockets()
    made = make()
    return made, {inode: fd for inode, fd in _sockets().items() if inode not in before}


def ends_of(found: dict[int, int]) -> list[tuple[int, int, socket.socket]]:
    """Copies of those among the sockets that are connected by TCP: inode, descriptor, copy."""
    ends = []
    for inode, fd in found.items():
        with contextlib.suppress(OSError):
            end = socket.socket(fileno=fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0))
            try:
                end.getpeername()
                assert end.family in (socket.AF_INET, socket.AF_INET6), "not from the network"
            except (OSError, AssertionError):
                end.close()
                continue
            ends.append((inode, fd, end))
    return ends


def name_of(address: Any) -> int:
    """A number for one end of a connection; both of its ends come to the same."""
    return zlib.crc32(f"{address[0]} {address[1]}".encode())


def watch_store(store: Any) -> list[Link]:
    """This process's connection to a store; questions end within seconds if its host vanishes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port, found = getattr(store, "port", None), []
    for inode, fd, end in ends_of(_sockets()):
        if end.getpeername()[1] != port:
            end.close()
            continue
        _ask_every_second(end)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _VANISHED_MS)
        found.append(Link(-1, inode, fd, end))
    return found


def close(links: Iterable[Link]) -> None:
    for link in links:
        link.end.close()


def _ask_every_second(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _sockets() -> dict[int, int]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            about = os.fstat(int(name))
            if stat.S_ISSOCK(about.st_mode):
                found[about.st_ino] = int(name)
    return found
