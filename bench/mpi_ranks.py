"""Processes under mpirun that all-reduce when the ranks of a measurement ask for it.

    mpirun -n 2 python bench/mpi_ranks.py FOLDER        started by running(), below

A process ends when the rank that asks it has closed its pipe, however that rank ended.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from mpi_client import make_pipes

_END_S = 10.0


@contextlib.contextmanager
def running(size: int, cores: list[int] | None) -> Iterator[str]:
    """The folder in which so many MPI processes listen; empty where there is no MPI."""
    mpirun = shutil.which("mpirun")
    if mpirun is None or importlib.util.find_spec("mpi4py") is None:
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="closeranks-bench-mpi-") as folder:
        make_pipes(Path(folder), size)
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        pinned = ",".join(map(str, cores)) if cores else ""
        command = [mpirun, *root, "--oversubscribe", "--bind-to", "none", "-n", str(size)]
        command += [sys.executable, __file__, folder, pinned]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        try:
            yield folder
            process.wait(_END_S)
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    folder, rank = Path(sys.argv[1]), world.Get_rank()
    if sys.argv[2:] and sys.argv[2]:
        os.sched_setaffinity(0, {int(sys.argv[2].split(",")[rank])})
    data = np.zeros(0, np.float32)
    with (folder / f"ask-{rank}").open() as ask, (folder / f"answer-{rank}").open("w") as answer:
        for line in ask:
            numel, repetitions = map(int, line.split())
            if data.size != numel:
                data = np.zeros(numel, np.float32)
            data[:] = 0.5
            times = []
            if repetitions:
                world.Barrier()
            for _ in range(repetitions):
                began = time.perf_counter()
                world.Allreduce(MPI.IN_PLACE, data)
                times.append((time.perf_counter() - began) * 1e3)
            answer.write(json.dumps(times) + "\n")
            answer.flush()


if __name__ == "__main__":
    main()
