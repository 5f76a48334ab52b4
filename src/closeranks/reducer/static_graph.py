"""static_graph=True: the user says that every backward uses the same parameters; this checks it.

Nothing depends on the promise being kept: gradients of a changed graph are right. But who made
the promise wants to know that it is broken, so it is an error, after the exchange has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from closeranks.reducer.reducer import Reducer


class StaticGraph:
    """Which parameters the first exchange used, and whether later ones used the same."""

    def __init__(self, expected: bool) -> None:
        self.expected = expected
        self.unchanged = True  # so far, whether it was promised or not
        self._used: list[bool] | None = None

    def forget(self) -> None:
        """Parameters were frozen or unfrozen on purpose: the next exchange sets the graph."""
        self._used = None

    def check(self, used: list[bool], reducer: Reducer) -> None:
        before, self._used = self._used, used
        if before is None or before == used:
            return
        self.unchanged = False
        if not self.expected:
            return
        pairs = list(enumerate(zip(before, used, strict=True)))
        lost = [i for i, (was, now) in pairs if was and not now]
        gained = [i for i, (was, now) in pairs if now and not was]
        names = reducer.fleet.names([reducer.fleet.planned[i] for i in lost or gained])
        rank = reducer.exchange.rank
        advice = (
            "The gradients of this backward are right nevertheless. Leave static_graph out of the "
            "constructor: closeranks needs no such promise."
        )
        if lost:
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration before starting a new "
                "one. This error indicates that your training graph has changed in this iteration, "
                "e.g., one parameter is used in first iteration, but then got unused in the second "
                "iteration. this is not compatible with static_graph set to True.\n"
                f"Parameter indices which did not receive grad for rank {rank}: "
                f"{' '.join(map(str, lost))} ({', '.join(names)}). {advice}"
            )
        raise RuntimeError(
            "Your training graph has changed in this iteration, e.g., one parameter is unused in "
            "first iteration, but then got used in the second iteration. this is not compatible "
            f"with static_graph set to True. Newly used on rank {rank}: {', '.join(names)}. "
            f"{advice}"
        )
