"""How the ranks find each other: the store at MASTER_ADDR:MASTER_PORT, and who is on which host.

Serves and reaches the store, and waits for every rank in it; a rank that does not come is named.
Decides nothing about ranks and addresses (environment.py has), and makes no process group.

Nothing here waits inside torch's store, whose waiting cannot be interrupted from the keyboard and
writes C++ stack traces: it knocks and polls.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import socket
import time
import uuid
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistNetworkError
from torch.distributed.constants import default_pg_timeout

from closeranks.errors import ExchangeFailed, PeerLost, RankAbsent
from closeranks.world.environment import Launch, is_loopback
from closeranks.world.schedulers import LOOPBACK

_log = logging.getLogger("closeranks")
_WARN_AFTER_S = 30.0
_RANKS_NAMED_MAX = 8
_PAUSE_S_MAX = 0.25  # between two looks at the store
_GAVE_UP = 1 << 40  # added to the count of arrivals: more than there ever are ranks

# Served until the process ends: after destroy_process_group the others may be here again first.
_served: dict[tuple[str, int], Store] = {}


def this_host() -> str:
    """A name of this host that no other host has; CLOSERANKS_HOST overrides it for tests."""
    override = os.environ.get("CLOSERANKS_HOST")
    if override:
        return override
    name = os.uname().nodename
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return name
    return f"{name}/{boot[:8]}.{network}"


def open_store(launch: Launch, limit: timedelta) -> tuple[Store, str, int]:
    """The store that the ranks meet at, and the address and port where it is.

    Rank 0 serves it, unless torchrun's agent does; the others knock until it answers.
    """
    if launch.rank == 0 and not launch.agent_store:
        server, address, port = _serve_store(launch, limit)
        _served[address, port] = server
        return server, address, port
    assert launch.port is not None, "only a world of one may leave the port open"
    _knock(launch, launch.port, limit.total_seconds())
    client = TCPStore(launch.address, launch.port, is_master=False, timeout=limit)
    return client, launch.address, launch.port


def serve_for_job(address: str, listener_fd: int) -> None:
    """Serve the job's store, until this process ends, on a socket that its launcher listens at."""
    listener = socket.socket(fileno=listener_fd)
    port: int = listener.getsockname()[1]
    server, _, _ = _serve_on(listener, address, default_pg_timeout)
    _served[address, port] = server


def meet(store: Store, rank: int, size: int, limit: timedelta) -> list[str]:
    """Tell the others which host this rank is on, wait for all, and return all hosts by rank.

    If it comes to nothing, every rank that is there raises an error of the same class.
    """
    me = _token(os.getpid())
    try:
        claimed_by = store.compare_set(f"claimed/{rank}", "", me).decode()
        if claimed_by != me:
            raise ValueError(
                f"two processes say that they are rank {rank} of {size}. Nothing was started; give "
                "every process a RANK of its own in 0..WORLD_SIZE-1."
            )
        store.set(f"host/{rank}", this_host())
        if store.add(f"arrivals/{rank}", 1) == 1:  # else this process was here before
            store.add("arrived", 1)
        _wait_for_all(store, rank, size, limit.total_seconds())
        return [host.decode() for host in store.multi_get([f"host/{r}" for r in range(size)])]
    except DistNetworkError as error:
        raise PeerLost(
            f"rank {rank} lost the store that the {size} ranks meet at: {error}. Rank 0 (or the "
            "launcher, which serves the store under torchrun) has died; look at its output, then "
            "start again."
        ) from error
    except (RankAbsent, ValueError) as error:
        store.set("gave_up", f"{type(error).__name__}:{error}")
        store.add("arrived", _GAVE_UP)
        if rank == 0:
            time.sleep(2 * _PAUSE_S_MAX)  # it may serve the store: let the others read why
        raise


