"""Loaders fetch ahead with the same bits, and neither their end nor the worker's leaves a trace."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.lanes_scripts import SCRIPTS, make
from tests.workers import SLEEP, Fault, pace, run_job


class Watched(Dataset[tuple[Tensor, int]]):
    """Tells which process fetched a sample; at sample 17 something may happen."""

    def __init__(self, at_17: str = "", folder: str = "") -> None:
        self.at_17, self.folder, self.owner = at_17, folder, os.getpid()

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        is_loader = os.getpid() != self.owner
        if index == 17 and is_loader:
            self._happen()
        if index == 17 and self.at_17 == "raise":
            raise LookupError("sample 17 cannot be read")
        return torch.full((3,), index / 48) + 0.01 * torch.randn(3), os.getpid()

    def _happen(self) -> None:
        if self.at_17 == "always":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.at_17 == "once":
            try:
                os.close(os.open(f"{self.folder}/killed", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    naive: bool, num_workers: int, at_17: str = "", folder: str = "", epochs: int = 2
) -> dict[str, Any]:
    ranks = make(naive, lanes=4)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ranks.prepare(model, optimizer)
    by_loaders = by_me = 0
    loaders: set[int] = set()
    for step in ranks.steps(Watched(at_17, folder), 12, epochs, num_workers=num_workers):
        for phase in range(2):
            for x, pids in step:
                model(x).square().mean().backward()
                x.mul_(0.0)  # The next phase must not see it.
                others = {int(pid) for pid in pids} - {os.getpid()}
                loaders |= others
                by_loaders, by_me = by_loaders + bool(others), by_me + (not others)
            if phase == 0:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)  # Nobody is overtaken because it has to wait for a core.
        pace()
    # The loaders end with the loop.
    alive = [pid for pid in loaders if Path(f"/proc/{pid}").exists()]
    return {
        "digest": ranks.digest(),
        "by_loaders": by_loaders,
        "by_me": by_me,
        "alive": alive,
        "loaders": sorted(loaders),
    }


@pytest.mark.parametrize("workers", [1, 3])
def test_loaders_fetch_ahead_with_the_same_bits(workers: int) -> None:
    job = run_job(workers, train, False, 2)
    assert job.digest == run_job(1, train, True, 0).digest
    assert sum(v["by_loaders"] for v in job.values) > sum(v["by_me"] for v in job.values), job
    assert all(v["alive"] == [] for v in job.values)
    assert len({pid for v in job.values for pid in v["loaders"]}) <= 2 * workers


def test_loaders_die_with_their_worker(tmp_path: Path) -> None:
    # Worker 1 is killed by somebody; its loaders are not told.
    job = run_job(
        2, note_loaders, str(tmp_path), faults=[Fault("after backward", incarnation=1, count=5)]
    )
    assert job.fired and job.restarts >= 1
    pids = [int(pid) for pid in (tmp_path / "1").read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10.0
    while any(_is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"loaders {pids} have outlived their worker"
        time.sleep(0.01)


def note_loaders(folder: str) -> dict[str, Any]:
    from closeranks.lanes import loaders

    begin = loaders.Loaders.__init__

    def noted(self: Any, *args: Any) -> None:
        begin(self, *args)
        number = os.environ["CLOSERANKS_SEAT"].split(":")[1]
        (Path(folder) / number).write_text(" ".join(map(str, self.pids)))

    loaders.Loaders.__init__ = noted  # type: ignore[method-assign]
    return train(False, 2)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_killed_loader_is_started_again(tmp_path: Path) -> None:
    job = run_job(1, train, False, 2, "once", str(tmp_path))
    assert (tmp_path / "killed").exists()
    assert any("a loader was killed by signal 9" in note for note in job.notes)
    assert job.digest == run_job(1, train, True, 0).digest


def test_samples_that_kill_two_loaders_are_an_error() -> None:
    job = run_job(1, train, False, 2, "always")
    assert job.ended is not None and "a loader was killed by signal 9" in job.ended, job
    assert "17" in job.ended


def test_an_exception_in_a_dataset_keeps_its_traceback() -> None:
    job = run_job(1, train, False, 2, "raise")
    assert job.ended is not None and "LookupError: sample 17 cannot be read" in job.ended
    assert "in __getitem__" in job.ended


def test_loaders_under_faults() -> None:
    faults = [
        Fault("after backward", facts={"tick": 4}),
        Fault("before forward", SLEEP, seconds=0.4, facts={"tick": 7}),
    ]
    job = run_job(3, augmented_with_loaders, faults=faults)
    assert len(job.fired) == 2
    assert job.digest == run_job(1, SCRIPTS["augmented"], True).digest


def augmented_with_loaders() -> dict[str, Any]:
    return SCRIPTS["augmented"](num_workers=2)
