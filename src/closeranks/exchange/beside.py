"""Connections beside a process group, for collectives that must not be counted among its own.

Gloo pairs the collectives of a group by the order in which each rank issues them. The reducer
issues a bucket when its gradients are there, which is not the same moment on every rank (a
parameter may be unused on one of them), so nothing else may be issued on its group during a
backward pass. This module knows neither the reducer nor what is exchanged.
"""

from __future__ import annotations

import atexit
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

# A group's side group lives as long as the group, and ends before the interpreter does.
_side_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
atexit.register(_side_groups.clear)


def side_group(group: Any, purpose: str) -> Any:
    """A gloo group of the same ranks, for CPU tensors. All of them make it by their first call.

    Where the group does not use gloo for CPU tensors, or was not made by torch.distributed, there
    is no way to make a second one without its ranks' help, and the group itself is returned.
    `purpose` tells several side groups of one group apart, and is part of the store's keys.
    """
    known: dict[str, Any] = _side_groups.setdefault(group, {})
    if purpose not in known:
        known[purpose] = make_beside(group, purpose)
    return known[purpose] or group


def make_beside(group: Any, purpose: str) -> Any | None:
    """A new such group, for whoever ends it; None where it cannot be made."""
    made_by_torch = dist.distributed_c10d._world.pg_map.get(group)
    if made_by_torch is None:
        return None
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # there is none for CPU tensors
        return None
    if not (dist.is_gloo_available() and isinstance(backend, dist.ProcessGroupGloo)):
        return None
    timeout: timedelta = backend.options._timeout
    store = PrefixStore(f"closeranks/{purpose}", made_by_torch[1])
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)
