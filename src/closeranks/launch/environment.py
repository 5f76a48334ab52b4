"""The environment that a worker starts with: torchrun's variables, and a few of ours. Pure.

    CLOSERANKS_LAUNCHER   the launcher's pid: this process is one of its workers
    CLOSERANKS_RUN_DIR    the folder of the job's logs
    CLOSERANKS_WIRE       the format of gradients between machines (--wire)
    CLOSERANKS_CONTROL    in the worker, the descriptor of its connection to the launcher

What the user has set (OMP_NUM_THREADS, GLOO_SOCKET_IFNAME) is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LAUNCHER = "CLOSERANKS_LAUNCHER"
WIRE = "CLOSERANKS_WIRE"
RUN_DIR = "CLOSERANKS_RUN_DIR"


@dataclass(frozen=True)
class Place:
    """A worker's place among the workers, and where they meet."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    address: str
    port: int


@dataclass(frozen=True)
class JobFacts:
    """What is the same for all workers of this launcher."""

    launcher: int
    folder: str
    run_id: str
    role: str
    serves_store: bool  # the store that ranks meet at is there before rank 0 asks for it
    restarts_max: int
    threads: int
    interface: str  # by which workers reach each other; "" if that is not known
    wire: str | None = None  # the format of gradients between machines, if it was asked for


def for_worker(
    place: Place, facts: JobFacts, restarts: int, given: Mapping[str, str]
) -> dict[str, str]:
    """The variables to set on top of those that were given."""
    found = {
        "RANK": place.rank,
        "WORLD_SIZE": place.size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
        "GROUP_RANK": place.node,
        "GROUP_WORLD_SIZE": place.nodes,
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": place.size,
        "ROLE_NAME": facts.role,
        "MASTER_ADDR": place.address,
        "MASTER_PORT": place.port,
        "TORCHELASTIC_RUN_ID": facts.run_id,
        "TORCHELASTIC_RESTART_COUNT": restarts,
        "TORCHELASTIC_MAX_RESTARTS": facts.restarts_max,
        "TORCHELASTIC_USE_AGENT_STORE": facts.serves_store,
        "TORCHELASTIC_ERROR_FILE": f"{facts.folder}/rank-{place.rank}-error-{restarts}.json",
        LAUNCHER: facts.launcher,
        RUN_DIR: facts.folder,
    }
    if facts.wire is not None:
        found[WIRE] = facts.wire
    defaults = {"OMP_NUM_THREADS": str(facts.threads)}
    if facts.interface:
        defaults["GLOO_SOCKET_IFNAME"] = facts.interface
    kept = {name: value for name, value in defaults.items() if not given.get(name)}
    return {name: str(value) for name, value in found.items()} | kept
