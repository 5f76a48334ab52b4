"""A small launcher for tests of Ranks: starts workers, restarts the dead, injects faults, counts.

One process, forked from the warm server of tests/ranks.py, makes the memory of a job and forks the
workers from itself. It does what `closeranks run` does for a Ranks, without output and signals of
its own; so these tests say what Ranks needs, and the launcher's tests say that it has it.

A fault happens at a named point (observe/points.py) inside a worker, once: the worker tells that it
fired and then kills or stops itself, or sleeps. A test asserts that the faults it asked for fired.

A function given to it must be importable by name, and returns a value that JSON can hold.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import faulthandler
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from closeranks.lanes.seat import Seat
from closeranks.launch.muster import Muster
from closeranks.launch.policy import Action, ResilientPolicy
from closeranks.observe import points
from closeranks.segment.peers import is_stopped
from closeranks.segment.roster import ALIVE, SEAT_VARIABLE, Roster
from tests.ranks import _SERVER

KILL, STOP, SLEEP, FULL = "kill", "stop", "sleep", "full"
KILL_ALL = "kill all"  # the whole job, which is not started again
_PACE = "TEST_PACE"


def pace() -> None:
    """For scripts, after each step: do not run away before all faults have fired.

    The steps of tests take a few milliseconds, less than a worker may have to wait for a core.
    """
    count, _, folder = os.environ.get(_PACE, "0:").partition(":")
    if int(count) > len(list(Path(folder).glob("fault-*"))):
        time.sleep(0.03)


@dataclass(frozen=True)
class Fault:
    """What happens to a worker when it reaches a point for the count-th time."""

    point: str
    action: str = KILL
    seconds: float | None = None  # of a stop (None: for ever) or a sleep
    incarnation: int | None = None  # whom; None: any of the first incarnations
    facts: dict[str, Any] = field(default_factory=dict)  # that must be so at the point
    count: int = 1
    everybody: bool = False  # each worker that comes there, instead of the first


@dataclass
class Job:
    """How a job ended."""

    values: list[Any]  # of the workers whose script ended, in the order of their ends
    printed: list[str]
    notes: list[str]
    fired: list[str]
    ended: str | None  # why, if a worker ended the whole job
    restarts: int
    seconds: float
    steps: dict[int, list[float]]  # by incarnation: when a step was done

    @property
    def digest(self) -> str:
        """The one digest of all workers that came to the end."""
        digests = {v["digest"] for v in self.values}
        assert len(digests) == 1, f"digests {digests}; {self}"
        return digests.pop()


def run_job(
    workers: int,
    fn: Callable[..., Any],
    *args: Any,
    faults: Sequence[Fault] = (),
    deadline_s: float = 60.0,
    max_restarts: int = 10,
    kill_all_after_s: float | None = None,
) -> Job:
    """Run fn(*args) on workers until the script has ended everywhere it can."""
    ours, theirs = _SERVER.Pipe(duplex=False)
    limits = (deadline_s, max_restarts, kill_all_after_s)
    process = _SERVER.Process(
        target=_launcher_main, args=(theirs, workers, fn, args, tuple(faults), limits)
    )
    process.start()
    theirs.close()
    try:
        if not ours.poll(deadline_s + 30.0):
            raise AssertionError(f"the launcher of a test did not end within {deadline_s} s")
        outcome = ours.recv()
    finally:
        if process.is_alive():
            process.join(5.0)
            process.kill()
        process.join()
        ours.close()
    if isinstance(outcome, str):
        raise AssertionError(outcome)
    return outcome


def _launcher_main(
    pipe: Any, workers: int, fn: Any, args: Any, faults: tuple[Fault, ...], limits: Any
) -> None:
    launcher = _Launcher(workers, fn, args, faults, *limits)
    try:
        outcome: Any = launcher.run()
    except BaseException:  # noqa: BLE001 - whatever it was is the outcome
        outcome = traceback.format_exc()
    finally:
        launcher.end()
    pipe.send(outcome)
    pipe.close()


class _Launcher:
    def __init__(
        self,
        workers: int,
        fn: Any,
        args: Any,
        faults: tuple[Fault, ...],
        deadline_s: float,
        max_restarts: int,
        kill_all_after_s: float | None,
    ) -> None:
        self.roster = Roster.create(workers)
        self.muster = Muster(self.roster, ResilientPolicy(max_restarts))
        self.workers, self.fn, self.args, self.faults = workers, fn, args, faults
        self.began = time.monotonic()
        self.deadline = self.began + deadline_s
        self.kill_all_at = None if kill_all_after_s is None else self.began + kill_all_after_s
        self.pids: dict[int, int] = {}  # of incarnations that live
        self.pipes: dict[int, int] = {}  # incarnation by descriptor
        self.buffered: dict[int, bytes] = {}
        self.wake: list[tuple[float, int]] = []
        self.next_look = self.began + 1.0
        self.job = Job([], [], [], [], None, 0, 0.0, {})
        self.stacks = Path(tempfile.mkdtemp(prefix="closeranks-test-"))

    def run(self) -> Job:
        for worker in range(self.workers):
            self._start(worker)
        while self.pids:
            self._read(0.005)
            self._reap()
            now = time.monotonic()
            for at, pid in [w for w in self.wake if w[0] <= now]:
                self.wake.remove((at, pid))
                self._signal(pid, signal.SIGCONT)
            self._look_after(now)
            if self.kill_all_at is not None and now > self.kill_all_at:
                self.kill_all_at = None
                for pid in self.pids.values():
                    self._signal(pid, signal.SIGKILL)
            if now > self.deadline:
                raise AssertionError(f"the job did not end in time; {self._stacks()}")
        self._read(0.0)
        self.job.seconds = time.monotonic() - self.began
        return self.job

    def end(self) -> None:
        for pid in self.pids.values():
            self._signal(pid, signal.SIGKILL)
        for pid in self.pids.values():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        for file in self.stacks.iterdir():
            file.unlink()
        self.stacks.rmdir()

    def _start(self, worker: int) -> None:
        number = self.muster.admit(worker)
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            self._worker_main(number, theirs)
        os.close(theirs)
        self.roster.started(number, pid)
        self.pids[number] = pid
        self.pipes[ours] = number
        self.buffered[ours] = b""

    def _worker_main(self, number: int, messages: int) -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the launcher
        for fd in self.pipes:
            os.close(fd)
        stacks = open(self.stacks / f"{number}", "w")  # noqa: SIM115 - lives as we do
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        os.environ[_PACE] = f"{len(self.faults)}:{self.stacks}"
        os.environ[SEAT_VARIABLE] = f"{self.roster.fd}:{number}:{messages}"
        seat = Seat(self.roster, number, messages)
        points.on_reach = _Injector(seat, self.faults, self.stacks)
        code = 1
        try:
            value = self.fn(*self.args)
            atexit._run_exitfuncs()
            seat.tell(value=value)
            code = 0
        except SystemExit as exit_:
            atexit._run_exitfuncs()
            code = exit_.code if isinstance(exit_.code, int) else 0
        except BaseException:  # noqa: BLE001 - as the interpreter does it
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            os._exit(code)

    def _read(self, timeout_s: float) -> None:
        ready, _, _ = select.select(list(self.pipes), [], [], timeout_s)
        for fd in ready:
            number = self.pipes[fd]
            raw = os.read(fd, 1 << 16)
            if not raw:
                os.close(fd)
                del self.pipes[fd], self.buffered[fd]
                continue
            *lines, self.buffered[fd] = (self.buffered[fd] + raw).split(b"\n")
            for line in lines:
                self._hear(number, json.loads(line))

    def _hear(self, number: int, message: dict[str, Any]) -> None:
        job = self.job
        if "value" in message:
            job.values.append(message["value"])
        elif "fired" in message:
            job.fired.append(message["fired"])
            if message.get("stop_s") is not None and number in self.pids:
                self.wake.append((time.monotonic() + message["stop_s"], self.pids[number]))
        for said in self.muster.hear(number, message, time.monotonic()):
            if said.what == "end":
                job.ended = job.ended or said.text
            else:
                (job.printed if said.what == "print" else job.notes).append(said.text)

    def _reap(self) -> None:
        for number, pid in list(self.pids.items()):
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                continue
            self._read(0.0)
            code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            decision = self.muster.closed(number, code, time.monotonic())
            os.waitpid(pid, 0)
            del self.pids[number]
            if self.job.ended is not None or code == 0:
                continue
            self.job.notes.append(decision.reason)
            if decision.action is Action.RESTART_ONE:
                self.job.restarts += 1
                self._start(self.roster.worker(number))
            elif decision.action is Action.END:
                self.job.ended = decision.reason

    def _look_after(self, now: float) -> None:
        if self.job.ended is not None:
            for pid in self.pids.values():
                self._signal(pid, signal.SIGKILL)
        if self.muster.has_ended or now > self.next_look:
            self.next_look = now + 1.0
            for number, reason in self.muster.look(time.monotonic_ns(), is_stopped):
                self.job.notes.append(f"worker {self.roster.worker(number)} {reason}")
                self._signal(self.pids[number], signal.SIGKILL)
            self.muster.tidy()

    def _signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def _stacks(self) -> str:
        for pid in self.pids.values():
            self._signal(pid, signal.SIGCONT)
            self._signal(pid, signal.SIGUSR1)
        time.sleep(0.5)
        texts = [
            f"--- incarnation {n} ---\n{(self.stacks / f'{n}').read_text()}" for n in self.pids
        ]
        alive = [r for r in self.roster.rows() if r.status == ALIVE]
        return f"{self.job}\n{alive}\n" + "\n".join(texts)


class _Injector:
    """Called at every named point of a worker."""

    def __init__(self, seat: Seat, faults: Sequence[Fault], folder: Path) -> None:
        self.seat = seat
        self.folder = folder
        self.left = {k: f.count for k, f in enumerate(faults)}
        self.faults = faults

    def __call__(self, point: str, **facts: Any) -> None:
        for k, fault in enumerate(self.faults):
            if fault.point != point or self.left.get(k, 0) <= 0:
                continue
            whom = self.seat.number
            if fault.incarnation is None:
                # Only the first incarnations, so that it does not happen for ever.
                if whom >= self.seat.roster.workers:
                    continue
            elif fault.incarnation != whom:
                continue
            if any(facts.get(name) != value for name, value in fault.facts.items()):
                continue
            self.left[k] -= 1
            if self.left[k] == 0 and (self._is_first(k) or fault.everybody):
                self._fire(k, fault, facts)

    def _is_first(self, k: int) -> bool:
        try:
            os.close(os.open(self.folder / f"fault-{k}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _fire(self, k: int, fault: Fault, facts: dict[str, Any]) -> None:
        stop_s = fault.seconds if fault.action == STOP else None
        what = f"{k}: {fault.action} of {self.seat.number} at {fault.point}, {facts}"
        self.seat.tell(fired=what, stop_s=stop_s)
        if fault.action == KILL_ALL:
            self.seat.tell(end="killed", code=137)
        if fault.action in (KILL, KILL_ALL):
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action == STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.action == FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        else:
            time.sleep(fault.seconds or 0.0)
