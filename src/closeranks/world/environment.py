"""What the environment says about this process's place among the ranks.

Pure: takes a mapping, returns frozen values, raises ValueError naming variables, their values and
what to do. Knows nothing of process groups, sockets or the real environment.

    1. RANK and WORLD_SIZE are set (closeranks run, torchrun, Accelerate, Kubeflow, a loop of the
       user's): they are believed. What else is unset comes from the scheduler if it agrees.
    2. A scheduler made this process (mpirun, srun; schedulers.py): what is unset comes from it,
       and what is set must agree with it.
    3. Nothing is set: a world of one. Traces of a launcher that did not start us are an error,
       because training one n-th of the job in silence is the worst outcome.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from closeranks.world.schedulers import LOOPBACK, Task, forgotten_launcher, read_task
from closeranks.world.variables import Variables

_START = "`closeranks run`, torchrun, srun or mpirun"


@dataclass(frozen=True)
class World:
    """This process's place among the ranks. Made by the life of a job, used by its data path."""

    rank: int
    size: int
    local_rank: int  # among the ranks of this host
    local_size: int
    host: str  # equal for two ranks only if they share a machine, its boot and its network
    epoch: int  # how often the ranks of this job have been started again

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"
        assert 0 <= self.local_rank < self.local_size <= self.size, (
            f"local rank {self.local_rank} of {self.local_size}, world size {self.size}"
        )
        assert self.epoch >= 0, f"epoch {self.epoch}"


@dataclass(frozen=True)
class Launch:
    """What the environment tells; what it does not tell is None and is found out by meeting."""

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    address: str  # where the ranks meet
    port: int | None  # None: any free one; only a world of one may choose
    epoch: int
    agent_store: bool  # torchrun's agent already listens at the address, so rank 0 must not


def read_world(environ: Mapping[str, str], host: str = "localhost") -> World:
    """The World that these variables describe, for a process on this host.

    Where they do not tell about the host's other ranks, all ranks are assumed to be here if they
    meet on loopback, and one per host otherwise; init() finds out instead of assuming.
    """
    launch = read_launch(environ)
    alone = (launch.rank, launch.size) if is_loopback(launch.address) else (0, 1)
    local_rank, local_size = launch.local_rank, launch.local_size
    if local_rank is None and local_size is None:
        local_rank, local_size = alone
    elif local_rank is None:
        local_rank = launch.rank % (local_size or 1)
    elif local_size is None:
        local_size = max(alone[1], local_rank + 1)
    assert local_rank is not None and local_size is not None, "both were just filled"
    return World(launch.rank, launch.size, local_rank, local_size, host, launch.epoch)


