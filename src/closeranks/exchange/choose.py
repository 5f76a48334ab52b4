"""Which way the ranks of a group exchange: through the memory of each host, by groups, or by both.

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
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.constants import default_pg_timeout

from closeranks.exchange import attendance
from closeranks.exchange.agreement import agreed, second_group, tell_wish
from closeranks.exchange.grid import Grid, arrange
from closeranks.exchange.group import GroupExchange
from closeranks.exchange.handshake import Facts, Handshake, Wait
from closeranks.exchange.hosts import HostsExchange
from closeranks.exchange.lookout import Crowd
from closeranks.exchange.meshes import Meshes
from closeranks.exchange.shm import ShmExchange
from closeranks.exchange.wired import WiredExchange
from closeranks.wire.formats import EXACT, Format

if TYPE_CHECKING:
    from closeranks.exchange.base import Between, Exchange
    from closeranks.segment.team import Team

logger = logging.getLogger("closeranks")

# What the environment may ask for, by variable.
_EXCHANGE, _KERNELS = "CLOSERANKS_EXCHANGE", "CLOSERANKS_KERNELS"
_POSSIBLE = {_EXCHANGE: ("auto", "shm", "group"), _KERNELS: ("auto", "c", "python")}
_APART = "the ranks are on several hosts or in several containers"
_WIRE = "wire"
_WISH_MAX = 40  # characters of a wish that are passed on


@dataclass(frozen=True)
class Choice:
    """What was decided, and why."""

    shm: bool  # ranks that share a host share memory
    reason: str
    kernels: str = ""
    is_worrying: bool = False  # memory would have been shared, had nothing gone wrong
    by_group: bool = False  # even ranks on several hosts exchange as if they were on one


def decide(everyones: Sequence[Facts]) -> Choice:
    """From the facts of all ranks (handshake.py)."""
    _check_wishes(everyones)
    exchanges = {facts["wishes"][_EXCHANGE] for facts in everyones}
    if "group" in exchanges:
        return Choice(False, f"{_EXCHANGE}=group", by_group=True)
    grid = arrange([facts["host"] for facts in everyones])
    choice = _look(everyones, grid)
    if choice.shm and len(grid.rows) > 1 and "shm" in exchanges:
        choice = Choice(False, _APART)
    return _grant(choice, everyones)


def _grant(choice: Choice, everyones: Sequence[Facts]) -> Choice:
    """The choice, unless some rank will have nothing but shared memory."""
    if not choice.shm and any(facts["wishes"][_EXCHANGE] == "shm" for facts in everyones):
        raise ValueError(
            f"{_EXCHANGE}=shm, but {choice.reason}. No rank trains; remove what is in the way, "
            f"or leave {_EXCHANGE} out, to exchange through the process group then."
        )
    return choice


def _look(everyones: Sequence[Facts], grid: Grid) -> Choice:
    """What would be right if nobody had a wish about the way."""
    if not grid.shares:
        return Choice(False, _APART)
    for rank, facts in enumerate(everyones):
        if facts["unable"]:
            why = f"rank {rank} cannot share memory: {facts['unable']}"
            return Choice(False, why, is_worrying=facts["failed"])
    wanted = {facts["wishes"][_KERNELS] for facts in everyones} - {"auto"}
    for kind in ("c", "python"):
        without = [rank for rank, facts in enumerate(everyones) if kind not in facts["kernels"]]
        if not without and wanted <= {kind}:
            where = "share this host and its memory"
            if len(grid.rows) > 1:
                where = "on each host share its memory"
            return Choice(True, f"all ranks {where}", kind)
        if without and wanted == {kind}:
            raise ValueError(f"{_KERNELS}={kind}, but rank {without[0]} {_WITHOUT[kind]}")
    if wanted == {"c", "python"}:
        raise ValueError(
            f"{_KERNELS} is c on some ranks and python on others. No rank trains; wish the same "
            "on all, or on none."
        )
    return Choice(False, "not all ranks have the C kernels, and this machine is not x86")


_WITHOUT = {
    "c": "has no C kernels. No rank trains; install closeranks with a C compiler at hand, or leave "
    "the variable out, to sum in Python then.",
    "python": "is not on x86, where alone the kernels in Python keep the order of what they write. "
    "No rank trains; leave the variable out.",
}


def _check_wishes(everyones: Sequence[Facts]) -> None:
    for variable, possible in _POSSIBLE.items():
        for rank, facts in enumerate(everyones):
            wish = facts["wishes"][variable]
            if wish not in possible:
                raise ValueError(
                    f"{variable}={wish!r} on rank {rank}: wanted {', '.join(possible)}. No rank "
                    "trains; correct it."
                )
    agreed([facts["wishes"][_WIRE] for facts in everyones])


def choose(
    group: dist.ProcessGroup, device: torch.device, wait: Wait, wire: str = EXACT
) -> Exchange:
    """The exchange of a group. Every rank of it calls this at the same point of its program.

    Args:
        device: where the tensors are that will be exchanged.
        wait: waits for a collective of the group, and explains the failure of one.
        wire: the format of gradients between ranks that share no memory; wire/formats has them.
    """
    by_group = GroupExchange(group)
    exchange: Exchange = by_group
    reason = _why_not(group, by_group.size, device)
    if reason:
        form = agreed(tell_wish(by_group, wire[:_WISH_MAX], device, wait))
    else:
        gathered = gather(by_group, wait, _timeout_s(group), wire)
        form, reason = agreed([wire]), gathered.reason
        exchange = _between_or_inside(gathered, by_group, wait, form)
    if exchange is by_group and by_group.size > 1 and not form.is_exact:
        exchange = WiredExchange(by_group, form, second_group(by_group, device, wait))
    if exchange.is_exact and not form.is_exact and by_group.rank == 0:
        logger.info("wire=%s: gradients pass through no network here, so they stay exact", form)
    logger.info("rank %d exchanges by %s: %s", by_group.rank, exchange.way, reason)
    return exchange


def _between_or_inside(
    gathered: Gathered, by_group: GroupExchange, wait: Wait, form: Format
) -> Exchange:
    team, crowd = gathered.team, gathered.crowd
    store = attendance.store_of(by_group.group)
    backend = by_group.group._get_backend(torch.device("cpu"))
    is_gloo = isinstance(backend, dist.ProcessGroupGloo)  # MPI tells nothing of its connections.
    if gathered.is_on_hosts and store is not None and is_gloo:
        number = attendance.instance_number(by_group.group)
        store = PrefixStore(f"closeranks/hosts/{number}", store)
        meshes = Meshes(crowd, backend, store, team is not None, not form.is_exact)
        inside = None if team is None else ShmExchange(team, by_group)
        return HostsExchange(meshes, inside, _between(meshes, team is not None, form), form, wait)
    if team is not None and not gathered.is_on_hosts:
        return ShmExchange(team, by_group)
    return by_group


def _between(meshes: Meshes, by_columns: bool, form: Format) -> Between | None:
    """What carries sums from host to host; nothing on a rank that has no slice."""
    mesh = meshes.column if by_columns else meshes.flat
    if mesh is None:
        return None
    group = GroupExchange(mesh.group)
    if meshes.turns is None:
        return group
    return WiredExchange(group, form, GroupExchange(meshes.turns.group))


@dataclass(frozen=True)
class Gathered:
    """What the ranks of a group have found out about each other."""

    team: Team | None  # the ranks of this host, if they share memory
    crowd: Crowd
    is_on_hosts: bool  # there are several, and they may exchange as such
    reason: str


def gather(by_group: GroupExchange, wait: Wait, timeout_s: float, wire: str = EXACT) -> Gathered:
    """Who shares memory with whom. For all ranks of a group at once.

    Args:
        timeout_s: how long a team waits for a rank in a collective.
    """
    handshake = Handshake(by_group, wait)
    wishes = {v: (os.environ.get(v) or "auto")[:_WISH_MAX] for v in _POSSIBLE}
    everyones = handshake.tell({**wishes, _WIRE: wire[:_WISH_MAX]})
    choice = decide(everyones)
    grid = arrange([facts["host"] for facts in everyones])
    mates = grid.row_of(by_group.rank)
    team = handshake.meet(everyones, mates, choice.kernels, timeout_s) if choice.shm else None
    if choice.shm and team is None:
        why = "a rank could not map the memory of another"
        choice = _grant(Choice(False, why, is_worrying=True), everyones)
    if choice.is_worrying and by_group.rank == 0:
        logger.warning(
            "The %d ranks share no memory, but could have: %s. They exchange by %s: slower, but "
            "right. Free memory or descriptors, or raise the limits of the container.",
            by_group.size,
            choice.reason,
            by_group.way,
        )
    crowd = Crowd(by_group.rank, grid, [facts["name"] for facts in everyones])
    is_on_hosts = len(grid.rows) > 1 and not choice.by_group
    return Gathered(team, crowd, is_on_hosts, choice.reason)


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
