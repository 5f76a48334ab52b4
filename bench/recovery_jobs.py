"""Jobs that are disturbed while they are watched: one class for each way to survive a death.

A job starts its processes, says which of them live, and goes on until it has done its steps or is
ended. What happened is read from the notes of its processes (recovery_scripts/training.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_SCRIPTS = Path(__file__).parent / "recovery_scripts"
_ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclass(frozen=True)
class Note:
    """One line of one process."""

    at_s: float
    pid: int
    what: str
    number: int


def read_notes(folder: Path) -> list[Note]:
    """All of them, in the order of time."""
    found = []
    for path in folder.glob("notes-*"):
        pid = int(path.name.removeprefix("notes-"))
        for line in path.read_text().splitlines():
            at_s, what, number = line.split()
            found.append(Note(float(at_s), pid, what, int(number)))
    return sorted(found, key=lambda note: note.at_s)


class Job:
    """What all of them have in common; a subclass says how it is started."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self._log = open(folder / "output", "wb")  # noqa: SIM115 - closed by end()
        self.processes = self.start()

    def start(self) -> list[subprocess.Popen[bytes]]:
        raise NotImplementedError

    def spawn(self, *command: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=os.environ | _ENV | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def tend(self) -> None:
        """Called often; for a job whose dead nobody else starts again."""

    def notes(self) -> list[Note]:
        return read_notes(self.folder)

    def wait_for(self, what: Callable[[list[Note]], object], limit_s: float) -> bool:
        """Whether it came true in time."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if what(self.notes()):
                return True
            self.tend()
            time.sleep(0.01)
        return False

    def living(self) -> list[int]:
        """The processes that train, the one that has noted something last at the end."""
        newest: dict[int, float] = {}
        for note in self.notes():
            if note.what in ("step", "lane", "discarded"):
                newest[note.pid] = note.at_s
        found = sorted(newest, key=lambda pid: newest[pid])
        return [pid for pid in found if _is_alive(pid)]

    def is_over(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in {note.pid for note in self.notes()}:
            if _is_alive(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._log.close()


class Ours(Job):
    """`closeranks run` starts the dead again."""

    def start(self) -> list[subprocess.Popen[bytes]]:
        script = str(_SCRIPTS / "ours.py")
        command = [sys.executable, "-m", "closeranks", "run", "-n", "3", "--max-restarts", "1000"]
        return [self.spawn(*command, script, str(self.folder), str(self.steps))]

    def digest(self) -> str:
        found = re.search(r"^digest (\w+)$", self.output(), re.MULTILINE)
        assert found is not None, self.output()
        return found[1]


class Torchrun(Job):
    """torchrun ends all workers when one has died, and starts them again."""

    def start(self) -> list[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--local-addr=127.0.0.1", "--nproc-per-node=3", "--max-restarts=1000"]
        script = str(_SCRIPTS / "by_torchrun.py")
        return [self.spawn(*command, script, str(self.folder), str(self.steps))]


class Torchft(Job):
    """Three replicas and a lighthouse; the dead are started again at once, by this process."""

    python: str = ""  # an interpreter that has torchft
    tuning: str = ""  # arguments of the lighthouse; without any, its heartbeat timeout is 5 s

    def start(self) -> list[subprocess.Popen[bytes]]:
        code = (
            "import time; from torchft.coordination import LighthouseServer as L; "
            f"l = L(bind='127.0.0.1:0', min_replicas=1{self.tuning}); "
            "print('lighthouse', l.address(), flush=True); time.sleep(3600)"
        )
        lighthouse = self.spawn(self.python, "-c", code)
        deadline = time.monotonic() + 60.0
        while not (found := re.search(r"lighthouse http://\S+:(\d+)", self.output())):
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)
        self._address = f"http://127.0.0.1:{found[1]}"
        return [lighthouse, *(self._replica(rank) for rank in range(3))]

    def tend(self) -> None:
        for rank in range(3):
            process = self.processes[rank + 1]
            if process.poll() not in (None, 0):
                self.processes[rank + 1] = self._replica(rank)

    def _replica(self, rank: int) -> subprocess.Popen[bytes]:
        script = str(_SCRIPTS / "by_torchft.py")
        env = {"TORCHFT_LIGHTHOUSE": self._address}
        return self.spawn(
            self.python, script, str(self.folder), str(self.steps), str(rank), env=env
        )


class TunedTorchft(Torchft):
    tuning = ", quorum_tick_ms=20, heartbeat_timeout_ms=500"


def _is_alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text[text.rindex(")") + 2] not in "ZX"
