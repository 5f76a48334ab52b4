"""What closeranks.init() does: meet the other ranks, then make the default process group.

Knows the order of things; what the environment means is decided in environment.py, and how the
ranks find each other is in meeting.py. Knows nothing of models.

    1. Meet: open the store, learn every rank's host.
    2. Make the group on that store, with gloo on the loopback interface if all share a host, and
       else on the one by which they reach each other.
    3. Fill the environment, and see to it that the group is gone before the interpreter is.
"""

from __future__ import annotations

import atexit
import collections
import functools
import os
import socket
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.constants import default_pg_timeout

from closeranks.world.environment import World, is_loopback, read_launch
from closeranks.world.interface import address_towards, interface_towards
from closeranks.world.meeting import meet, open_store, this_host

# The same meeting point may be used again after destroy_process_group; its keys must be fresh then.
_met: collections.Counter[tuple[str, int]] = collections.Counter()


def join_group(backend: str | None, timeout: timedelta | float | None) -> World:
    """The whole of closeranks.init(); its promises stand there."""
    limit = _as_timedelta(timeout)
    if dist.is_initialized():
        return _world_of_group(backend, limit or default_pg_timeout)
    launch = read_launch(os.environ)
    # Phase 1
    store, address, port = open_store(launch, limit or default_pg_timeout)
    store = PrefixStore(f"closeranks/{_met[address, port]}", store)
    store.set(f"address/{launch.rank}", address_towards(address))
    hosts = meet(store, launch.rank, launch.size, limit or default_pg_timeout)
    host = hosts[launch.rank]
    local_rank, local_size = _local_place(launch.local_rank, launch.local_size, launch.rank, hosts)
    world = World(launch.rank, launch.size, local_rank, local_size, host, launch.epoch)
    # Phase 2
    if len(set(hosts)) == 1:
        _keep_gloo_on_loopback()
    else:
        _point_gloo_to_the_others(store, address, launch.rank, hosts)
    dist.init_process_group(
        backend or _default_backend(),
        store=PrefixStore("default_pg", store),
        rank=world.rank,
        world_size=world.size,
        timeout=limit,
    )
    _met[address, port] += 1
    # Phase 3
    _fill_environment(world)
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    _destroy_at_exit(os.getpid())
    return world


def _as_timedelta(timeout: timedelta | float | None) -> timedelta | None:
    if timeout is None:
        return None
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if limit <= timedelta(0):
        raise ValueError(f"timeout={timeout!r} must be more than 0 (a timedelta, or seconds)")
    return limit


def _default_backend() -> str:
    if torch.cuda.is_available() and dist.is_nccl_available():
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def _world_of_group(backend: str | None, limit: timedelta) -> World:
    """The World of a group that somebody else has made; the group is right about rank and size."""
    made = dist.get_backend()
    if backend is not None and backend not in (made, str(dist.get_backend_config())):
        warnings.warn(
            f"init(backend={backend!r}): a default process group with backend {made!r} is there "
            "already and is used. Call init() before whatever made it, or leave backend out.",
            stacklevel=4,
        )
    rank, size = dist.get_rank(), dist.get_world_size()
    local_rank, local_size = _local_variables(size)
    if local_rank is None or local_size is None:
        store = PrefixStore("closeranks/hosts", dist.distributed_c10d._get_default_store())
        local_rank, local_size = _local_place(None, None, rank, meet(store, rank, size, limit))
    epoch = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    world = World(
        rank, size, local_rank, local_size, this_host(), int(epoch) if epoch.isdigit() else 0
    )
    _fill_environment(world)
    return world


def _local_variables(size: int) -> tuple[int | None, int | None]:
    """LOCAL_RANK and LOCAL_WORLD_SIZE if both are set and can be true of this group."""
    if size == 1:
        return 0, 1
    texts = [os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if not all(text.isdigit() for text in texts):
        return None, None
    local_rank, local_size = (int(text) for text in texts)
    return (local_rank, local_size) if local_rank < local_size <= size else (None, None)


def _local_place(
    local_rank: int | None, local_size: int | None, rank: int, hosts: list[str]
) -> tuple[int, int]:
    """What the launcher told, and where it did not, a count of the ranks on this host."""
    here = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    if local_rank is None:
        return here.index(rank), len(here)
    return local_rank, local_size or max(len(here), local_rank + 1)


def _keep_gloo_on_loopback() -> None:
    """Where all ranks share a host, gloo need neither look up its name nor use the network."""
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback and not os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]


def _point_gloo_to_the_others(store: Store, address: str, rank: int, hosts: list[str]) -> None:
    """Where ranks are on several hosts, gloo uses the interface by which they reach each other."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    if is_loopback(address_towards(address)):  # The meeting point is here, under a name of its own.
        other = next(r for r, host in enumerate(hosts) if host != hosts[rank])
        address = store.get(f"address/{other}").decode() or address
    interface = interface_towards(address)
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def _fill_environment(world: World) -> None:
    for name, value in (
        ("RANK", world.rank),
        ("WORLD_SIZE", world.size),
        ("LOCAL_RANK", world.local_rank),
        ("LOCAL_WORLD_SIZE", world.local_size),
    ):
        if not os.environ.get(name):
            os.environ[name] = str(value)


@functools.cache  # once in this process, also when init() is called again
def _destroy_at_exit(pid: int) -> None:
    """A gloo group that outlives the interpreter aborts some exits ("terminate called ...").

    NCCL is left to the user: destroying it after an exception may wait for peers that never come.
    """

    def destroy() -> None:
        ours = os.getpid() == pid and dist.is_initialized()
        if ours and "nccl" not in str(dist.get_backend_config()):
            dist.destroy_process_group()

    atexit.register(destroy)
