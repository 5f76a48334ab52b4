"""The folder of one job: a log for each rank, and workers.json, which says who they are.

Opens and writes files; knows nothing of what is in a log.
"""

from __future__ import annotations

import datetime
import json
import os
import tempfile
from pathlib import Path

DEFAULT_LOG_DIR = Path("runs")


class JobFolder:
    """`<log-dir>/<name>`, made at once; `warning` says if it had to be somewhere else."""

    def __init__(self, path: Path, warning: str = "") -> None:
        self.path = path
        self.warning = warning
        self._logs: dict[int, int] = {}

    def log(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.log"

    def write_log(self, rank: int, data: bytes) -> None:
        """Append to a rank's log; a full disk costs the log and not the job."""
        if rank not in self._logs:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._logs[rank] = os.open(self.log(rank), flags, 0o644)
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._logs[rank], view) :]
            except OSError as error:
                self.warning = f"{self.log(rank)} cannot be written: {error.strerror}"
                return

    def write_workers(self, pids: dict[int, int]) -> None:
        """Replace workers.json whole, so that nobody ever reads half of it."""
        workers = {str(rank): pid for rank, pid in sorted(pids.items())}
        text = json.dumps({"launcher": os.getpid(), "workers": workers}) + "\n"
        new = self.path / ".workers.json.new"
        new.write_text(text)
        new.replace(self.path / "workers.json")

    def close(self) -> None:
        for fd in self._logs.values():
            os.close(fd)
        self._logs.clear()

    def shown(self) -> str:
        """As a user would type it from here."""
        path, here = str(self.path), os.getcwd() + os.sep
        return path[len(here) :] if path.startswith(here) else path


def make_folder(log_dir: Path | None, name: str | None, stem: str) -> JobFolder:
    """Make the job's folder. ValueError if what the user asked for is taken or not writable."""
    now = datetime.datetime.now()
    chosen = name or f"{stem}-{now:%Y%m%d-%H%M%S}-{os.getpid()}"
    path = (log_dir or DEFAULT_LOG_DIR).absolute() / chosen
    if name is not None and path.is_dir() and any(path.glob("rank-*.log")):
        raise ValueError(f"--name {name}: {path} already holds the logs of a job; name another")
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".workers.json.new"
        probe.touch()
        return JobFolder(path)
    except OSError as error:
        if log_dir is not None:
            raise ValueError(
                f"--log-dir {log_dir} cannot be written: {error.strerror}; name another"
            ) from error
        elsewhere = Path(tempfile.mkdtemp(prefix=f"closeranks-{chosen}-"))
        return JobFolder(
            elsewhere, f"{path} cannot be written ({error.strerror}): logs are in {elsewhere}"
        )
