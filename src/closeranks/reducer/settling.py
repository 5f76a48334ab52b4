"""A backward has ended: the buckets that have not flown fly now, and the tail tells the news.

What has not fired goes as it is, zero where there is nothing. Works on a reducer's round; must
not wait for anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from closeranks.reducer import tail

if TYPE_CHECKING:
    from closeranks.reducer.reducer import Reducer


def settle(reducer: Reducer, zeros: bool) -> None:
    """Have every bucket fly; the last one has the tail, if it can.

    Args:
        zeros: this rank gives nothing, whatever its gradients hold.
    """
    state, fleet = reducer.round, reducer.fleet
    state.unfired = [n for n in fleet.planned if not state.fired[n]]
    for number in state.unfired:
        if reducer.tracks_increments:
            reducer.increments.set_aside(number)
        if not zeros:
            fleet.bucket_of[number].keep(fleet.slot_of[number])
    used = [reducer.used[n] for n in fleet.planned] if state.unfired else None
    # A parameter that needed no gradient when the plan was made may need one now.
    changed = any(reducer.parameters[n].requires_grad for n in fleet.unplanned)
    flags = tail.Flags(bool(state.late), changed)
    for bucket in fleet.buckets[state.next :]:
        if reducer.options.skip_unused and not any(reducer.used[n] for n in bucket.numbers):
            state.next += 1
            continue
        if bucket.tail.numel():
            tail.write_tail(bucket.tail, used, flags)
        reducer.fly(bucket, zeros)
    state.tail = fleet.buckets[-1].tail
    state.tail_alone = not state.tail.numel()
    if state.tail_alone:
        length = tail.tail_length(len(fleet.planned))
        state.tail = torch.empty(length, dtype=torch.int32, device=reducer.device)
        tail.write_tail(state.tail, used, flags)
        if reducer.hook is None:  # A hook may start exchanges of its own until its buckets land.
            state.tail_pending = reducer.exchange.all_reduce(state.tail)
