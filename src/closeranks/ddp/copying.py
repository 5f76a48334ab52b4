"""Copying and pickling a wrapped module: what stays behind, and which group the copy finds.

Process groups and reducers belong to a process. A pickle remembers the ranks of its group and
finds the live group with the same ranks, else the default group, with a warning. A deep copy
stays in the group of the original.
"""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

logger = logging.getLogger("closeranks")

# Made anew from the rest.
_LEFT_BEHIND = (
    "process_group",
    "reducer",
    "logger",
    "device_mesh",
    "_exchange",
    "_waiter",
    "_delayed",
    "_join_config",
)


def portable_state(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes that may travel, and the ranks of the group."""
    state = {k: v for k, v in attributes.items() if k not in _LEFT_BEHIND}
    state["broadcast_buffers"] = state["forward_sync_buffers"]  # torch's class reads this name.
    state["_group_ranks"] = ranks_of(attributes["process_group"])
    return state


def ranks_of(group: dist.ProcessGroup) -> list[int] | None:
    """The global ranks of a group, None if torch.distributed does not know it."""
    mapping = dist.distributed_c10d._world.pg_group_ranks.get(group)
    return None if mapping is None else sorted(mapping)


def find_group(ranks: list[int] | None) -> dist.ProcessGroup:
    """The live group with these ranks, preferring the default group; else the default group."""
    if not dist.is_initialized():
        raise RuntimeError(
            "Unpickling a DistributedDataParallel module needs a process group. Call "
            "torch.distributed.init_process_group() first, or pickle ddp.module instead."
        )
    default: dist.ProcessGroup = dist.distributed_c10d._get_default_group()
    if ranks is None or ranks == ranks_of(default):
        return default
    for group in dist.distributed_c10d._world.pg_map:
        if ranks_of(group) == ranks:
            return group
    logger.warning(
        "This DistributedDataParallel module was pickled in a process group of ranks %s, and no "
        "such group is alive here. It uses the default group of %d ranks; create the group with "
        "torch.distributed.new_group(%s) before unpickling to keep it.",
        ranks,
        default.size(),
        ranks,
    )
    return default
