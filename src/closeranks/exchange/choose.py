"""Which way the ranks of a group exchange: through shared memory if they can, else by the group.

`decide` is pure and comes to the same result on every rank; `choose` is the shell around it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from closeranks.exchange.group import GroupExchange
from closeranks.exchange.handshake import Facts, Handshake, Wait
from closeranks.exchange.shm import ShmExchange

if TYPE_CHECKING:
    from closeranks.exchange.base import Exchange
    from closeranks.segment.team import Team

logger = logging.getLogger("closeranks")

_WISHES = ("auto", "shm", "group")


@dataclass(frozen=True)
class Choice:
    """What was decided, and why."""

    shm: bool
    reason: str
    kernels: str = ""


def decide(everyones: Sequence[Facts]) -> Choice:
    """From the facts of all ranks (handshake.py)."""
    wishes = {facts["wish"] for facts in everyones}
    if not wishes <= set(_WISHES):
        wrong = min(wishes - set(_WISHES))
        raise ValueError(
            f"CLOSERANKS_EXCHANGE={wrong!r}: wanted auto, shm or group. No rank trains; correct it."
        )
    if "group" in wishes:
        return Choice(False, "CLOSERANKS_EXCHANGE=group")
    unable = [(rank, facts["unable"]) for rank, facts in enumerate(everyones) if facts["unable"]]
    if len({facts["host"] for facts in everyones}) > 1:
        problem = "the ranks are on several hosts"
    elif unable:
        problem = f"rank {unable[0][0]} cannot share memory: {unable[0][1]}"
    else:
        known = everyones[0]["kernels"]
        common = [k for k in known if all(k in facts["kernels"] for facts in everyones)]
        if common:
            return Choice(True, "all ranks share this host and its memory", common[0])
        problem = "there are no kernels that all ranks can use; on this machine only C kernels can"
    if "shm" in wishes:
        raise ValueError(
            f"CLOSERANKS_EXCHANGE=shm, but {problem}. No rank trains; remove what is in the way, "
            "or leave CLOSERANKS_EXCHANGE out, to exchange through the process group then."
        )
    return Choice(False, problem)


def choose(group: dist.ProcessGroup, device: torch.device, wait: Wait) -> Exchange:
    """The exchange of a group. Every rank of it calls this at the same point of its program.

    Args:
        device: where the tensors are that will be exchanged.
        wait: waits for a collective of the group, and explains the failure of one.
    """
    by_group = GroupExchange(group)
    exchange: Exchange = by_group
    reason = _why_not(group, by_group.size, device)
    if not reason:
        team, reason = gather_team(by_group, wait, _timeout_s(group))
        if team is not None:
            exchange = ShmExchange(team, by_group)
    logger.info("rank %d exchanges by %s: %s", by_group.rank, exchange.way, reason)
    return exchange


def gather_team(by_group: GroupExchange, wait: Wait, timeout_s: float) -> tuple[Team | None, str]:
    """The ranks of a group as a team that shares memory, or none; and why. For all ranks at once.

    Args:
        timeout_s: how long the team waits for a rank in a collective.
    """
    handshake = Handshake(by_group, wait)
    everyones = handshake.tell(os.environ.get("CLOSERANKS_EXCHANGE") or "auto")
    choice = decide(everyones)
    if not choice.shm:
        return None, choice.reason
    team = handshake.meet(everyones, choice.kernels, timeout_s)
    return team, choice.reason if team else "a rank could not map the memory of another"


def _why_not(group: dist.ProcessGroup, size: int, device: torch.device) -> str:
    """What every rank knows by itself; if there is something, nobody is asked."""
    if size == 1:
        return "there is one rank"
    if device.type != "cpu":
        return f"the tensors are on {device.type}"
    # Door 2's group says of itself that it only moves bytes; others may do what users count on.
    if type(group) is not dist.ProcessGroup and not getattr(group, "only_moves_bytes", False):
        return "the process group is the user's own"
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return "the process group has no backend for the CPU"
    # These do nothing but move bytes, so nobody misses them.
    plain = [getattr(dist, n, None) for n in ("ProcessGroupGloo", "ProcessGroupMPI")]
    if type(backend) not in plain:
        return f"the backend for the CPU is {type(backend).__name__}"
    return ""


def _timeout_s(group: dist.ProcessGroup) -> float:
    """The timeout of the group's collectives."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", None) or default_pg_timeout
    return float(timeout.total_seconds())
