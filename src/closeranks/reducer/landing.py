"""The end of an exchange: buckets come back, .grad becomes the average, and all agree on news.

    land     in the order of the flights; each gradient gets its average at once
    unfired  a parameter that this rank did not use gets the average if another rank used it
    agree    what the tail says is done by all: late increments, new parameters, a new plan

Works on a reducer's round. Must not know how a backward is watched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from closeranks.reducer import agreement, extra, tail
from closeranks.reducer.scale import Scale

if TYPE_CHECKING:
    from torch import Tensor

    from closeranks.reducer.flight import Flight
    from closeranks.reducer.reducer import Reducer


def land(reducer: Reducer, discard: bool) -> None:
    """Wait for everything that flies and put the results where they belong.

    Args:
        discard: keep nothing of it; this rank only took part for the sake of the others.
    """
    state, fleet = reducer.round, reducer.fleet
    late = {n: reducer.parameters[n].grad for n in state.late}
    unfired = set(state.unfired)

    # Land.
    for flight in state.flights:
        _wait(reducer, flight)
        slots = None
        if unfired and not unfired.isdisjoint(flight.bucket.numbers):
            slots = [s for s, n in enumerate(flight.bucket.numbers) if n not in unfired]
        if not discard:
            flight.bucket.give_back(reducer.options.as_view, slots)
    assert state.tail is not None, "every exchange has a tail"
    if state.tail_alone:
        pending = state.tail_pending or reducer.exchange.all_reduce(state.tail)
        reducer.waiter.wait(pending, lambda: "the end of the backward")
    unit = 1.0 if state.tail_alone else reducer.scale.during
    reducer.news = news = tail.News(state.tail, unit)

    # Unfired.
    if discard:
        _restore_all(reducer)
    elif state.unfired:
        _give_to_unfired(reducer, news.counts())

    # Agree.
    flags = news.flags()
    if flags.late or flags.grads_changed:
        _agree_on_changes(reducer, late, discard)
    if reducer.tracks_increments and not discard:
        reducer.increments.add_back(fleet.planned)
    if not reducer.has_rebuilt_buckets:
        _agree_on_order(reducer, news.counts())


def _wait(reducer: Reducer, flight: Flight) -> None:
    if reducer.hook is not None:
        reducer.hook.finish(flight, reducer.waiter, reducer.describe)
    else:
        reducer.waiter.wait(flight.pending, lambda: reducer.describe(flight.bucket))
    flight.landed()
    reducer.scale.finish(flight.bucket)


def _give_to_unfired(reducer: Reducer, counts: list[int]) -> None:
    state, fleet = reducer.round, reducer.fleet
    flown = {flight.bucket.position for flight in state.flights}
    for number in state.unfired:
        bucket, slot = fleet.bucket_of[number], fleet.slot_of[number]
        if bucket.position not in flown:
            continue
        if counts[fleet.place[number]]:
            bucket.give_back(reducer.options.as_view, [slot])
        else:
            bucket.restore(slot)


def _restore_all(reducer: Reducer) -> None:
    for flight in reducer.round.flights:
        for slot in range(len(flight.bucket.numbers)):
            flight.bucket.restore(slot)


def _agree_on_changes(reducer: Reducer, late: dict[int, Tensor | None], discard: bool) -> None:
    """Some rank has late increments, or a parameter that has needed gradients for a moment."""
    fleet, parameters = reducer.fleet, reducer.parameters
    wanted, late_anywhere = agreement.on_changes(
        parameters, reducer.round.late, reducer.exchange, reducer.waiter
    )
    new = [n for n in wanted if n not in fleet.place]
    given = {n: late.get(n) for n in late_anywhere}
    given |= {n: parameters[n].grad for n in new}
    scale = reducer.scale
    if reducer.hook is not None:  # A hook sees buckets only; what comes late is averaged.
        scale = Scale(True, reducer.exchange, reducer.waiter)
        scale.begin(has_hook=False)
    extra.exchange(given, parameters, new, reducer.exchange, reducer.waiter, scale, discard)
    if new or not late_anywhere <= fleet.wait_for_end:
        fleet.wait_for_end |= late_anywhere
        reducer.adopt([*fleet.planned, *new], [*fleet.order, *new])
        reducer.static_graph.forget()


def _agree_on_order(reducer: Reducer, counts: list[int]) -> None:
    """After the first exchange that all ranks saw alike, plan in the order in which they fired."""
    fleet = reducer.fleet
    varies = reducer.options.find_unused and not reducer.static_graph.expected
    if varies and any(0 < count < reducer.exchange.size for count in counts):
        return
    reducer.has_rebuilt_buckets = True
    observed = [n for n in reducer.round.observed if n in fleet.place]
    fired = set(observed)
    mine = observed + [n for n in fleet.order if n not in fired]
    order = agreement.on_order(mine, reducer.exchange, reducer.waiter, reducer.device)
    if order != fleet.order:
        reducer.adopt(fleet.planned, order)
