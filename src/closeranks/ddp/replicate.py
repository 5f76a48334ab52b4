"""Makes replicas equal before training: first compares what was built, then copies rank 0's.

The comparison costs one small exchange when all is well: a hash of each rank's description. If
the hashes differ, two descriptions travel, and every rank raises the same error about them.
Knows modules and ranks; must not know buckets or hooks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from closeranks.errors import ModelMismatch

if TYPE_CHECKING:
    from closeranks.exchange.base import Exchange
    from closeranks.reducer.waiting import Waiter

_FIELDS = ("name", "shape", "strides", "dtype", "requires_grad")
_NEXT = (
    "No rank trains. Build the same model on every rank before wrapping: same code, same "
    "configuration, no branch on the rank, the same parameters frozen."
)


def describe(
    parameters: Sequence[tuple[str, Tensor]],
    buffers: Sequence[tuple[str, Tensor]],
    options: dict[str, Any],
) -> bytes:
    """Everything in which ranks must agree, as JSON."""
    entries = [
        [name, list(p.size()), list(p.stride()), str(p.dtype), p.requires_grad]
        for name, p in parameters
    ]
    held = [[name, list(b.size()), str(b.dtype)] for name, b in buffers]
    return json.dumps({"parameters": entries, "buffers": held, "options": options}).encode()


def compare(own: bytes, exchange: Exchange, waiter: Waiter, device: torch.device) -> None:
    """Raise the same ModelMismatch on every rank unless all descriptions are equal."""
    digest = hashlib.sha256(own).digest()
    words = torch.zeros(exchange.size, 8, dtype=torch.int32)
    words[exchange.rank] = torch.frombuffer(bytearray(digest), dtype=torch.int32)
    words = words.to(device)
    waiter.wait(exchange.all_reduce(words), lambda: "the comparison of models")
    rows = words.tolist()
    other = next((rank for rank, row in enumerate(rows) if row != rows[0]), None)
    if other is None:
        return
    specs = [_fetch(own, source, exchange, waiter, device) for source in (0, other)]
    raise ModelMismatch(difference(specs[0], specs[1], other))


def _fetch(
    own: bytes, source: int, exchange: Exchange, waiter: Waiter, device: torch.device
) -> dict[str, Any]:
    """The description of one rank, by two broadcasts."""
    length = torch.tensor([len(own)], dtype=torch.int64, device=device)
    waiter.wait(exchange.broadcast(length, source), lambda: "the comparison of models")
    text = torch.zeros(int(length.item()), dtype=torch.uint8)
    if exchange.rank == source:
        text.copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
    text = text.to(device)
    waiter.wait(exchange.broadcast(text, source), lambda: "the comparison of models")
    spec: dict[str, Any] = json.loads(bytes(text.cpu().tolist()))
    return spec


def difference(ours: dict[str, Any], theirs: dict[str, Any], rank: int) -> str:
    """The first difference between rank 0's description and another rank's, for people."""
    if ours["options"] != theirs["options"]:
        for key, value in ours["options"].items():
            if theirs["options"][key] != value:
                return (
                    f"DDP expects the same arguments on all ranks, but rank 0 has {key}={value} "
                    f"and rank {rank} has {key}={theirs['options'][key]}. No rank trains. Pass "
                    "the same arguments to DistributedDataParallel on every rank."
                )
    first, second = ours["parameters"], theirs["parameters"]
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return _parameter_difference(index, a, b, rank, len(first), len(second))
    if len(first) != len(second):
        longer, holder = (first, 0) if len(first) > len(second) else (second, rank)
        extra = longer[min(len(first), len(second))][0]
        return f"{_counts(first, second, rank)} Only rank {holder} has {extra}. {_NEXT}"
    return _buffer_difference(ours["buffers"], theirs["buffers"], rank)


def _counts(first: Sequence[Any], second: Sequence[Any], rank: int) -> str:
    return (
        f"DDP expects same model across all ranks, but Rank 0 has {len(first)} params, "
        f"while rank {rank} has inconsistent {len(second)} params."
    )


def _parameter_difference(
    index: int, a: list[Any], b: list[Any], rank: int, count_a: int, count_b: int
) -> str:
    field = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    what = _FIELDS[field]
    if count_a != count_b:
        head = (
            f"DDP expects same model across all ranks, but Rank 0 has {count_a} params, "
            f"while rank {rank} has inconsistent {count_b} params."
        )
    elif what in ("shape", "strides"):
        head = (
            f"[{rank}]: params[{index}] in this process with sizes {b[1]} appears not to match "
            "sizes/strides of the same param in process 0."
        )
    else:
        head = "DDP expects same model across all ranks."
    return (
        f"{head} The first difference: parameter {index} has {what} {_show(a[field])} "
        f"({_name(a)}) on rank 0 and {_show(b[field])} ({_name(b)}) on rank {rank}. {_NEXT}"
    )


def _buffer_difference(first: list[Any], second: list[Any], rank: int) -> str:
    for a, b in zip(first, second, strict=False):
        if a != b:
            return (
                "DDP expects same model across all ranks. The first difference: buffer "
                f"{a[0]} is {a[2]} {a[1]} on rank 0 and buffer {b[0]} is {b[2]} {b[1]} on rank "
                f"{rank}. {_NEXT}"
            )
    return (
        f"DDP expects same model across all ranks, but rank 0 has {len(first)} buffers and rank "
        f"{rank} has {len(second)}. {_NEXT}"
    )


def _name(entry: list[Any]) -> str:
    return f"{entry[0]}, {entry[3]}, shape {entry[1]}"


def _show(value: object) -> str:
    return str(value)
