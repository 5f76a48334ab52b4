"""Who is there: what a launcher knows and decides for a job whose script made a Ranks.

    admit    every start of a worker gets a row in the roster, which all workers see
    hear     lines that are printed once, notes, and the end of the job, from whichever worker
    closed   a worker is gone: the roster says so at once; is it started again?
    look     who has to be killed: without progress, or stopped when the script has ended elsewhere
    tidy     the memory of the dead is given back when nobody can want it any more

Knows the roster and numbers; time is an argument. Processes, words on the screen and everything
else about the job are the caller's business, the launcher's or a test's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from closeranks.launch.policy import Action, Decision, ResilientPolicy
from closeranks.segment import roster as words
from closeranks.segment.roster import ENDED, FAILED, KILLED, Roster

STALLED_S = 60.0  # without any progress, before a worker is killed and started again
_STEPS_BEFORE_STALLED = 2  # the first ones may take long: files are read, kernels are chosen
_TICKS_BEHIND = 2  # then its share of what the others do is gone


@dataclass(frozen=True)
class Said:
    """What the launcher is to do about a message: print a line, show a note, or end the job."""

    what: str  # "print", "note" or "end"
    text: str
    code: int = 0


@dataclass(frozen=True)
class Seen:
    """A living worker, as its words and the kernel tell."""

    number: int
    pid: int
    at: int
    steps: int
    silent_s: float  # since it last finished anything
    is_lost: bool
    is_stopped: bool


class Muster:
    """The roster of one job, kept by its launcher."""

    def __init__(self, roster: Roster, policy: ResilientPolicy) -> None:
        self.roster = roster
        self.is_resilient = False  # a worker has made a Ranks
        self.has_ended = False  # the script of a worker has come to its end
        self._policy = policy
        self._alive: set[int] = set()
        self._dead: set[int] = set()  # whose memory is still there
        self._vain: dict[int, int] = {}  # restarts of a worker since it last finished a step
        self._asked_again: set[int] = set()
        self._died_s: dict[int, float] = {}
        self._once: set[str] = set()

    def admit(self, worker: int) -> int:
        """The number of the next incarnation of a worker."""
        number = self.roster.admit(worker)
        self._alive.add(number)
        return number

    def hear(self, number: int, message: Mapping[str, Any], now_s: float) -> list[Said]:
        """A message of a worker (lanes/seat.py says which there are)."""
        worker = self.roster.worker(number)
        if "made" in message:
            self.is_resilient = True
        elif "again" in message:
            self._asked_again.add(number)
        elif "back" in message and worker in self._died_s:
            after_s = now_s - self._died_s.pop(worker)
            at = f"at step {message['back']}"
            return [Said("note", f"rank {worker} is back after {after_s:.1f} s, {at}")]
        elif "print" in message and self._is_first(["print", message["key"]]):
            return [Said("print", message["print"])]
        elif "note" in message and self._is_first(["note", message["note"]]):
            return [Said("note", message["note"])]
        elif "end" in message and self._is_first(["end"]):
            return [Said("end", message["end"], message["code"])]
        return []

    def _is_first(self, key: list[str]) -> bool:
        text = json.dumps(key)
        is_first = text not in self._once
        self._once.add(text)
        return is_first

    # Deaths.

    def closed(self, number: int, code: int, now_s: float) -> Decision:
        """The kernel says that a worker is gone, with this code (negative: by a signal)."""
        row = self.roster.row(number)
        steps = self.roster.word_of(number, words.STEPS)
        status = KILLED if code < 0 else (FAILED if code else ENDED)
        self.roster.closed(number, status, abs(code))
        self._alive.discard(number)
        self._dead.add(number)
        if not self.is_resilient:
            return Decision(Action.END, "it made no Ranks")
        if code == 0:
            self.has_ended = True
            return Decision(Action.GO_ON, "its script has ended")
        if self.has_ended:
            return Decision(Action.GO_ON, "the script has ended elsewhere")
        self._died_s.setdefault(row.worker, now_s)
        vain = 0 if steps else self._vain.get(row.worker, 0)
        decision = self._policy.decide(vain)
        self._vain[row.worker] = vain + (number not in self._asked_again)
        if decision.action is Action.GO_ON and not self._alive:
            return Decision(Action.END, f"{decision.reason}, and nobody else is left")
        return decision

    def asked_again(self, number: int) -> bool:
        """Whether this worker wanted to be started again, which is nobody's fault."""
        return number in self._asked_again

    def _holders(self) -> list[int]:
        """The living who have the state."""
        word_of = self.roster.word_of
        return [n for n in self._alive if word_of(n, words.AT) and not word_of(n, words.LOST)]

    # Looking after the living, and after the memory of the dead.

    def look(self, now_ns: int, is_stopped: Callable[[int], bool]) -> list[tuple[int, str]]:
        """Who is to be killed, by number, and why."""
        if not self.is_resilient:
            return []
        seen = [self._see(number, now_ns, is_stopped) for number in sorted(self._alive)]
        seen = [each for each in seen if each.pid]
        if self.has_ended:
            reason = "is stopped while the script has ended elsewhere; it is killed"
            return [(each.number, reason) for each in seen if each.is_stopped]
        return [
            (each.number, f"made no progress for {each.silent_s:.0f} s; it is killed")
            for each in seen
            if is_stalled(each, [other for other in seen if other is not each])
        ]

    def _see(self, number: int, now_ns: int, is_stopped: Callable[[int], bool]) -> Seen:
        pid = self.roster.row(number).pid
        at, steps, progress_ns, lost = (
            self.roster.word_of(number, word)
            for word in (words.AT, words.STEPS, words.PROGRESS_NS, words.LOST)
        )
        silent_s = (now_ns - progress_ns) / 1e9 if progress_ns else 0.0
        return Seen(number, pid, at, steps, silent_s, bool(lost), bool(pid) and is_stopped(pid))

    def tidy(self) -> None:
        """Give back the memory of those who died in a tick that all others have behind them."""
        holders = self._holders()
        if not holders or self.has_ended:
            return
        behind = min(self.roster.word_of(number, words.AT) for number in holders)
        for number in [n for n in self._dead if self.roster.word_of(n, words.AT) + 1 < behind]:
            self._dead.remove(number)
            self.roster.clear_area(number)


def is_stalled(worker: Seen, others: list[Seen]) -> bool:
    """Whether a worker should be killed because it does not go on. Pure.

    Not if it may only be slow: it is stopped, or the others are so far ahead that what it does is
    of no use. And not if nobody else could go on: then there is nothing to win.
    """
    if worker.steps < _STEPS_BEFORE_STALLED or worker.silent_s <= STALLED_S:
        return False
    going = [other for other in others if not other.is_stopped]
    is_passed = any(other.at >= worker.at + _TICKS_BEHIND for other in going)
    return bool(going) and (worker.is_stopped or is_passed)
