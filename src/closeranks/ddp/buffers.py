"""Buffers follow one rank: many small tensors travel as a few flat ones.

Knows tensors and an exchange; which buffers, when, and whom they follow is the wrapper's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from closeranks.exchange.base import Exchange
    from closeranks.reducer.waiting import Waiter


@torch.no_grad()
def broadcast(
    tensors: Iterable[Tensor], source: int, size_bytes_max: int, by: Exchange, waiter: Waiter
) -> None:
    """Replace the tensors by those of rank `source`; all ranks pass the same kinds and sizes."""
    for members in _batches(tensors, size_bytes_max):
        flat = torch.cat([_plain(t).reshape(-1) for t in members])
        waiter.wait(by.broadcast(flat, source), lambda: "the broadcast of buffers")
        if by.rank == source:
            continue
        for tensor, piece in zip(members, flat.split([t.numel() for t in members]), strict=True):
            _plain(tensor).copy_(piece.view(tensor.shape))


def _plain(tensor: Tensor) -> Tensor:
    """The same memory without a version: a graph that has saved a buffer may still be used."""
    return tensor.data


def _batches(tensors: Iterable[Tensor], size_bytes_max: int) -> Iterator[list[Tensor]]:
    """Tensors of one dtype and device, in order, in batches of about the given size."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for members in kinds.values():
        batch: list[Tensor] = []
        size_bytes = 0
        for tensor in members:
            batch.append(tensor)
            size_bytes += tensor.numel() * tensor.element_size()
            if size_bytes >= size_bytes_max:
                yield batch
                batch, size_bytes = [], 0
        if batch:
            yield batch
