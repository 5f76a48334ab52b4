"""The buckets of a plan with their memory, and where in them each parameter lies.

Knows which parameters are planned and in which order; must not know when buckets fly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from closeranks.exchange.layout import Layout, Piece
from closeranks.reducer.bucket import Bucket, SparseBucket, as_matrix
from closeranks.reducer.plan import BucketPlan, make_plan
from closeranks.reducer.tail import can_carry, tail_length

if TYPE_CHECKING:
    from closeranks.exchange.base import Exchange
    from closeranks.reducer.options import Candidate, ReducerOptions


class Fleet:
    """All buckets. Memory is allocated when it is needed, not when a plan is adopted."""

    def __init__(
        self, candidates: Sequence[Candidate], exchange: Exchange, options: ReducerOptions
    ) -> None:
        self._candidates = candidates
        self._exchange = exchange
        self._options = options
        self.wait_for_end: set[int] = set()  # these fired after their bucket flew in a backward
        self.planned: tuple[int, ...] = ()
        self.place: dict[int, int] = {}  # of a number among the planned
        self.plan: tuple[BucketPlan, ...] = ()
        self.order: list[int] = []
        self.unplanned: list[int] = []
        self.buckets: list[Bucket | SparseBucket] = []
        self.bucket_of: dict[int, Bucket | SparseBucket] = {}
        self.slot_of: dict[int, int] = {}

    def adopt(self, planned: Sequence[int], order: Sequence[int] | None) -> None:
        """Plan anew: these parameters, filled into buckets in this order."""
        self.planned = tuple(sorted(planned))
        self.place = {number: i for i, number in enumerate(self.planned)}
        if order is not None:
            early = [n for n in order if n not in self.wait_for_end]
            order = early + [n for n in order if n in self.wait_for_end]
        specs = [self._candidates[n].spec(n) for n in self.planned]
        self.plan = make_plan(specs, self._options.caps_bytes, order)
        self.order = [n for bucket in self.plan for n in bucket.indices]
        self.unplanned = [n for n in range(len(self._candidates)) if n not in self.place]
        self.release()

    def release(self) -> None:
        """Let go of the memory; the next allocate() makes new buckets."""
        self.buckets = []
        self.bucket_of = {}
        self.slot_of = {}

    def allocate(self, carries_tail: bool, by_hook: bool) -> None:
        """Give every bucket its memory.

        Args:
            carries_tail: the last bucket may carry the tail.
            by_hook: a hook exchanges the buckets, so their memory need not be the exchange's.
        """
        if self.buckets:
            return
        for position, plan in enumerate(self.plan):
            bucket = self._make(position, plan, carries_tail and plan is self.plan[-1], by_hook)
            self.buckets.append(bucket)
            for slot, number in enumerate(bucket.numbers):
                self.bucket_of[number] = bucket
                self.slot_of[number] = slot
        self.make_ready()

    def _make(
        self, position: int, plan: BucketPlan, with_tail: bool, by_hook: bool
    ) -> Bucket | SparseBucket:
        members = [self._candidates[n] for n in plan.indices]
        first = members[0]
        if first.sparse:
            return SparseBucket(position, plan.indices[0], first.parameter)
        with_tail = with_tail and can_carry(first.dtype, self._exchange.size)
        layout = _layout(members)
        tail_count = tail_length(len(self.planned)) if with_tail else 0
        numel, device = layout.numel + tail_count, first.parameter.device
        if by_hook:
            memory = torch.zeros(numel, dtype=first.dtype, device=device)
        else:
            memory = self._exchange.allocate(numel, first.dtype, device)
        parameters = [c.parameter for c in members]
        return Bucket(position, plan.indices, parameters, memory, layout, self._options.batched)

    def make_ready(self) -> None:
        """Every bucket waits for all of its gradients again."""
        for bucket in self.buckets:
            bucket.reset()
            if self.wait_for_end and not self.wait_for_end.isdisjoint(bucket.numbers):
                bucket.missing += 1  # This one does not fly before the backward has settled.

    def names(self, numbers: Sequence[int]) -> list[str]:
        return [self._candidates[n].name for n in numbers]


def _layout(members: Sequence[Candidate]) -> Layout:
    pieces, start = [], 0
    for member in members:
        piece = Piece(member.name, start, *as_matrix(member.parameter))
        pieces.append(piece)
        start = piece.stop
    return Layout(tuple(pieces))
