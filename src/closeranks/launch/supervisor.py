"""Watches over one job from its start to its end: the launcher's heart.

    run      wait for bytes, signals and moments; take each to its place
    notice   a rank has failed; wait a moment for others, because the first seen may not be the
             first that failed
    decide   ask the policy what follows: the end, or another start
    replace  in a job that made a Ranks: start the one that died again, while the others go on
    end      signals, each stronger than the one before, until nobody is left
    report   say what happened, as the last thing on the screen

Processes are the crew's business, words the report's, and what a death means the policy's.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

from closeranks.launch import ending as endings
from closeranks.launch.channel import Message
from closeranks.launch.crew import Crew
from closeranks.launch.ending import Ending
from closeranks.launch.folder import JobFolder
from closeranks.launch.hangs import HangWatch
from closeranks.launch.job import Job
from closeranks.launch.loop import Loop
from closeranks.launch.policy import Action, OrdinaryPolicy
from closeranks.launch.pressure import Pressure
from closeranks.launch.progress import ProgressView
from closeranks.launch.record import Worker
from closeranks.launch.screen import Screen
from closeranks.launch.survival import Survival
from closeranks.launch.voices import Voices
from closeranks.observe.failure import Failure, first_of
from closeranks.observe.report import failure_report, outcome, ranks_named

# How long to wait for other failures after one that may be the first, and after one that says
# only that a peer has gone: then the first is still to come.
_COLLECT_S, _COLLECT_AFTER_CONSEQUENCE_S = 0.05, 0.4
_DRAIN_S = 0.5
_TICK_S = 0.25


class Supervisor:
    """One job."""

    def __init__(
        self,
        job: Job,
        folder: JobFolder,
        screen: Screen,
        loop: Loop,
        policy: OrdinaryPolicy,
        survival: Survival,
    ) -> None:
        self._job = job
        self._folder = folder
        self._screen = screen
        self._loop = loop
        self._policy = policy
        self._survival = survival
        self._restarts = 0
        self._failures: list[Failure] = []
        self._decide_at_s: float | None = None
        self._culprit: Failure | None = None
        self._stopped_count = 0
        self._restarts_all = False
        self._ending: Ending | None = None
        self._voices = Voices(job.size, job.show, folder, screen)
        self._starter_is_lost = False
        self._pressure = Pressure()

    def run(self, crew: Crew) -> int:
        """Everything; returns the exit code."""
        self._crew = crew
        job = self._job
        self._progress = ProgressView(self._screen, crew.workers[0].rank)
        self._hangs = HangWatch(crew.workers, job.hang_report_s, job.hang_timeout_s)
        self._start_all()
        while not self._is_over():
            signals = self._loop.wait(self._limit_s(), not self._screen.is_full)
            for number in signals:
                self._on_signal(number)
            self._tick(time.monotonic())
        return self._finish()

    # What the crew tells.

    def on_lines(self, worker: Worker, is_err: bool, lines: bytes) -> None:
        self._voices.pass_on(worker, is_err, lines)

    def on_message(self, worker: Worker, message: Message) -> None:
        if message["kind"] == "pid":
            self._survival.started(worker)
            self._folder.write_workers({w.rank: w.pid for w in self._crew.workers if w.pid})
            if self._ending is not None:
                self._crew.signal(signal.SIGKILL, [worker])  # It came too late.
        elif message["kind"] == "ranks":
            if self._survival.heard(worker, message) and self._ending is None:
                self._end(endings.of_failure(time.monotonic()))
        elif message["kind"] == "progress":
            self._progress.tell(worker.rank, message)
        elif message["kind"] == "here":
            self._hangs.answered(worker, message)
        elif message["kind"] == "ended":
            worker.ended = message
            if message["code"]:
                self._crew.drain(worker)
                trace = message["trace"].encode(errors="backslashreplace")
                self._folder.write_log(worker.rank, trace)
                self._voices.muted.add(worker.rank)
                assert worker.control is not None, "it has just spoken"
                worker.control.send({"kind": "noted"})
                if not self._survival.is_needed:
                    self._notice(worker)

    def on_gone(self, worker: Worker, code: int) -> None:
        self._survival.closed(worker, code)

    def on_death(self, worker: Worker) -> None:
        if worker.fault:
            self._folder.write_log(worker.rank, bytes(worker.fault))
        if not self._survival.is_needed:
            self._notice(worker)
            return
        culprit = self._survival.replace(worker, self._pressure.shown())
        if culprit is not None and self._ending is None:
            self._failures, self._culprit = [culprit], culprit
            self._end(endings.of_failure(time.monotonic()))

    def on_noise(self, data: bytes) -> None:
        self._screen.write(True, data)

    def on_starter_lost(self) -> None:
        self._starter_is_lost = True

    # Notice, decide.

    def _notice(self, worker: Worker) -> None:
        failure = worker.failure(self._pressure.shown())
        if failure is None or any(f.rank == failure.rank for f in self._failures):
            return
        self._failures.append(failure)
        if self._ending is not None:
            return
        wait_s = _COLLECT_AFTER_CONSEQUENCE_S if failure.is_consequence else _COLLECT_S
        at_s = time.monotonic() + wait_s
        self._decide_at_s = min(at_s, self._decide_at_s or at_s)

    def _decide(self, now_s: float) -> None:
        self._decide_at_s = None
        culprit = first_of(self._failures)
        self._culprit = culprit
        decision = self._policy.decide(culprit, self._restarts)
        self._restarts_all = decision.action is Action.RESTART_ALL
        self._end(endings.of_failure(now_s))
        if self._restarts_all:
            self._report_failure(f"Starting all ranks again: {decision.reason}.")

    # End.

    def _end(self, ending: Ending) -> None:
        """Begin the end; a second reason changes nothing."""
        self._screen.set_bar("")
        self._ending = ending
        self._stopped_count = len([w for w in self._crew.alive() if w.ended is None])
        if ending.reason in ("failure", "interrupt", "hang"):
            self._voices.muted.update(worker.rank for worker in self._crew.workers)
        self._crew.cancel()
        self._send_due(ending.began_s)

    def _send_due(self, now_s: float) -> None:
        assert self._ending is not None, "there is an end under way"
        for number in self._ending.due(now_s):
            self._crew.signal(number)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._crew.bury()
            return
        now_s = time.monotonic()
        if self._ending is not None and self._ending.reason != "failure":
            self._ending.hurry(now_s)
            return
        self._restarts_all = False
        self._decide_at_s = None
        alive = len(self._crew.alive())
        workers = f"{alive} worker{'s' if alive != 1 else ''}"
        if number == signal.SIGINT:
            self._screen.say(f"interrupted: stopping {workers}; Ctrl-C again kills at once")
            self._end(endings.of_interrupt(now_s))
        else:
            name, grace_s = signal.Signals(number).name, self._job.grace_s
            self._screen.say(f"{name}: passed on to {workers}; killed in {grace_s:g} s if need be")
            self._end(endings.of_request(number, grace_s, now_s))

    # Time.

    def _tick(self, now_s: float) -> None:
        self._pressure.look(now_s)
        if self._decide_at_s is not None and now_s >= self._decide_at_s:
            self._decide(now_s)
        if self._starter_is_lost and self._ending is None:
            self._end(endings.of_failure(now_s))
        if self._ending is None and self._decide_at_s is None:
            self._look_for_hangs(now_s)
            self._survival.look_after(self._crew.workers, now_s)
        if self._ending is not None:
            self._send_due(now_s)
            if self._restarts_all and not self._crew.alive() and self._is_drained():
                self._restart_all()
        self._start_again()

    def _look_for_hangs(self, now_s: float) -> None:
        for text in self._hangs.news(now_s):
            self._screen.say(text)
        if self._hangs.is_timed_out(now_s):
            self._screen.say(f"ended, because it hung for {self._job.hang_timeout_s:g} s")
            self._end(endings.of_hang(now_s))

    def _limit_s(self) -> float:
        times = [self._decide_at_s, self._ending.next_s() if self._ending is not None else None]
        now_s = time.monotonic()
        return min([_TICK_S, *(at_s - now_s for at_s in times if at_s is not None)])

    def _start_all(self) -> None:
        self._job.prepare()
        self._crew.start(self._crew.workers, self._message_of, self._job.listener_of)

    def _start_again(self) -> None:
        """Those who are to be started again while the others go on."""
        again, self._survival.again = self._survival.again, []
        if again and self._ending is None:
            for worker in again:
                worker.restarts += 1
                self._voices.muted.discard(worker.rank)
                self._crew.close_streams(worker)
            self._crew.start(again, self._message_of, self._job.listener_of)

    def _message_of(self, worker: Worker) -> Message:
        self._survival.admit(worker)
        return self._job.message_of(worker)

    def _restart_all(self) -> None:
        self._restarts += 1
        self._restarts_all, self._ending, self._culprit = False, None, None
        self._failures.clear()
        self._voices.muted.clear()
        self._hangs.forget()
        for worker in self._crew.workers:
            self._crew.close_streams(worker)
            worker.restarts = self._restarts
        self._start_all()

    def _is_drained(self) -> bool:
        """Whether all output has been read, or will not come: somebody else holds the pipe."""
        late_s = time.monotonic() - _DRAIN_S
        return all(self._crew.is_drained(w) or w.died_s < late_s for w in self._crew.workers)

    def _is_over(self) -> bool:
        if self._restarts_all or self._survival.again or self._decide_at_s is not None:
            return False
        if self._starter_is_lost:
            return not [w for w in self._crew.alive() if w.pid]
        return not self._crew.alive() and self._is_drained()

    # Report.

    def _finish(self) -> int:
        for worker in self._crew.workers:
            self._crew.close_streams(worker)
        if self._ending is not None and self._ending.code is not None:
            return self._ending.code
        told = self._survival.told_end
        if told is not None:
            self._screen.say(f"{told.text.rstrip()}\nLogs: {self._folder.shown()}/")
            return told.code
        if self._culprit is not None:
            self._report_failure(self._outcome(self._culprit))
            return self._culprit.code
        if self._starter_is_lost:
            self._screen.say(
                "the process that workers are forked from died; --no-fork does without"
            )
            return 1
        return 0

    def _outcome(self, culprit: Failure) -> str:
        text = outcome(len(self._failures) - 1, self._stopped_count)
        told = {w.rank: w.ended for w in self._crew.workers if w.ended is not None}
        gone = [r for r, end in told.items() if not end["code"] and end["at_s"] < culprit.at_s]
        if culprit.is_consequence and gone:
            text += f" Before it, {ranks_named(gone)} had ended with exit code 0: out of data?"
        return text

    def _report_failure(self, outcome: str) -> None:
        assert self._culprit is not None, "somebody failed"
        log = f"Logs: {self._folder.shown()}/rank-{self._culprit.rank}.log and its neighbours."
        self._screen.say(failure_report(self._culprit, outcome, log, str(Path.cwd())))
