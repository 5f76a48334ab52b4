"""How the cores and GPUs of a machine are shared out among workers. Pure.

Without a number of workers there is one for each GPU, or else one for each core. A worker has
cores / workers threads, at least one, and is pinned to as many cores of its own; where there are
more workers than cores nobody is pinned, and the kernel shares the cores out.
"""

from __future__ import annotations

from dataclasses import dataclass

from closeranks.launch.machine import Cores


@dataclass(frozen=True)
class Share:
    """What every worker of this host gets, and why there are so many."""

    workers: int
    threads: int  # for each worker
    cpus: tuple[tuple[int, ...], ...]  # of each worker; empty for one that is not pinned
    reason: str
    warning: str = ""


def share_out(wanted: int | None, cores: Cores, gpus: int) -> Share:
    if wanted is not None:
        workers, reason = wanted, "as asked for"
    elif gpus:
        workers, reason = gpus, "one for each GPU"
    else:
        workers, reason = cores.count, "one for each core"
    threads = max(1, cores.count // workers)
    warning = ""
    if gpus and workers > gpus:
        warning = f"{workers} workers share {gpus} GPU{'s' if gpus > 1 else ''}"
    elif workers > cores.count:
        warning = f"{workers} workers share {cores.count} core{'s' if cores.count > 1 else ''}"
    return Share(workers, threads, _pin(workers, cores), reason, warning)


def _pin(workers: int, cores: Cores) -> tuple[tuple[int, ...], ...]:
    """Neighbouring cores for each worker: they share caches more often than distant ones."""
    each = len(cores.cpus) // workers
    if each == 0:
        return ((),) * workers
    return tuple(cores.cpus[i * each : (i + 1) * each] for i in range(workers))
