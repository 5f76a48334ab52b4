"""Sums of lanes in memory that others read: never other bytes than the words say."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from closeranks.lanes import words as w
from closeranks.lanes.folds import Folds, FoldsByLayout
from closeranks.lanes.gradient import Layout
from closeranks.segment.area import Area
from closeranks.segment.roster import Roster

LANES = 3
LARGE = [torch.zeros(3000), torch.zeros(5)]
SMALL = [torch.zeros(1200)]


@pytest.fixture
def areas() -> Iterator[tuple[Area, Area]]:
    """An area as its owner sees it, and as another worker does."""
    roster = Roster.create(1)
    number = roster.admit(0)
    roster.started(number, os.getpid())
    mine = Area(roster.fd, number)
    mine.take_head()
    yield mine, Area(roster.fd, number)
    roster.close()


def work(folds: Folds, tick: int, parameters: list[Tensor], value: float) -> None:
    """All lanes and regions of a tick, by one worker."""
    folds.begin(tick, LANES, 1)
    for lane in range(LANES):
        gradients = [torch.full_like(p, value + lane) for p in parameters]
        folds.add_lane(tick, lane, LANES, gradients, 1.0)
    nodes = {}
    for slot, word in enumerate(folds.me.words[w.FOLDS : w.FOLDS + LANES + 2].tolist()):
        at, lo, hi = w.node_of(word)
        if at == tick:
            nodes[lo, hi] = folds.me, slot
    for index in range(len(folds.layout.regions)):
        assert folds.sum_region(tick, index, LANES, nodes, 1.0, is_mine=False)


def read(theirs: Area, tick: int, parameters: list[Tensor]) -> list[Tensor] | None:
    """What a worker that is late makes of the results of a tick."""
    reader = Folds(theirs, Layout(parameters))
    if any(theirs.words[w.region_word(tick, k)] != tick for k in range(len(reader.layout.regions))):
        return None
    targets = [torch.full_like(p, -1.0) for p in parameters]
    makers = [theirs] * len(reader.layout.regions)
    return targets if reader.gather(tick, makers, targets) else None


@pytest.mark.parametrize("order", [(LARGE, SMALL), (SMALL, LARGE)])
def test_results_outlive_a_tick_that_trains_other_parameters(
    areas: tuple[Area, Area], order: tuple[list[Tensor], list[Tensor]]
) -> None:
    mine, theirs = areas
    folds = FoldsByLayout(mine)
    first, second = order
    for tick in range(4, 20, 2):
        work(folds.at(tick, first), tick, first, float(tick))
        found = read(theirs, tick, first)
        assert found is not None and all((t == 3 * tick + 3).all() for t in found)
        work(folds.at(tick + 1, second), tick + 1, second, 100.0)
        found = read(theirs, tick, first)
        assert found is not None and all((t == 3 * tick + 3).all() for t in found)


def test_a_place_that_is_laid_out_anew_holds_nothing_old(areas: tuple[Area, Area]) -> None:
    mine, theirs = areas
    folds = FoldsByLayout(mine)
    work(folds.at(4, LARGE), 4, LARGE, 4.0)
    folds.at(6, SMALL)
    assert read(theirs, 4, LARGE) is None
    sums = [w.node_of(word)[0] for word in theirs.words[w.FOLDS : w.FOLDS + 8].tolist()]
    assert 4 not in sums


def test_what_is_released_is_not_what_others_lie_in(areas: tuple[Area, Area]) -> None:
    """Regions that were somebody else's are released two ticks later, unless laid out anew."""
    mine, theirs = areas
    large = [torch.zeros(1000), torch.zeros(200_000, dtype=torch.float64)]
    small = [torch.zeros(280_000)]
    folds = FoldsByLayout(mine)
    work(folds.at(4, large), 4, large, 4.0)
    work(folds.at(6, small), 6, small, 6.0)
    folds.at(7, large).begin(7, LANES, 1)
    found = read(theirs, 6, small)
    assert found is not None and all((t == 21.0).all() for t in found)
