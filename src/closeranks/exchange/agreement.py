"""What all ranks of a group settle before gradients travel in a wire format.

Which format: the same on all, or the same error on all. And a second group for it, under a name
that all of them know: each rank counts how many it has made, and they take the largest count, for
one rank may have copied a wrapped module alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from closeranks.exchange.beside import make_beside
from closeranks.exchange.group import GroupExchange
from closeranks.wire.formats import Format, parse

if TYPE_CHECKING:
    from closeranks.exchange.handshake import Wait

_WISH_BYTES = 4 * 40  # of a wish of 40 characters

_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def tell_wish(group: GroupExchange, wire: str, device: torch.device, wait: Wait) -> list[str]:
    """Which format each rank of a group wants, by rank."""
    own = torch.tensor(list(wire.encode()), dtype=torch.int32)
    everyones = torch.zeros(group.size, _WISH_BYTES, dtype=torch.int32)
    everyones[group.rank, : len(own)] = own
    everyones = everyones.to(device)
    wait(group.all_reduce(everyones), lambda: "the agreement on a wire format")
    return [bytes(row).rstrip(b"\0").decode() for row in everyones.tolist()]


def agreed(wishes: Sequence[str]) -> Format:
    """The format that all ranks want; else the same error on every rank."""
    for rank, wish in enumerate(wishes):
        try:
            parse(wish)
        except ValueError as error:
            raise ValueError(
                f"wire={wish!r} on rank {rank}: {error}. No rank trains; correct the argument "
                "wire= of DistributedDataParallel, or CLOSERANKS_WIRE."
            ) from error
    other = next((rank for rank, wish in enumerate(wishes) if wish != wishes[0]), None)
    if other is not None:
        raise ValueError(
            f"wire={wishes[0]!r} on rank 0 and wire={wishes[other]!r} on rank {other}. No rank "
            "trains; give every rank the same wire= or the same CLOSERANKS_WIRE."
        )
    return parse(wishes[0])


def second_group(group: GroupExchange, device: torch.device, wait: Wait) -> GroupExchange | None:
    """A group of the same ranks for one exchange's second collectives, if gloo can make one.

    Not for GPUs: what gloo would make is slower than NCCL by more than an order is worth.
    """
    if device.type != "cpu":
        return None
    number = torch.tensor([_counts.get(group.group, 0)], dtype=torch.int32, device=device)
    wait(group.all_max(number), lambda: "the agreement on a second group")
    _counts[group.group] = int(number.item()) + 1
    made = make_beside(group.group, f"wire/{number.item()}")
    return None if made is None else GroupExchange(made)
