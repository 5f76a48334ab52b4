"""Messages between the launcher and one process: JSON objects, a line each, over a socket.

The launcher reads without waiting; the other end may block. Knows no message by its meaning.
"""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

Message = dict[str, Any]
_READ_BYTES = 1 << 16


class Channel:
    """One end. `is_open` turns False when the other end has gone."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.is_open = True
        self._rest = b""
        self._sending = threading.Lock()  # messages of several threads do not mix

    def fileno(self) -> int:
        return self.end.fileno()

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> bool:
        """Whether it went out; to somebody who is gone nothing is said."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                if fds:
                    sent = socket.send_fds(self.end, [data], fds)
                    data = data[sent:]
                if data:
                    self.end.sendall(data)
        except OSError:
            return False
        return True

    def receive(self) -> list[Message]:
        """The messages that are there; an end that may block waits for at least one."""
        while True:
            try:
                data = self.end.recv(_READ_BYTES)
            except BlockingIOError:
                return []
            except OSError:
                data = b""
            if not data:
                self.is_open = False
                return []
            if messages := self.split(data):
                return messages

    def split(self, data: bytes) -> list[Message]:
        """The messages that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines if line]

    def close(self) -> None:
        self.is_open = False
        self.end.close()
