"""The line between a rank of a measurement and its twin under mpirun: two pipes in a folder.

A rank asks for a block of repetitions and sleeps in a read until the times come back, so that while
one kind of rank works the other does not. Both sides are here; the twin is started by `mpi_ranks`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType


def make_pipes(folder: Path, size: int) -> None:
    for rank in range(size):
        os.mkfifo(folder / f"ask-{rank}")
        os.mkfifo(folder / f"answer-{rank}")


class MpiClient:
    """The rank's side."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._ask = (folder / f"ask-{rank}").open("w")
        self._answer = (folder / f"answer-{rank}").open()

    def block(self, numel: int, repetitions: int) -> list[float]:
        """Milliseconds of each repetition; no elements: give the memory back."""
        self._ask.write(f"{numel} {repetitions}\n")
        self._ask.flush()
        times: list[float] = json.loads(self._answer.readline())
        return times

    def __enter__(self) -> MpiClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ask.close()
        self._answer.close()
