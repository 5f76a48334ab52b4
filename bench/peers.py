"""Other libraries' all-reduces, where they are installed: MPI's, and DeepSpeed's for shared memory.

Run inside a rank, beside the ways that every installation has.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from mpi_client import MpiClient
from torch import Tensor

from closeranks.bench.raw import DEEPSPEED, MPI, Blocks
from closeranks.measure import turns
from closeranks.measure.ways import Run, Way


class MpiWay(Way):
    """All-reduce by MPI, in processes that mpirun has started: one for each rank."""

    def __init__(self, client: MpiClient) -> None:
        super().__init__(MPI, lambda numel: (torch.zeros(0), lambda: None))
        self._client = client
        self._numel = 0

    def prepare(self, numel: int) -> None:
        self._numel = numel

    def release(self) -> None:
        self._client.block(0, 0)

    def block(self, repetitions: int) -> list[float]:
        dist.barrier()
        return self._client.block(self._numel, repetitions)


def measure(rank: int, numels: Sequence[int], rounds: int, mpi_folder: str) -> list[Blocks]:
    """Time all ways and peers; mpi_folder is where MPI's processes listen, if there are any."""
    with contextlib.ExitStack() as stack:
        peers: list[Way] = []
        deepspeed = _deepspeed(rank, dist.get_world_size())
        if deepspeed is not None:
            peers.append(deepspeed)
        if mpi_folder:
            peers.append(MpiWay(stack.enter_context(MpiClient(Path(mpi_folder), rank))))
        return list(turns.measure(numels, rounds, peers))


def _deepspeed(rank: int, size: int) -> Way | None:
    """DeepSpeed's all-reduce through shared memory, if it is installed and can be built."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    os.environ |= {"LOCAL_SIZE": str(size), "MASTER_ADDR": "bench", "DS_ACCELERATOR": "cpu"}
    os.environ["MASTER_PORT"] = str(os.getppid())
    try:
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

        if rank:  # One builds, the others find it built.
            dist.barrier()
        operations = ShareMemCommBuilder().load(verbose=False)
        if not rank:
            dist.barrier()
        operations.initialize(size, rank)
        dist.barrier()  # All have mapped what DeepSpeed would leave in the file system.
        for left in Path("/dev/shm").glob(f"deepspeed_*_bench_{os.environ['MASTER_PORT']}_*"):
            left.unlink(missing_ok=True)
    except (ImportError, RuntimeError, OSError) as error:
        if not rank:
            print(f"DeepSpeed is left out: {error}")
        return None
    reduce = torch.ops.deepspeed.inference_all_reduce_

    def make(numel: int) -> tuple[Tensor, Run]:
        tensor = torch.zeros(numel)
        return tensor, lambda: reduce(tensor)

    return Way(DEEPSPEED, make)
