"""Runs the launcher as a user would, and says what it printed and what it left behind.

Knows processes and text; must not know what is expected of them. Every process that a launcher
starts inherits a mark in its environment, by which whatever is left is found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

DEADLINE_S = 90.0
_MARK = "CLOSERANKS_TEST_MARK"


@dataclass(frozen=True)
class Done:
    """How a launcher ended."""

    code: int
    out: str
    err: str

    def lines_of(self, rank: int) -> list[str]:
        """What one rank is shown to have said, without the prefix."""
        prefix = f"rank {rank} | "
        return [t.removeprefix(prefix) for t in self.out.splitlines() if t.startswith(prefix)]

    @property
    def report(self) -> list[str]:
        """The lines of the launcher's own."""
        lines = self.err.splitlines()
        return [t.removeprefix("closeranks: ") for t in lines if t.startswith("closeranks: ")]


class Running:
    """A launcher under way."""

    def __init__(self, process: subprocess.Popen[bytes], mark: str, folder: Path) -> None:
        self.process = process
        self.mark = mark
        self.folder = folder

    def wait_for(self, what: Callable[[], object], why: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not what():
            assert time.monotonic() < deadline, f"{why} did not happen; {self.text()}"
            assert self.process.poll() is None, f"{why}: the launcher has ended; {self.text()}"
            time.sleep(0.02)

    def has_said(self, *texts: str) -> Callable[[], bool]:
        return lambda: all(text in self.text() for text in texts)

    def text(self) -> str:
        return (self.folder / "out").read_text() + (self.folder / "err").read_text()

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self, deadline_s: float = DEADLINE_S) -> Done:
        """Wait for it; it must leave no process and no shared memory."""
        try:
            self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher did not end:\n{self.text()}") from None
        done = Done(
            self.process.returncode,
            (self.folder / "out").read_text(),
            (self.folder / "err").read_text(),
        )
        assert not self.left(), f"left behind: {self.left()}\n{self.text()}"
        return done

    def left(self) -> list[str]:
        """The processes that bear this launcher's mark and are not dead."""
        return [line for line in _marked(self.mark) if not line.startswith(f"{self.process.pid} ")]


@contextlib.contextmanager
def launched(
    folder: Path,
    *arguments: str,
    script: str = "",
    env: dict[str, str] | None = None,
    before: tuple[str, ...] = (),
) -> Iterator[Running]:
    """`python -m closeranks run ARGUMENTS` in a folder that holds the script as train.py.

    `before` is put in front of the command.
    """
    if script:
        (folder / "train.py").write_text(textwrap.dedent(script))
    mark = uuid.uuid4().hex
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "NO_COLOR")}
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        process = subprocess.Popen(
            [*before, sys.executable, "-m", "closeranks", "run", *arguments],
            cwd=folder,
            env=environ | {_MARK: mark} | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
    running = Running(process, mark, folder)
    shared = set(os.listdir("/dev/shm"))
    try:
        yield running
        assert set(os.listdir("/dev/shm")) <= shared | _of_others()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        for line in running.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)


def run(folder: Path, *arguments: str, script: str = "", deadline_s: float = DEADLINE_S) -> Done:
    """The whole of a job."""
    with launched(folder, *arguments, script=script) as running:
        return running.end(deadline_s)


def run_dir(folder: Path) -> Path:
    """The folder of the one job that ran there."""
    (found,) = (folder / "runs").iterdir()
    return found


def _marked(mark: str) -> list[str]:
    found = []
    for each in Path("/proc").iterdir():
        if not each.name.isdigit():
            continue
        try:
            if f"{_MARK}={mark}".encode() not in (each / "environ").read_bytes():
                continue
            state = (each / "stat").read_text().rpartition(")")[2].split()[0]
            command = (each / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if state != "Z":
            found.append(f"{each.name} {command[:80]}")
    return found


def _of_others() -> set[str]:
    """Files of tests that run at the same time; nothing here uses such names."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("closeranks")}
