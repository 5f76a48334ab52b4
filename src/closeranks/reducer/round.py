"""The state of one exchange, from the first gradient that fires until the last bucket has landed.

A record without behaviour. The reducer fills it, the landing empties it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from closeranks.reducer.flight import Flight

if TYPE_CHECKING:
    from torch import Tensor

    from closeranks.exchange.base import Pending


@dataclass(slots=True)
class Round:
    """One exchange as this rank sees it. Parameters are numbers."""

    fired: list[bool]
    alone: bool = False  # there is no other rank, and no hook that wants to see the buckets
    remote: int | None = None  # the distributed autograd context that holds the gradients
    next: int = 0  # the position of the bucket that flies next
    last: int = 0  # buckets from this position on fly when the backward has settled
    observed: list[int] = field(default_factory=list)  # in the order in which they fired
    late: set[int] = field(default_factory=set)  # fired after their bucket had flown
    expected_unused: set[int] = field(default_factory=set)
    unfired: list[int] = field(default_factory=list)  # known when the backward has settled
    flights: list[Flight] = field(default_factory=list)
    tail: Tensor | None = None
    tail_alone: bool = False  # the tail travels by itself and not in the last bucket
    tail_pending: Pending | None = None  # it has set off