def _serve_store(launch: Launch, limit: timedelta) -> tuple[Store, str, int]:
    """Serve the store at the launch's address; on loopback alone if that is a loopback address.

    torch's own server listens on every interface, so a loopback one gets its socket from us. A port
    that is taken may belong to a store of this very process, left from a group destroyed since;
    torch's server shares that one. A world of one, which nobody has to find, takes another port.
    """
    address, port = launch.address, launch.port or 0
    try:
        listener = _listen(address, port) if is_loopback(address) else None
        if listener is not None:
            return _serve_on(listener, address, limit)
        server = TCPStore(
            address, port, is_master=True, timeout=limit, wait_for_workers=False, multi_tenant=True
        )
        return server, address, server.port
    except (OSError, DistNetworkError) as error:
        if launch.size == 1:
            free = _listen(LOOPBACK, 0)
            assert free is not None, "port 0 is never taken"
            return _serve_on(free, LOOPBACK, limit)
        raise ExchangeFailed(
            f"rank 0 cannot listen at MASTER_ADDR={address}, MASTER_PORT={port}, where the other "
            f"{launch.size - 1} ranks look for it: {error}. Set MASTER_ADDR to "
            "rank 0's host and MASTER_PORT to a free port there, equal on every rank (and see that "
            "only one process has RANK=0)."
        ) from error


def _listen(address: str, port: int) -> socket.socket | None:
    """A listening socket, or None if the port is taken."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK if address == "localhost" else address, port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return listener


def _serve_on(listener: socket.socket, address: str, limit: timedelta) -> tuple[Store, str, int]:
    port: int = listener.getsockname()[1]
    server = TCPStore(
        address,
        port,
        is_master=True,
        timeout=limit,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
    return server, address, port


def _knock(launch: Launch, port: int, limit_s: float) -> None:
    """Return when something answers at the store's port."""
    started, warn_after_s, pause_s = time.monotonic(), _WARN_AFTER_S, 0.005
    while True:
        try:
            socket.create_connection((launch.address, port), timeout=5.0).close()
            return
        except OSError as error:
            waited_s = time.monotonic() - started
            what = (
                f"rank {launch.rank} cannot reach rank 0's store at MASTER_ADDR={launch.address}, "
                f"MASTER_PORT={port}, since {waited_s:.1f} s: {error}"
            )
            if waited_s >= limit_s:
                raise RankAbsent(
                    f"{what}. Given up; look at rank 0's output: did it start, on that host, with "
                    "the same MASTER_PORT?"
                ) from error
        if waited_s >= warn_after_s:
            _log.warning("closeranks.init: %s; still trying", what)
            warn_after_s = float("inf")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S_MAX)


def _wait_for_all(store: Store, rank: int, size: int, limit_s: float) -> None:
    """Poll one counter until it says that all have arrived."""
    started, warn_after_s, pause_s = time.monotonic(), _WARN_AFTER_S, 0.001
    while (arrived := store.add("arrived", 0)) < size:
        waited_s = time.monotonic() - started
        if waited_s >= min(warn_after_s, limit_s):
            absent = [r for r in range(size) if not store.check([f"host/{r}"])]
            named = ", ".join(map(str, absent[:_RANKS_NAMED_MAX]))
            more = len(absent) - _RANKS_NAMED_MAX
            what = (
                f"rank {rank} of {size} waits since {waited_s:.1f} s for {len(absent)} absent: "
                f"rank {named}{f' and {more} more' if more > 0 else ''}"
            )
            if waited_s >= limit_s:
                raise RankAbsent(
                    f"{what}. Given up; look at the output of the absent, and at whether the "
                    "launcher started as many processes as WORLD_SIZE says."
                )
            _log.warning("closeranks.init: %s; still waiting", what)
            warn_after_s = float("inf")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S_MAX)
    if arrived >= _GAVE_UP:
        kind, _, message = store.get("gave_up").decode().partition(":")
        raise RankAbsent(message) if kind == "RankAbsent" else ValueError(message)


@functools.cache
def _token(pid: int) -> str:
    """A name for this process that no other has, and no fork of it keeps."""
    return f"{pid}-{uuid.uuid4().hex}"
