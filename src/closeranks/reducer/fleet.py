"""The buckets of a plan with their memory, and where in them each parameter lies.

Knows which parameters are planned and in which order; must not know when buckets fly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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
        tails = [
            tail_length(len(self.planned)) if self._carries(p, carries_tail) else 0
            for p in self.plan
        ]
        memories = self._memories(tails, by_hook)
        for position, plan in enumerate(self.plan):
            bucket = self._make(position, plan, memories.get(position))
            self.buckets.append(bucket)
            for slot, number in enumerate(bucket.numbers):
                self.bucket_of[number] = bucket
                self.slot_of[number] = slot
        self.make_ready()

    def _carries(self, plan: BucketPlan, carries_tail: bool) -> bool:
        """Whether a bucket has the tail behind it."""
        first = self._candidates[plan.indices[0]]
        can = not first.sparse and can_carry(first.dtype, self._exchange.size)
        return carries_tail and plan is self.plan[-1] and can

    def _memories(self, tails: Sequence[int], by_hook: bool) -> dict[int, Tensor]:
        """Memory for each bucket of dense gradients, all of one kind at once."""
        kinds: dict[tuple[torch.dtype, torch.device], list[tuple[int, int]]] = {}
        for position, plan in enumerate(self.plan):
            members = [self._candidates[n] for n in plan.indices]
            if not members[0].sparse:
                numel = sum(c.parameter.numel() for c in members) + tails[position]
                kind = members[0].dtype, members[0].parameter.device
                kinds.setdefault(kind, []).append((position, numel))
        memories: dict[int, Tensor] = {}
        for kind, wanted in kinds.items():
            positions, numels = zip(*wanted, strict=True)
            if by_hook:
                made = [torch.zeros(n, dtype=kind[0], device=kind[1]) for n in numels]
            else:
                made = self._exchange.allocate(numels, *kind)
            memories.update(zip(positions, made, strict=True))
        return memories

    def _make(
        self, position: int, plan: BucketPlan, memory: Tensor | None
    ) -> Bucket | SparseBucket:
        members = [self._candidates[n] for n in plan.indices]
        parameters = [c.parameter for c in members]
        if memory is None:
            return SparseBucket(position, plan.indices[0], parameters[0])
        layout = _layout(members)
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
