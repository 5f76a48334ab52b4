"""static_graph=True: the user says that every backward uses the same parameters; this checks it.

Nothing depends on the promise being kept: gradients of a changed graph are right. But who made
the promise wants to know that it is broken, so it is an error, after the exchange has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from closeranks.reducer.reducer import Reducer


class StaticGraph:
    """Which parameters the backwards of the first step used, and whether later steps do the same.

    A step begins with a forward and may have several backwards; the n-th is compared with the
    n-th of the steps before.
    """

    def __init__(self, expected: bool) -> None:
        self.expected = expected
        self.unchanged = True  # so far, whether it was promised or not
        self._used: list[list[bool]] = []  # by the n-th backward of a step
        self._count = 0  # of backwards in this step
        self._first_step = True

    def begin_step(self) -> None:
        """A forward begins."""
        if self._count:
            self._first_step = False
        self._count = 0

    def forget(self) -> None:
        """Parameters were frozen or unfrozen on purpose: the next step sets the graph."""
        self._used.clear()
        self._first_step = True

    def check(self, used: list[bool], reducer: Reducer) -> None:
        """A backward has ended."""
        number = self._count
        self._count += 1
        if number >= len(self._used):
            if self._first_step:
                self._used.append(used)
            return
        before, self._used[number] = self._used[number], used
        if before == used:
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
