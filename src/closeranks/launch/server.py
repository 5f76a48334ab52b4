"""The process that workers are forked from, after it has imported once what all of them need.

Started as `python -m closeranks.launch.server FD LAUNCHER MODULES`. It imports the modules, then
waits for requests. A worker must be the launcher's own child, who alone judges how it ended, so
workers are forked from a process in between, which ends at once: Linux then gives its children to
the launcher, who has asked for orphans.

Never starts a thread: a fork would inherit the locks that it held.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys

from closeranks.launch import kernel
from closeranks.launch.channel import Channel, Message
from closeranks.launch.worker import CONTROL, live

_FDS_MAX = 16
_READ_BYTES = 1 << 20


def main() -> int:
    connection = socket.socket(fileno=int(sys.argv[1]))
    kernel.die_with_parent()
    if os.getppid() != int(sys.argv[2]):
        return 1
    kernel.set_title("closeranks: fork server")
    for name in sys.argv[3].split(","):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # Workers share these objects as long as nobody writes to their pages.
    channel = Channel(connection)
    channel.send({"kind": "ready"})
    return serve(channel)


def serve(channel: Channel) -> int:
    """Start workers until the launcher goes; returns in every worker as well, with its code."""
    batch: list[tuple[Message, list[int]]] = []
    while True:
        data, fds, _, _ = socket.recv_fds(channel.end, _READ_BYTES, _FDS_MAX)
        if not data:
            return 0
        messages = channel.split(data)
        while not messages:  # A long one comes in pieces; its descriptors came with the first.
            messages = channel.split(channel.end.recv(_READ_BYTES))
        (message,) = messages
        batch.append((message["job"], fds))
        channel.send({"kind": "got"})
        if not message["last"]:
            continue
        between = os.fork()
        if between == 0:
            return _start(batch, channel)
        os.waitpid(between, 0)
        for _, fds in batch:
            for fd in fds:
                os.close(fd)
        batch = []


def _start(batch: list[tuple[Message, list[int]]], channel: Channel) -> int:
    """In the process between: fork the workers and end. In a worker: live, return its code."""
    started, between = [], os.getpid()
    for job, fds in batch:
        pid = os.fork()
        if pid == 0:
            channel.close()
            for _, others in batch:
                if others is not fds:
                    for fd in others:
                        os.close(fd)
            gc.enable()
            return live(job, fds, Channel(socket.socket(fileno=fds[CONTROL])), between)
        started.append([job["rank"], pid])
    channel.send({"kind": "started", "pids": started})
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
