"""The life of one worker as a table: which state follows which event. Pure.

    new --start--> starting --hello--> running --death--> dead --start--> starting ...

`starting` is dead when it dies before its hello. `restarted` is no state of its own: it is a
worker that starts and was dead before, and its record counts how often. A step that is not in the
table raises and changes nothing.
"""

from __future__ import annotations

import enum


class State(enum.Enum):
    """Where a worker is in its life."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    DEAD = "dead"


class Event(enum.Enum):
    """What can happen to a worker."""

    START = "start"
    HELLO = "hello"
    DEATH = "death"


_TABLE = {
    (State.NEW, Event.START): State.STARTING,
    (State.STARTING, Event.HELLO): State.RUNNING,
    (State.STARTING, Event.DEATH): State.DEAD,
    (State.RUNNING, Event.DEATH): State.DEAD,
    (State.DEAD, Event.START): State.STARTING,
}


def after(state: State, event: Event) -> State:
    """The state that follows; an event that cannot happen in a state is a fault of ours."""
    following = _TABLE.get((state, event))
    assert following is not None, f"a worker that is {state.value} had the event {event.value}"
    return following
