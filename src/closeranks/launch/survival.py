"""What happens in a job that made a Ranks when a worker dies, speaks or stands still.

The shell around the muster, who decides: words for the screen, signals, and the list of those who
are to be started again. What ends the job is handed to the supervisor.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from closeranks.launch import kernel
from closeranks.launch.channel import Message
from closeranks.launch.muster import Muster, Said
from closeranks.launch.policy import Action, Decision
from closeranks.launch.record import Worker
from closeranks.launch.screen import Screen
from closeranks.observe.failure import Failure

_LOOK_EVERY_S = 1.0


class Survival:
    """The part of the supervisor that only such jobs need."""

    def __init__(self, muster: Muster, screen: Screen) -> None:
        self._muster = muster
        self._screen = screen
        self._decisions: dict[int, Decision] = {}
        self._next_look_s = 0.0
        self.again: list[Worker] = []  # to be started again
        self.told_end: Said | None = None  # a worker ended the job, with these words

    @property
    def is_needed(self) -> bool:
        return self._muster.is_resilient

    def admit(self, worker: Worker) -> None:
        worker.seat = self._muster.admit(worker.rank)

    def started(self, worker: Worker) -> None:
        self._muster.roster.started(worker.seat, worker.pid)

    def heard(self, worker: Worker, message: Message) -> bool:
        """Whether the worker wants the whole job to end."""
        for said in self._muster.hear(worker.seat, message, time.monotonic()):
            if said.what == "print":
                self._screen.write(False, said.text.encode() + b"\n")
            elif said.what == "note":
                self._screen.say(said.text)
            else:
                self.told_end = said
        return "end" in message

    def closed(self, worker: Worker, code: int) -> None:
        """The worker is gone: told before anything else, because the others wait for it."""
        self._decisions[worker.rank] = self._muster.closed(worker.seat, code, time.monotonic())

    def replace(self, worker: Worker, memory: str) -> Failure | None:
        """Have a worker that is gone started again; or return why the job ends with it."""
        decision = self._decisions.pop(worker.rank)
        failure = worker.failure(memory)
        if failure is None or self._muster.has_ended:
            return None
        what = failure.what.splitlines()[0] if failure.what else "an unknown error"
        if not self._muster.asked_again(worker.seat):
            verb = "" if failure.is_bare else "failed with "
            self._screen.say(f"rank {worker.rank} {verb}{what}; {decision.reason}")
        if decision.action is Action.RESTART_ONE:
            self.again.append(worker)
        return failure if decision.action is Action.END else None

    def look_after(self, workers: Sequence[Worker], now_s: float) -> None:
        """Kill who will not go on; their deaths are then deaths like others."""
        if now_s < self._next_look_s and not self._muster.has_ended:
            return
        self._next_look_s = now_s + _LOOK_EVERY_S
        for number, reason in self._muster.look(time.monotonic_ns(), _is_stopped):
            worker = next(w for w in workers if w.seat == number)
            if not self._muster.has_ended:
                self._screen.say(f"rank {worker.rank} {reason}")
            kernel.kill(worker.pid, signal.SIGKILL)
        self._muster.tidy()


def _is_stopped(pid: int) -> bool:
    return kernel.state_and_parent(pid)[0] == "T"
