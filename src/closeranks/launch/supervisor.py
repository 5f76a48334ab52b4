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

from closeranks.launch import ending as endings
from closeranks.launch import last_words
from closeranks.launch.channel import Message
from closeranks.launch.crew import Crew
from closeranks.launch.ending import Ending
from closeranks.launch.folder import JobFolder
from closeranks.launch.hangs import HangWatch
from closeranks.launch.hosts import Peers
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

# How long to wait for other failures after one that may be the first, and after one that says
# only that a peer has gone: then the first is still to come.
_COLLECT_S, _COLLECT_AFTER_CONSEQUENCE_S = 0.05, 0.4
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
        peers: Peers,
    ) -> None:
        self._job = job
        self._folder = folder
        self._screen = screen
        self._loop = loop
        self._policy = policy
        self._survival = survival
        self._peers = peers
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
        self._crew, job = crew, self._job
        self._progress = ProgressView(self._screen, crew.workers[0].rank)
        self._hangs = HangWatch(crew.workers, job.hang_report_s, job.hang_timeout_s)
        self._peers.watch(self._loop, self._on_peer)
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

    def _on_peer(self, message: Message) -> None:
        """Something has ended the job on another machine."""
        if self._ending is not None or self._peers.are_all_done:
            return
        self._decide_at_s = None
        self._screen.say(last_words.of_peer(message, len(self._crew.alive())))
        self._end(endings.of_peer(int(message.get("code", 1)), time.monotonic()))

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
        self._peers.failed(culprit)
        self._culprit = culprit
        decision = self._policy.decide(culprit, self._restarts)
        self._restarts_all = decision.action is Action.RESTART_ALL
        self._end(endings.of_failure(now_s))
        if self._restarts_all:
            became = f"Starting all ranks again: {decision.reason}."
            self._screen.say(last_words.of_failure(culprit, became, self._folder))

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
        workers = last_words.workers_counted(len(self._crew.alive()))
        if number == signal.SIGINT:
            self._peers.ended("interrupted", 130)
            self._screen.say(f"interrupted: stopping {workers}; Ctrl-C again kills at once")
            self._end(endings.of_interrupt(now_s))
        else:
            name, grace_s = signal.Signals(number).name, self._job.grace_s
            self._peers.ended(name, 128 + number)
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
            if self._restarts_all and not self._crew.alive() and self._crew.is_drained():
                self._restart_all()
        self._start_again()

    def _look_for_hangs(self, now_s: float) -> None:
        for text in self._hangs.news(now_s):
            self._screen.say(text)
        if self._hangs.is_timed_out(now_s):
            self._peers.ended("it hangs", endings.HANG_CODE)
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

    def _is_over(self) -> bool:
        if self._restarts_all or self._survival.again or self._decide_at_s is not None:
            return False
        if self._starter_is_lost or (self._ending is not None and self._ending.next_s() is None):
            return not [w for w in self._crew.alive() if w.pid] and self._crew.is_drained()
        is_over = not self._crew.alive() and self._crew.is_drained()
        if is_over and self._ending is None and not self._peers.are_all_done:
            self._peers.finish()
            return self._peers.are_all_done  # Nobody leaves before all are done.
        return is_over

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
            became = last_words.of_others(
                self._culprit, len(self._failures), self._stopped_count, self._crew.workers
            )
            self._screen.say(last_words.of_failure(self._culprit, became, self._folder))
            return self._culprit.code
        if self._starter_is_lost:
            self._screen.say(last_words.OF_STARTER)
            return 1
        return 0
