"""The gradient of everything prepared as a flat piece of memory, and the regions it is summed in.

The gradients of all parameters lie one after the other, grouped by the type they are summed in:
float64 is summed in float64, everything else in float32, so that 16-bit gradients are rounded once.
Every parameter begins at a multiple of 64 bytes. Regions cut the whole into at most 64 pieces.

Knows parameters and bytes; must not know workers or lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from closeranks.lanes.words import REGIONS_MAX

_ALIGN = 16  # elements; with 4 bytes each that is a cache line
_REGION_BYTES = 1 << 21

View = Callable[[int, int, torch.dtype], Tensor]  # start in bytes, elements, type


@dataclass(frozen=True)
class Piece:
    """Where the gradient of one parameter lies."""

    start_bytes: int
    numel: int
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True)
class Region:
    """A part of the flat gradient that is summed as one task."""

    start_bytes: int
    numel: int
    dtype: torch.dtype


class Layout:
    """The flat gradient of a list of parameters."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.pieces: list[Piece] = []
        groups: dict[torch.dtype, list[int]] = {torch.float32: [], torch.float64: []}
        for index, parameter in enumerate(parameters):
            wide = parameter.dtype in (torch.float64, torch.complex128)
            groups[torch.float64 if wide else torch.float32].append(index)
        spans: list[tuple[int, int, torch.dtype]] = []
        placed: dict[int, Piece] = {}
        at = 0
        for dtype, indices in groups.items():
            start = at
            for index in indices:
                shape = real(parameters[index].detach()).shape
                placed[index] = Piece(at, shape.numel(), dtype, shape)
                at += -(-shape.numel() // _ALIGN) * _ALIGN * dtype.itemsize
            if at > start:
                spans.append((start, at, dtype))
        self.pieces = [placed[index] for index in range(len(parameters))]
        self.size_bytes = at
        self.regions = [r for span in spans for r in _regions(*span, at)]
        assert len(self.regions) <= REGIONS_MAX, "there are words for so many"

    def parts(self, view: View) -> list[Tensor]:
        """The pieces of a flat gradient, one for each parameter, in its shape."""
        return [view(p.start_bytes, p.numel, p.dtype).view(p.shape) for p in self.pieces]

    def groups(self, view: View) -> list[Tensor]:
        """The whole of a flat gradient, as one tensor for each type."""
        whole = []
        for dtype in (torch.float32, torch.float64):
            regions = [r for r in self.regions if r.dtype == dtype]
            if regions:
                numel = sum(r.numel for r in regions)
                whole.append(view(regions[0].start_bytes, numel, dtype))
        return whole

    def overlaps(self, region: Region) -> list[tuple[int, int, int, int]]:
        """(parameter, from, to, from in the region) for each parameter that lies in a region."""
        found = []
        end_bytes = region.start_bytes + region.numel * region.dtype.itemsize
        for index, piece in enumerate(self.pieces):
            size = piece.dtype.itemsize
            lo = max(piece.start_bytes, region.start_bytes)
            hi = min(piece.start_bytes + piece.numel * size, end_bytes)
            if lo < hi:
                first = (lo - piece.start_bytes) // size
                found.append(
                    (index, first, first + (hi - lo) // size, (lo - region.start_bytes) // size)
                )
        return found


def real(tensor: Tensor) -> Tensor:
    """A complex tensor as a real one with one dimension more."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _regions(start: int, end: int, dtype: torch.dtype, total_bytes: int) -> list[Region]:
    """Regions of one type: about two megabytes each, more where that would be too many."""
    share = -(-total_bytes // (REGIONS_MAX - 2))
    length = max(_REGION_BYTES, -(-share // 4096) * 4096)
    return [
        Region(at, (min(at + length, end) - at) // dtype.itemsize, dtype)
        for at in range(start, end, length)
    ]
