"""Sums of lanes' gradients: written into this worker's own area, read from everybody's.

A worker joins each lane it has computed with the sums it already has, as far as the tree over lanes
allows, so it needs few slots. The old sums stay valid until the new one is announced. When all
lanes are in somebody's slot, each region of the total is a task of its own. What a worker took
beyond its usual share, for lanes and regions of others, it gives back when nobody reads it.

    add_lane     leaf = gradient x weight; joined with siblings; into a free slot
    sum_region   the tree over whatever slots there are, times a scale, into the results
    gather       the results, whoever made them, into gradients

Whoever does it, and from whatever partial sums, gets the same bits (exchange/tree.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from closeranks.exchange.tree import split
from closeranks.lanes import words as w
from closeranks.lanes.assign import merge_path
from closeranks.lanes.gradient import Layout, Region, View, real
from closeranks.observe import points
from closeranks.segment.area import Area, order_writes

Nodes = Mapping[tuple[int, int], tuple[Area, int]]  # which slot of whom holds which lanes' sum

_PAGE = 4096
_LAYOUTS_MAX = 16


class Folds:
    """The sums that one worker makes."""

    def __init__(self, me: Area, layout: Layout) -> None:
        self.me = me
        self.layout = layout
        self._stride = max(_PAGE, -(-layout.size_bytes // _PAGE) * _PAGE)
        self._tick = 0
        self._slots: dict[tuple[int, int], int] = {}
        self._spare: dict[int, Tensor] = {}
        self._slots_usual = 1
        self._slots_taken = 0
        self._of_others: list[tuple[int, int]] = []  # tick and region

    def begin(self, tick: int, lanes: int, workers: int) -> None:
        """A new tick. The results of the last but one are overwritten from now on."""
        self._tick, self._slots = tick, {}
        self._slots_usual = (-(-lanes // workers) - 1).bit_length() + 1
        while self._slots_taken > self._slots_usual:
            self._slots_taken -= 1
            self.me.words[w.FOLDS + self._slots_taken] = 0
            start = self._slots_taken * self._stride
            self.me.release(w.FOLD_DATA, start, self.layout.size_bytes)
        for old, index in [each for each in self._of_others if each[0] <= tick - 2]:
            self._of_others.remove((old, index))
            word, region = w.region_word(old, index), self.layout.regions[index]
            if self.me.words[word] <= tick - 2:
                self.me.words[word] = 0
                size_bytes = region.numel * region.dtype.itemsize
                self.me.release(w.result_data(old), region.start_bytes, size_bytes)

    def leave_results(self, tick: int) -> None:
        """From this tick on others lie where results of its parity were: not ours to release."""
        self._of_others = [each for each in self._of_others if (each[0] ^ tick) & 1]

    def add_lane(
        self, tick: int, lane: int, lanes: int, gradients: Sequence[Tensor | None], weight: float
    ) -> None:
        """Announce the gradient of a lane, joined with the sums of its siblings."""
        assert tick == self._tick, "a tick is begun before its lanes"
        path = merge_path(lane, lanes, self._slots)
        lo, hi = lane, lane + 1
        for sibling in path:
            lo, hi = min(lo, sibling[0]), max(hi, sibling[1])
        used = set(self._slots.values())
        slot = next(s for s in range(len(used) + 1) if s not in used)
        if self.layout.size_bytes:
            self.me.take(w.FOLD_DATA, slot * self._stride, self.layout.size_bytes)
            self._slots_taken = max(self._slots_taken, slot + 1)
        with self.me.write(w.FOLDS + slot, w.node_key(tick, lo, hi)):
            for part, gradient in zip(self._parts(slot), gradients, strict=True):
                _put_leaf(part, gradient, weight)
            points.reach("fold half written", tick=tick, lane=lane)
            at = lane
            for sibling in path:
                self._join(slot, self._slots[sibling], sibling[0] < at)
                at = min(at, sibling[0])
        for sibling in path:
            del self._slots[sibling]
        self._slots[lo, hi] = slot

    def sum_region(
        self, tick: int, index: int, lanes: int, nodes: Nodes, scale: float, is_mine: bool = True
    ) -> bool:
        """Announce the sum of one region; False if a slot changed meanwhile."""
        region = self.layout.regions[index]
        if not is_mine:
            self._of_others.append((tick, index))
        section, start = w.result_data(tick), region.start_bytes
        self.me.take(section, start, region.numel * region.dtype.itemsize)
        out = self.me.tensor(section, start, region.numel, region.dtype)
        used: list[tuple[Area, int, int]] = []

        def part(lo: int, hi: int) -> Tensor | None:
            if (lo, hi) not in nodes:
                return None
            area, slot = nodes[lo, hi]
            used.append((area, slot, w.node_key(tick, lo, hi)))
            at = slot * self._stride + region.start_bytes
            return area.tensor(w.FOLD_DATA, at, region.numel, region.dtype)

        def total(lo: int, hi: int, into: Tensor, depth: int) -> Tensor:
            found = part(lo, hi)
            if found is not None:
                return found
            middle = split(lo, hi)
            left = total(lo, middle, into, depth)
            right = total(middle, hi, self._scratch(depth, region), depth + 1)
            return torch.add(left, right, out=into)

        word = w.region_word(tick, index)
        with self.me.write(word, 0):
            found = total(0, lanes, out, 0)
            if found is not out:
                out.copy_(found)
            points.reach("region half summed", tick=tick, region=index)
            if scale != 1.0:
                out.mul_(scale)
        if any(area.words[w.FOLDS + slot] != key for area, slot, key in used):
            return False
        self.me.words[word] = tick
        return True

    def gather(self, tick: int, makers: Sequence[Area], targets: Sequence[Tensor]) -> bool:
        """Copy the results into flat tensors, one per parameter; False if one was overwritten."""
        for index, (region, area) in enumerate(zip(self.layout.regions, makers, strict=True)):
            source = area.tensor(
                w.result_data(tick), region.start_bytes, region.numel, region.dtype
            )
            for parameter, lo, hi, at in self.layout.overlaps(region):
                targets[parameter][lo:hi].copy_(source[at : at + hi - lo])
            if area.words[w.region_word(tick, index)] != tick:
                return False
        return True

    def _view(self, slot: int) -> View:
        def view(start: int, numel: int, dtype: torch.dtype) -> Tensor:
            return self.me.tensor(w.FOLD_DATA, slot * self._stride + start, numel, dtype)

        return view

    def _parts(self, slot: int) -> list[Tensor]:
        return self.layout.parts(self._view(slot))

    def _join(self, slot: int, sibling: int, sibling_is_left: bool) -> None:
        """Add a sibling's sum to the one in a slot, in the order of the tree."""
        mine, theirs = (self.layout.groups(self._view(s)) for s in (slot, sibling))
        for a, b in zip(mine, theirs, strict=True):
            left, right = (b, a) if sibling_is_left else (a, b)
            torch.add(left, right, out=a)

    def _scratch(self, depth: int, region: Region) -> Tensor:
        size_bytes = region.numel * region.dtype.itemsize
        spare = self._spare.get(depth)
        if spare is None or spare.numel() < size_bytes:
            spare = self._spare[depth] = torch.empty(size_bytes, dtype=torch.uint8)
        return spare[:size_bytes].view(region.dtype)


