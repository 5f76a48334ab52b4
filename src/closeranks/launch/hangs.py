"""Asks the workers now and then where they are, and says when some wait for one that does not come.

The judgement is observe/hang.py's; this is the shell around it: questions, answers, and the stack
of a process that cannot answer. A worker that is stopped is woken for its stack and stopped again.
"""

from __future__ import annotations

import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from closeranks.launch import kernel
from closeranks.launch.channel import Message
from closeranks.launch.lifecycle import State
from closeranks.launch.record import Worker
from closeranks.launch.worker import STACK_SIGNAL
from closeranks.observe.frames import frames_of_faulthandler, from_plain
from closeranks.observe.hang import Hang, Seen, judge
from closeranks.observe.report import hang_report, ranks_named

_ASK_EVERY_S_MAX = 5.0
_ANSWER_S_MAX = 2.0
_DUMP_S = 1.0
# The outermost frame of a worker's main thread, which faulthandler prints last.
_DUMP_END = b"in _run_module_as_main\n"


@dataclass
class _Asked:
    """What is known of one worker's place."""

    asked_s: float = 0.0  # when the question went out that has no answer yet; 0: there is none
    answer: Message | None = None
    unmoved_since_s: float = 0.0


class HangWatch:
    """Looks at all workers of one job."""

    def __init__(self, workers: list[Worker], report_s: float, timeout_s: float | None) -> None:
        self._workers = workers
        self._limit_s = min(report_s, timeout_s or report_s)
        self._timeout_s = timeout_s
        self._every_s = min(_ASK_EVERY_S_MAX, self._limit_s / 6)
        self._next_s = 0.0
        self._asked: dict[int, _Asked] = {}
        self._reported: Hang | None = None

    def forget(self) -> None:
        """The workers start again."""
        self._asked.clear()
        self._reported = None

    def answered(self, worker: Worker, answer: Message) -> None:
        asked = self._asked.setdefault(worker.rank, _Asked())
        before, asked.answer, asked.asked_s = asked.answer, answer, 0.0
        if before is None or _moved(before, answer):
            asked.unmoved_since_s = answer["at_s"]

    def news(self, now_s: float) -> list[str]:
        """What there is to say: of a hang that is new, or over."""
        new, over = self.look(now_s)
        if new is not None:
            consequence = "The job goes on until the group's timeout; --hang-timeout S ends it."
            if self._timeout_s is not None:
                consequence = f"The job is ended when it hangs for {self._timeout_s:g} s."
            return [hang_report(self.with_stacks(new), now_s, str(Path.cwd()), consequence)]
        if over is not None:
            ranks = [seen.rank for seen in over.absent or over.stuck]
            return [f"{ranks_named(ranks)} came; the job goes on"]
        return []

    def look(self, now_s: float) -> tuple[Hang | None, Hang | None]:
        """A hang that is new, and one that is over; ask again if it is time."""
        if now_s < self._next_s or len(self._workers) < 2:
            return None, None
        self._next_s = now_s + self._every_s
        hang = judge([self._see(w, now_s) for w in self._workers], self._limit_s, now_s)
        self._ask(now_s)
        before = self._reported
        if before is not None and self._is_still_stopped(before):
            return None, None  # Waking it for its stack may have moved the others a little.
        self._reported = hang
        if hang is None:
            return None, before
        if before is not None and before.key == hang.key:
            return None, None
        return hang, None

    def is_timed_out(self, now_s: float) -> bool:
        """Whether the hang that was reported lasts longer than the user wants to wait."""
        if self._reported is None or self._timeout_s is None:
            return False
        return now_s - self._reported.since_s >= self._timeout_s

    def with_stacks(self, hang: Hang) -> Hang:
        """The same, with the stacks of those who cannot tell where they are."""
        workers = {worker.rank: worker for worker in self._workers}
        absent = []
        for seen in hang.absent:
            is_fresh = seen.frames and not (seen.is_stopped or seen.is_silent)
            if not is_fresh and not seen.has_ended:
                frames = frames_of_faulthandler(dump(workers[seen.rank], seen.is_stopped))
                seen = Seen(**(vars(seen) | {"frames": tuple(frames) or seen.frames}))
            absent.append(seen)
        return Hang(hang.since_s, hang.stuck, tuple(absent))

    def _is_still_stopped(self, hang: Hang) -> bool:
        return any(
            seen.is_stopped and kernel.state_and_parent(seen.pid)[0] in ("T", "t")
            for seen in hang.absent
        )

    def _ask(self, now_s: float) -> None:
        for worker in self._workers:
            asked = self._asked.setdefault(worker.rank, _Asked())
            if worker.state is State.RUNNING and not asked.asked_s and worker.control is not None:
                asked.asked_s = now_s
                worker.control.send({"kind": "where", "id": 0})

    def _see(self, worker: Worker, now_s: float) -> Seen:
        asked = self._asked.get(worker.rank, _Asked())
        answer = asked.answer
        limit_s = min(_ANSWER_S_MAX, self._every_s / 2)
        is_silent = bool(asked.asked_s) and now_s - asked.asked_s > limit_s
        is_stopped = worker.is_alive and kernel.state_and_parent(worker.pid)[0] in ("T", "t")
        if answer is None:
            return Seen(worker.rank, worker.pid, not worker.is_alive, is_stopped, is_silent)
        return Seen(
            rank=worker.rank,
            pid=worker.pid,
            has_ended=not worker.is_alive,
            is_stopped=is_stopped,
            is_silent=is_silent,
            wait=_pair(answer["wait"]),
            call=answer["call"],
            unmoved_since_s=asked.unmoved_since_s,
            groups=answer["groups"],
            span=_pair(answer["span"]),
            frames=tuple(from_plain(answer["frames"])),
        )


def dump(worker: Worker, is_stopped: bool) -> str:
    """All stacks of a worker, from faulthandler, which needs nobody's cooperation."""
    text = b""
    try:
        kernel.signal_main_thread(worker.pid, STACK_SIGNAL)
        if is_stopped:
            kernel.kill(worker.pid, signal.SIGCONT)
        deadline = time.monotonic() + _DUMP_S
        while _DUMP_END not in text and (left_s := deadline - time.monotonic()) > 0:
            if not select.select([worker.fault_fd], [], [], left_s)[0]:
                break
            data = os.read(worker.fault_fd, 1 << 16)
            if not data:
                break
            text += data
    finally:
        if is_stopped:
            kernel.kill(worker.pid, signal.SIGSTOP)
    return text.decode(errors="replace")


def _moved(before: Message, after: Message) -> bool:
    """Whether a worker has done anything between two answers."""
    same_call = after["call"] is not None and before["call"] == after["call"]
    if before["groups"] != after["groups"]:
        return True
    return not same_call and before["frames"] != after["frames"]


def _pair(value: list[object] | None) -> tuple[str, float] | None:
    return None if value is None else (str(value[0]), float(str(value[1])))
