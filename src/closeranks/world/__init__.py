"""Who am I among the ranks, and how do we meet: World, read_world() and init().

`World` is the one frozen value that the life of a job makes and its data path uses. Reading it is
pure (environment.py, hostlist.py); meeting the other ranks is a shell around it (group.py), loaded
on first use, so that a launcher can import World without importing torch. This package knows
nothing of models, gradients or exchanges.
"""

from __future__ import annotations

from datetime import timedelta

from closeranks.world.environment import World, read_world

__all__ = ["World", "init", "read_world"]


def init(backend: str | None = None, timeout: timedelta | float | None = None) -> World:
    """Take this process's place among the ranks and initialise the default process group.

    What `torch.distributed.init_process_group` does, under every launcher: closeranks run,
    torchrun, srun, mpirun (Open MPI), a framework that has already made a group (Ray Train,
    Accelerate), or none, which makes a world of one on a free port of the loopback interface.
    Every rank must call it. RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT are set where they are unset; variables that are set are believed. Where all ranks
    share one host, GLOO_SOCKET_IFNAME is set to the loopback interface (unless it is set), so that
    gloo neither looks up the host's name nor listens to the network; where they are on several, to
    the one by which they reach each other. The store that the ranks meet at listens on loopback
    alone if MASTER_ADDR is a loopback address. A gloo group made here is destroyed when the
    interpreter exits, if it still is there.

    backend: as in torch; None is "gloo", or "cpu:gloo,cuda:nccl" if CUDA is available. (The CUDA
        way has been run on one GPU, alone, but not between several.) If there is a group already
        it is used, with a warning if its backend differs. No CUDA device is chosen here.
    timeout: of the group and of this call, a timedelta or seconds; None is torch's own.

    Raises ValueError if the variables are half-set or contradict each other, RankAbsent if a rank
    did not come in time, ExchangeFailed if the ranks' meeting point cannot be opened.
    """
    from closeranks.world.group import join_group

    return join_group(backend, timeout)
