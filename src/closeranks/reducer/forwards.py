"""What the forwards since the last backward announced, and what follows for the backward.

A backward is local if it runs inside no_sync(), or if every forward since the last backward did.
Pure bookkeeping: knows no tensors and no ranks.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("closeranks")


class Forwards:
    """Counts of forwards, by whether their backward is meant to be an exchange."""

    def __init__(self) -> None:
        self._synced = 0
        self._local = 0
        self._warned = False
        # One was meant to be exchanged, and nothing has been since the last optimizer step. A
        # forward after an exchange may be there to be looked at only: it owes nobody anything.
        self.unsettled = False
        self._exchanged = False  # since the last optimizer step

    def note(self, synced: bool, training: bool) -> None:
        """A forward begins."""
        if synced:
            self._synced += 1
            self.unsettled = training and not self._exchanged
        else:
            self._local += 1

    def backward_is_local(self, inside_no_sync: bool) -> bool:
        """A backward begins: does it stay on this rank?"""
        announced_local = self._local > 0 and self._synced == 0
        if inside_no_sync != announced_local and self._local + self._synced:
            self._warn()
        local = inside_no_sync or announced_local
        # Each local forward stands for one local backward; an exchange takes all there is.
        self._local = max(0, self._local - 1) if local else 0
        self._synced = 0
        return local

    def exchange_begins(self) -> None:
        self.unsettled = False
        self._exchanged = True

    def stepped(self) -> None:
        """An optimizer of the parameters is about to step."""
        self._exchanged = False

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "no_sync() was around the forward or the backward of a step, but not around both. "
                "Gradients of such a backward stay on this rank and go with the next exchange. "
                "Put both inside `with ddp.no_sync():` or neither. (Said once.)"
            )
