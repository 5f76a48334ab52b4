"""Which task of an srun step or of an mpirun job this process is, as its variables tell.

Pure: reads an environment, touches no network and no process group. What a scheduler does not tell
stays None, with the reason where the user has to supply it.

The variables below were read off Slurm 22.05 and Open MPI 4.1. SLURM_LAUNCH_NODE_IPADDR is not
used: it is the node where srun was typed, often a login node that the tasks cannot reach.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

from closeranks.world.hostlist import expand_hostlist, expand_task_counts
from closeranks.world.variables import Variables

LOOPBACK = "127.0.0.1"
# Below the range from which Linux gives ports to outgoing connections (32768 and up).
_PORT_FIRST, _PORTS = 10_000, 20_000
_STEPS_PER_JOB = 16  # neighbouring jobs on one host must not meet: 1250 jobs of 16 steps fit

_SLURM_STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")
_OMPI = "OMPI_COMM_WORLD_"
_HNP_URI = "OMPI_MCA_orte_hnp_uri"  # where mpirun itself listens
_DAEMON_URI = "OMPI_MCA_orte_local_daemon_uri"  # where this host's daemon listens


@dataclass(frozen=True)
class Task:
    """This process as its scheduler sees it."""

    scheduler: str
    rank: int
    size: int
    rank_shown: str  # "SLURM_PROCID=1": for messages
    size_shown: str
    local_rank: int | None
    local_size: int | None
    address: str | None
    port: int | None
    no_address: str = ""  # why address is None


def read_task(variables: Variables) -> Task | None:
    """The task that mpirun or srun made this process, or None.

    mpirun first: inside a Slurm job it starts its daemons with srun, whose variables shine through.
    """
    return _read_open_mpi(variables) or _read_slurm(variables)


def forgotten_launcher(variables: Variables) -> str | None:
    """A message if this process looks like one of several that were never, or not so, started."""
    if (variables.number("SLURM_NTASKS") or 1) > 1:
        shown = variables.shown("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID")
        return (
            f"{shown}: Slurm has granted several tasks, but this process was not started by srun, "
            "so the others would never come. Nothing was started; put `srun` before the command, "
            "or use `closeranks run` or torchrun; `srun -n 1` makes a world of one."
        )
    if (variables.number("PMI_SIZE") or 1) > 1:
        return (
            f"{variables.shown('PMI_RANK', 'PMI_SIZE')}: an MPI that closeranks cannot read "
            "started several processes. Nothing was started; set RANK, WORLD_SIZE, MASTER_ADDR "
            "and MASTER_PORT for each of them, or start with Open MPI's mpirun, srun, torchrun or "
            "`closeranks run`."
        )
    return None


def _read_open_mpi(variables: Variables) -> Task | None:
    rank, size = variables.number(f"{_OMPI}RANK"), variables.number(f"{_OMPI}SIZE")
    if rank is None and size is None:
        return None
    names = (f"{_OMPI}RANK", f"{_OMPI}SIZE")
    if rank is None or size is None:
        raise ValueError(_half_set(variables, "mpirun", *names))
    if not rank < size:
        raise ValueError(_contradiction(variables, *names))
    local_size = variables.number(f"{_OMPI}LOCAL_SIZE")
    address, no_address = _open_mpi_address(variables, rank, size, local_size)
    job = variables.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", _HNP_URI)
    port = None if job is None else _PORT_FIRST + zlib.crc32(job.encode()) % _PORTS
    return Task(
        scheduler="mpirun",
        rank=rank,
        size=size,
        rank_shown=variables.shown(names[0]),
        size_shown=variables.shown(names[1]),
        local_rank=variables.number(f"{_OMPI}LOCAL_RANK"),
        local_size=local_size,
        address=address,
        port=port,
        no_address=no_address,
    )


def _open_mpi_address(
    variables: Variables, rank: int, size: int, local_size: int | None
) -> tuple[str | None, str]:
    """Where rank 0 can be reached, or None and why not.

    Open MPI 4 tells everyone where mpirun listens; that is rank 0's host unless mpirun was typed
    elsewhere, and rank 0 is the one who can notice. Open MPI 5 tells each process about its own
    host's daemon only (PMIX_SERVER_URI*), which says nothing about rank 0's host.
    """
    if size == 1 or local_size == size:
        return LOOPBACK, ""
    uri = variables.text(_HNP_URI)
    if uri is None:
        return None, f"{_HNP_URI} is unset (Open MPI 5 does not set it)"
    mpirun_at = _addresses(uri)
    if not mpirun_at:
        return None, f"{_HNP_URI}={uri} holds no address beyond loopback"
    here = variables.text(_DAEMON_URI)
    if rank == 0 and here is not None and not set(mpirun_at) & set(_addresses(here)):
        return None, f"mpirun listens at {', '.join(mpirun_at)}, and rank 0 runs on another host"
    return mpirun_at[0], ""


def _addresses(uri: str) -> list[str]:
    """Addresses in an ORTE URI: "17.0;tcp://10.0.0.1,10.1.0.1:35955;tcp6://[fd00::2]:40429"."""
    found = []
    for hosts in re.findall(r"tcp[46]?://([^;]*):\d+", uri):
        found += [host.strip("[] ") for host in hosts.split(",")]
    return [host for host in found if host and host != "::1" and not host.startswith("127.")]


def _read_slurm(variables: Variables) -> Task | None:
    rank = variables.number("SLURM_PROCID")
    # sbatch gives its batch script a SLURM_PROCID=0 as well, but no step.
    if variables.text(*_SLURM_STEP) is None and not rank:
        return None
    size = variables.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if rank is None or size is None:
        raise ValueError(_half_set(variables, "srun", "SLURM_PROCID", "SLURM_NTASKS"))
    if size != (variables.number("SLURM_NTASKS") or size):
        raise ValueError(_contradiction(variables, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    if not rank < size:
        raise ValueError(_contradiction(variables, "SLURM_PROCID", "SLURM_NTASKS"))
    address, no_address = _slurm_address(variables, size)
    job, step = variables.number("SLURM_JOB_ID", "SLURM_JOBID"), variables.number(*_SLURM_STEP[:2])
    port = None
    if job is not None:
        port = _PORT_FIRST + (job * _STEPS_PER_JOB + (step or 0) % _STEPS_PER_JOB) % _PORTS
    size_name = "SLURM_STEP_NUM_TASKS" if variables.text("SLURM_NTASKS") is None else "SLURM_NTASKS"
    return Task(
        scheduler="srun",
        rank=rank,
        size=size,
        rank_shown=variables.shown("SLURM_PROCID"),
        size_shown=variables.shown(size_name),
        local_rank=variables.number("SLURM_LOCALID"),
        local_size=_slurm_local_size(variables),
        address=address,
        port=port,
        no_address=no_address,
    )


def _slurm_address(variables: Variables, size: int) -> tuple[str | None, str]:
    """The first node of the step, where rank 0 is; loopback if there is only one node."""
    if size == 1:
        return LOOPBACK, ""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        nodelist = variables.text(name)
        if nodelist is not None:
            try:
                nodes = expand_hostlist(nodelist)
            except ValueError as error:
                return None, f"{name} cannot be read: {error}"
            return (LOOPBACK if len(nodes) == 1 else nodes[0]), ""
    return None, "SLURM_STEP_NODELIST and SLURM_JOB_NODELIST are unset"


def _slurm_local_size(variables: Variables) -> int | None:
    counts_text = variables.text("SLURM_STEP_TASKS_PER_NODE")
    if counts_text is None:
        return None
    counts = expand_task_counts(counts_text)
    node = variables.number("SLURM_NODEID")
    if node is None:
        return counts[0] if len(set(counts)) == 1 else None
    return counts[node] if node < len(counts) else None


def _half_set(variables: Variables, launcher: str, *names: str) -> str:
    return (
        f"half-set variables ({variables.shown(*names)}): {launcher} sets them all. Nothing was "
        f"started; let {launcher} set them, or unset them, or set RANK and WORLD_SIZE yourself."
    )


def _contradiction(variables: Variables, *names: str) -> str:
    return (
        f"contradictory variables ({variables.shown(*names)}). Nothing was started; unset what is "
        "left over from another job, or set RANK and WORLD_SIZE yourself."
    )
