"""Collectives of tensors of any shape, made of those of flat ones.

Each runs in its turn, so that also what is copied here comes after all collectives before it. Knows
a passage and tensors; must not know groups or torch's options.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from closeranks.backend.tensors import flattened, put_back
from closeranks.exchange.hosts_passage import HostsPassage
from closeranks.exchange.passage import Passage
from closeranks.exchange.reduction import Fold

Reduces = Passage | HostsPassage


def all_reduce(passage: Reduces, tensors: Sequence[Tensor], fold: Fold) -> None:
    for tensor in tensors:
        flat = flattened(tensor)
        passage.all_reduce(flat, fold)
        put_back(tensor, flat)


def broadcast(passage: Passage, tensor: Tensor, source: int) -> None:
    flat = flattened(tensor)
    passage.broadcast(flat, source)
    put_back(tensor, flat)


def all_gather(
    passage: Passage, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]
) -> None:
    for row, tensor in zip(outputs, inputs, strict=True):
        flats = [flattened(output) for output in row]
        passage.all_gather(flats, flattened(tensor))
        for output, flat in zip(row, flats, strict=True):
            put_back(output, flat)


def all_gather_whole(passage: Passage, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    for output, tensor in zip(outputs, inputs, strict=True):
        flat = flattened(output)
        passage.all_gather(flat.chunk(passage.size), flattened(tensor))
        put_back(output, flat)


def reduce_scatter(passage: Reduces, output: Tensor, inputs: Sequence[Tensor], fold: Fold) -> None:
    flat = flattened(output)
    passage.reduce_scatter(flat, [flattened(tensor) for tensor in inputs], fold)
    put_back(output, flat)


def reduce_scatter_whole(
    passage: Reduces, outputs: Sequence[Tensor], inputs: Sequence[Tensor], fold: Fold
) -> None:
    for output, tensor in zip(outputs, inputs, strict=True):
        flat = flattened(output)
        passage.reduce_scatter(flat, flattened(tensor).chunk(passage.size), fold)
        put_back(output, flat)