class FoldsByLayout:
    """The Folds of one worker for whatever parameters a phase trains.

    Other parameters lie elsewhere, so their bytes change what words of an earlier tick still tell
    of. Those words are cleared first.
    """

    def __init__(self, me: Area) -> None:
        self._me = me
        # With the parameters themselves, so that no other ones ever have their ids.
        self._known: dict[tuple[int, ...], tuple[Folds, list[Tensor]]] = {}
        self._of_sums: Folds | None = None
        self._of_results: list[Folds | None] = [None, None]  # by parity

    def at(self, tick: int, parameters: Sequence[Tensor]) -> Folds:
        """For a tick that begins."""
        looks = tuple(map(id, parameters))
        if looks not in self._known:
            if len(self._known) >= _LAYOUTS_MAX:
                self._known.clear()
            self._known[looks] = Folds(self._me, Layout(parameters)), list(parameters)
        folds = self._known[looks][0]
        if folds is not self._of_sums:
            self._of_sums = folds
            self._clear(w.FOLDS, w.FOLDS_MAX)
        before = self._of_results[tick & 1]
        if folds is not before:
            if before is not None:
                before.leave_results(tick)
            self._of_results[tick & 1] = folds
            self._clear(w.region_word(tick, 0), w.REGIONS_MAX)
        return folds

    def _clear(self, first: int, count: int) -> None:
        self._me.words[first : first + count] = memoryview(bytes(8 * count)).cast("q")
        order_writes()


def _put_leaf(part: Tensor, gradient: Tensor | None, weight: float) -> None:
    if gradient is None:
        part.zero_()
        return
    plain = real(gradient.to_dense() if gradient.is_sparse else gradient)
    if plain.dtype == part.dtype and plain.device == part.device:
        torch.mul(plain, weight, out=part)
    else:
        part.copy_(plain).mul_(weight)
