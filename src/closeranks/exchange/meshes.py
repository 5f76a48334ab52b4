"""All groups that one exchange across hosts needs beside the one it was given, and their lookout.

    watch    all ranks; carries nothing, so that it tells who is there
    flat     all ranks; carries what is small, and everything where memory is not shared
    column   the ranks with one slice, one of each host; None on a rank without a slice
    turns    the same ranks as what carries the sums between hosts, where a wire format is wanted:
             for its second collectives, which keep an order of their own

Made by all ranks at the same point of their programs, ended together. Knows groups and ranks; must
not know what is exchanged.
"""

from __future__ import annotations

import atexit
import weakref
from typing import TYPE_CHECKING, Any

from closeranks.errors import PeerLost, RankAbsent
from closeranks.exchange.lookout import Crowd, Lookout, ranks_named
from closeranks.exchange.mesh import Mesh
from closeranks.exchange.notes import Notes
from closeranks.segment.team import STOPPED

if TYPE_CHECKING:
    from closeranks.segment.team import Team

_all: weakref.WeakSet[Meshes] = weakref.WeakSet()


class Meshes:
    """One rank's ends of them."""

    transport = "gloo"

    def __init__(
        self,
        crowd: Crowd,
        gloo: Any,
        store: Any,
        by_columns: bool,
        with_turns: bool = False,
        with_flat: bool = True,
    ) -> None:
        """`gloo` is the backend of the given group and `store` one that nobody else uses."""
        everybody = range(len(crowd.names))
        self.notes = Notes(store)
        self.watch = Mesh(gloo, store, "watch", everybody, crowd.rank)
        self.crowd = crowd = _with_addresses(crowd, self.watch)
        self.flat: Mesh | None = None
        if with_flat:
            self.flat = Mesh(gloo, store, "flat", everybody, crowd.rank)
        self.column: Mesh | None = None
        self.turns: Mesh | None = None
        place = crowd.grid.row_of(crowd.rank).index(crowd.rank)
        if by_columns and place < crowd.grid.columns:
            ranks = crowd.grid.column(place)
            self.column = Mesh(gloo, store, f"column/{place}", ranks, crowd.rank)
            if with_turns:
                self.turns = Mesh(gloo, store, f"turns/{place}", ranks, crowd.rank)
        elif with_turns and not by_columns:
            self.turns = Mesh(gloo, store, "turns", everybody, crowd.rank)
        data = [mesh for mesh in (self.flat, self.column, self.turns) if mesh is not None]
        self.lookout = Lookout(crowd, self.watch, data, self.notes)
        if not _all:
            atexit.register(_close_all)
        _all.add(self)

    @property
    def peers(self) -> str:
        """With whom this rank's slice is exchanged."""
        links = [] if self.column is None else self.column.links
        return ranks_named(sorted(link.rank for link in links))

    def explained(self, error: RuntimeError, team: Team | None) -> RuntimeError:
        """What a failed wait means. From here on this rank comes to nothing any more."""
        if isinstance(error, RankAbsent) and STOPPED not in str(error):
            # Who is late here may wait for another host itself: it takes all ranks to tell.
            error = RuntimeError(str(error))
        if not isinstance(error, PeerLost | RankAbsent):
            error = self.lookout.explain(error)
        self.lookout.tell(error)
        if team is not None:
            team.leave(error)
        return error

    def close(self) -> None:
        self.lookout.close()
        self.notes.close()
        for mesh in (self.watch, self.flat, self.column, self.turns):
            if mesh is not None:
                mesh.close()


def _with_addresses(crowd: Crowd, watch: Mesh) -> Crowd:
    """Names that also say at which address a host was met: names alone may be all alike."""
    addresses = {link.rank: link.end.getpeername()[0] for link in watch.links}
    row = crowd.grid.row_of(crowd.rank)
    own = [link.end.getsockname()[0] for link in watch.links if link.rank not in row]
    addresses |= dict.fromkeys(row, own[0]) if own else {}
    names = [
        f"{name} ({addresses[rank]})" if rank in addresses else name
        for rank, name in enumerate(crowd.names)
    ]
    return Crowd(crowd.rank, crowd.grid, names)


def _close_all() -> None:
    """Gloo's groups have to end before the interpreter does."""
    for meshes in list(_all):
        meshes.close()
