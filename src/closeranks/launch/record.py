"""What the launcher knows of one worker: its place, its state, its connections and its end."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field

from closeranks.launch.channel import Channel, Message
from closeranks.launch.environment import Place
from closeranks.launch.lifecycle import Event, State, after
from closeranks.launch.output import Lines
from closeranks.observe.embedded import unfold
from closeranks.observe.failure import Failure, is_consequence
from closeranks.observe.frames import frames_of_faulthandler, from_plain


@dataclass
class Worker:
    """One worker through all its restarts."""

    place: Place
    cpus: tuple[int, ...]
    state: State = State.NEW
    restarts: int = 0
    seat: int = 0  # its row in the roster
    pid: int = 0
    died_s: float = 0.0
    status: int | None = None  # as os.waitpid tells it
    control: Channel | None = None
    streams: dict[int, bool] = field(default_factory=dict)  # open descriptors of output: is_err
    lines: tuple[Lines, Lines] = field(default_factory=lambda: (Lines(), Lines()))
    fault_fd: int = -1
    fault: bytearray = field(default_factory=bytearray)  # what faulthandler wrote
    ended: Message | None = None  # how its script ended, in its own words
    answer: Message | None = None  # where it was when it was last asked
    was_ended_by_us: bool = False

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def is_alive(self) -> bool:
        return self.state in (State.STARTING, State.RUNNING)

    def step(self, event: Event) -> None:
        """The next step of its life; a new start forgets the last one."""
        self.state = after(self.state, event)
        if event is Event.START:
            self.pid, self.status, self.ended, self.answer = 0, None, None, None
            self.lines, self.fault, self.was_ended_by_us = (Lines(), Lines()), bytearray(), False
        elif event is Event.DEATH:
            self.died_s = time.monotonic()

    @property
    def code(self) -> int:
        """The exit code as a shell would show it."""
        code = os.waitstatus_to_exitcode(self.status or 0)
        return 128 - code if code < 0 else code

    def failure(self, memory: str) -> Failure | None:
        """How this worker failed; None if it did not, or not yet."""
        told = self.ended
        if told is not None and told["code"]:
            what, cause, frames = unfold(told["what"])
            return Failure(
                rank=self.rank,
                at_s=told["at_s"],
                what=what,
                code=told["code"],
                frames=(*from_plain(told["frames"]), *frames),
                causes=(*([cause] if cause else []), *told["causes"]),
                is_consequence=is_consequence(told["classes"], told["what"]),
            )
        if self.status is None or self.was_ended_by_us:
            return None
        code = os.waitstatus_to_exitcode(self.status)
        if code == 0:
            return None
        what = f"left with exit code {code}, without an exception"
        notes: tuple[str, ...] = ()
        frames = frames_of_faulthandler(self.fault.decode(errors="replace"))
        if code < 0:
            what = f"was killed by {_signal_name(-code)}"
            if -code == signal.SIGKILL:
                notes = (memory,)
        if frames:
            notes += ("the stacks of all its threads are in its log",)
        return Failure(
            rank=self.rank,
            at_s=self.died_s,
            what=what,
            code=self.code,
            frames=tuple(frames),
            is_bare=True,
            notes=notes,
        )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
