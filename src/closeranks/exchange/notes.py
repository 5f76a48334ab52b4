"""Notes in the store of a group: why a rank left, for ranks on other hosts.

Nobody asks a store that does not answer: the connection to it is looked at first. The first note
stays, because whoever writes later knows less about what began it. Knows a store and notes; must
not know what is exchanged.
"""

from __future__ import annotations

import contextlib
from typing import Any

from closeranks.exchange import links
from closeranks.exchange.signs import SILENT_MS
from closeranks.segment.farewell import pack, unpack

_KEY = "farewell"


class Notes:
    """One rank's way to the store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._ends = links.watch_store(store)

    def leave(self, error: RuntimeError) -> None:
        if self._is_reachable():
            with contextlib.suppress(RuntimeError):
                self._store.compare_set(_KEY, "", pack(error))

    def read(self) -> RuntimeError | None:
        """What the first rank that left was told, if one has."""
        if self._is_reachable():
            with contextlib.suppress(RuntimeError):
                if self._store.check([_KEY]):
                    return unpack(self._store.get(_KEY).decode())
        return None

    def close(self) -> None:
        links.close(self._ends)
        self._ends = []

    def _is_reachable(self) -> bool:
        """A store in a file, or in this process, has no connection, and is there."""
        with contextlib.suppress(OSError):
            signs = [end.sign(watches=True) for end in self._ends]
            return all(sign.is_open and sign.heard_ms < SILENT_MS for sign in signs)
        return False