def read_launch(environ: Mapping[str, str]) -> Launch:
    """What these variables say, or ValueError if they are half-set or contradict each other."""
    variables = Variables(environ)
    rank, size = variables.number("RANK"), variables.number("WORLD_SIZE")
    task = read_task(variables) if rank is None or size is None else _agreeing_task(variables)
    if rank is None and size is None and task is None:
        return _read_alone(variables)
    if task is not None:
        _check_agreement(variables, task)
        rank, size = task.rank, task.size
    if rank is None or size is None:
        missing = "RANK" if rank is None else "WORLD_SIZE"
        raise ValueError(
            f"{variables.shown('RANK', 'WORLD_SIZE')}: without {missing} this process cannot know "
            f"its place among the ranks. Nothing was started; start with {_START}, which set both, "
            "set it yourself, or unset both for a world of one."
        )
    if not rank < size:
        raise ValueError(
            f"{variables.shown('RANK', 'WORLD_SIZE')} contradict each other: a rank must be in "
            f"0..WORLD_SIZE-1. Nothing was started; correct them, or start with {_START}."
        )
    local_rank, local_size = _read_local(variables, task, size)
    address, port = _read_meeting_point(variables, task, size)
    return Launch(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        address=address,
        port=port,
        epoch=variables.number("TORCHELASTIC_RESTART_COUNT") or 0,
        agent_store=variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def is_loopback(address: str) -> bool:
    """Whether an address (a name other than localhost is not looked up) is this host's own."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _agreeing_task(variables: Variables) -> Task | None:
    """The scheduler's task if it has the rank and size that are set.

    torchrun under srun is not contradictory: the scheduler counts torchrun's agents then.
    """
    try:
        task = read_task(variables)
    except ValueError:
        return None  # RANK and WORLD_SIZE say all that it could have said
    agrees = task is not None and (
        (task.rank, task.size) == (variables.number("RANK"), variables.number("WORLD_SIZE"))
    )
    return task if agrees else None


def _check_agreement(variables: Variables, task: Task) -> None:
    for name, wanted, shown in (
        ("RANK", task.rank, task.rank_shown),
        ("WORLD_SIZE", task.size, task.size_shown),
    ):
        if variables.number(name) not in (None, wanted):
            raise ValueError(
                f"{variables.shown(name)} and {shown} contradict each other. Nothing was started; "
                f"unset {name} to take what {task.scheduler} says, or set both RANK and WORLD_SIZE."
            )


def _read_alone(variables: Variables) -> Launch:
    """A world of one, unless something says that there should be more."""
    forgotten = forgotten_launcher(variables)
    if forgotten is not None:
        raise ValueError(forgotten)
    names = ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    address = variables.text("MASTER_ADDR") or LOOPBACK
    if is_loopback(address):
        names.remove("MASTER_ADDR")  # harmless
    if variables.text(*names) is not None:
        raise ValueError(
            f"{variables.shown(*names)}, but RANK and WORLD_SIZE are unset: this process cannot "
            f"know its place among the ranks. Nothing was started; start with {_START}, or unset "
            "these variables for a world of one."
        )
    return Launch(0, 1, 0, 1, address, variables.number("MASTER_PORT"), 0, agent_store=False)


def _read_local(
    variables: Variables, task: Task | None, size: int
) -> tuple[int | None, int | None]:
    local_rank, local_size = variables.number("LOCAL_RANK"), variables.number("LOCAL_WORLD_SIZE")
    shown = variables.shown("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    if task is not None:
        local_rank = task.local_rank if local_rank is None else local_rank
        local_size = task.local_size if local_size is None else local_size
        shown = f"{shown} (under {task.scheduler}: {task.local_rank} of {task.local_size})"
    if size == 1 and local_size is None:
        local_rank, local_size = local_rank or 0, 1
    if (local_rank is not None and local_rank >= (local_size or size)) or (
        local_size is not None and not 1 <= local_size <= size
    ):
        raise ValueError(
            f"{shown} contradict each other: LOCAL_RANK must be in 0..LOCAL_WORLD_SIZE-1 and "
            "LOCAL_WORLD_SIZE in 1..WORLD_SIZE. Nothing was started; correct or unset them."
        )
    return local_rank, local_size


def _read_meeting_point(
    variables: Variables, task: Task | None, size: int
) -> tuple[str, int | None]:
    address, port = variables.text("MASTER_ADDR"), variables.number("MASTER_PORT")
    if port is not None and not 1 <= port <= 65535:
        raise ValueError(
            f"MASTER_PORT={port} is not in 1..65535. Nothing was started; correct or unset it."
        )
    if task is not None:
        address, port = address or task.address, port or task.port
    if size == 1:
        return address or LOOPBACK, port
    if address is None or port is None:
        reason = f" ({task.no_address})" if task is not None and task.no_address else ""
        shown = variables.shown("MASTER_ADDR", "MASTER_PORT")
        raise ValueError(
            f"{shown}{reason}: {size} ranks need a place to meet. Nothing was started; set "
            "MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, both equal on "
            f"every rank, or start with {_START}, which set them."
        )
    return address, port
