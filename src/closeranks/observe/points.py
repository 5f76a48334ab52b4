"""Named points of the code at which a test may inject a fault; nothing happens there otherwise.

A point is reached in the middle of something that must survive a crash or a pause. A test sets
`on_reach` in the process that is to suffer, decides there by name and facts, and notes that it
fired. Knows neither faults nor what lies around a point.
"""

from __future__ import annotations

from collections.abc import Callable

on_reach: Callable[..., None] | None = None


def reach(name: str, **facts: object) -> None:
    """The code is at this point now; the facts say in which step, bucket or lane."""
    if on_reach is not None:
        on_reach(name, **facts)
