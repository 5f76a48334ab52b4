"""Where the ranks meet: a listening socket that the launcher opens and hands to rank 0.

It listens before any rank runs, so no port is guessed and none is taken by somebody else in the
meantime. It listens on the loopback interface, unless the user has named an endpoint where several
machines meet.
"""

from __future__ import annotations

import os
import socket

from closeranks.launch.record import Worker

LOOPBACK_ADDRESS = "127.0.0.1"


class Rendezvous:
    """Of the ranks of one machine, or of all, seen from one of them."""

    def __init__(self, port: int, is_handed_over: bool) -> None:
        self.address = LOOPBACK_ADDRESS
        self.port = 0
        self._wanted = port
        self._is_handed_over = is_handed_over
        self._is_elsewhere = False
        self._socket: socket.socket | None = None
        if port:
            try:
                self.open()
            except OSError as error:
                why = os.strerror(error.errno or 0)
                raise ValueError(
                    f"--master-port {port}: {why}. Nothing was started; leave it out, and any free "
                    "port is used"
                ) from error

    def use(self, address: str, port: int, listener: socket.socket | None) -> None:
        """Several machines have agreed on a place; the socket is there on the first of them."""
        self.address, self.port, self._socket = address, port, listener
        self._is_elsewhere = True

    def open(self) -> None:
        """Before the workers start, again or for the first time."""
        if self._socket is None and not self._is_elsewhere:
            where = (LOOPBACK_ADDRESS, self._wanted)
            self._socket = socket.create_server(where, backlog=socket.SOMAXCONN)
            self.port = self._socket.getsockname()[1]

    def listener_of(self, worker: Worker) -> socket.socket | None:
        """It goes to rank 0, once; a program that is not ours opens the port by itself."""
        if worker.rank != 0:
            return None
        listening, self._socket = self._socket, None
        if listening is not None and not self._is_handed_over:
            listening.close()
            return None
        return listening
