"""Why a rank leaves, as text that others can read, so that they blame whoever is to blame.

A rank that fails because of another one ends too, and looks lost itself to whoever looks later. So
it leaves a note before it goes. Knows errors and text; must not know where notes lie.
"""

from __future__ import annotations

from closeranks.errors import PeerLost

_LOST, _LATE = "lost", "late"


def pack(error: RuntimeError) -> str:
    """A note that says what this rank was told."""
    if isinstance(error, PeerLost):
        rank = "" if error.rank is None else error.rank
        return f"{_LOST}\n{rank}\n{error.host or ''}\n{int(error.is_silent)}\n{error}"
    return f"{_LATE}\n\n\n0\n{error}"


def unpack(note: str) -> RuntimeError:
    """What follows from a note for whoever reads it; a plain RuntimeError is to be explained."""
    kind, rank, host, is_silent, text = note.split("\n", 4)
    if kind == _LATE:
        return RuntimeError(text)
    return PeerLost(text, int(rank) if rank else None, host or None, is_silent == "1")
