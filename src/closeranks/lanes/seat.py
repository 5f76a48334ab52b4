"""This process's place in a job: which incarnation of which worker it is, and whom it can tell.

`closeranks run` says it in one variable, CLOSERANKS_SEAT = "memory:number": the descriptor of the
job's file (segment/roster.py) and the number of this incarnation. Another launcher may add the
descriptor of a pipe, ":messages". A process without the variable makes a job of its own.

Messages to the launcher are objects of JSON:

    made        this worker has made a Ranks, so its death is to harm nobody
    print, key  a line; it prints the first with this key
    note        a line of its own to show once
    back        this worker has the state again, at this step
    again       it is going to end because it cannot go on; nobody's fault
    end, code   the job cannot go on: text and exit code
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping

from closeranks.observe import launcher
from closeranks.segment.area import is_possible
from closeranks.segment.roster import SEAT_VARIABLE, Roster

AGAIN = 75  # the exit code of a worker that wants to be started again, which is nobody's fault
_LINE_BYTES_MAX = 1 << 20


class Seat:
    """An incarnation of a worker; `messages` is None for a process that is alone."""

    def __init__(self, roster: Roster, number: int, messages: int | None) -> None:
        self.roster = roster
        self.number = number
        self.worker = roster.worker(number)
        self.messages = messages

    @property
    def is_alone(self) -> bool:
        return self.messages is None and launcher.tell is None

    def tell(self, **message: object) -> None:
        """Send a message to the launcher, or do what it would do."""
        if self.messages is None and launcher.tell is not None:
            launcher.tell({"kind": "ranks"} | message)
            return
        if self.messages is None:
            if "print" in message:
                sys.stdout.write(f"{message['print']}\n")
                sys.stdout.flush()
            elif "note" in message:
                sys.stderr.write(f"closeranks: {message['note']}\n")
            return
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(self.messages, line) :]


def take_seat(environ: Mapping[str, str]) -> Seat:
    """The seat that the launcher has kept for this process, or one of its own."""
    seat = environ.get(SEAT_VARIABLE)
    if seat and environ.get("GROUP_WORLD_SIZE", "1") == "1":
        memory, number, *messages = map(int, seat.split(":"))
        taken = Seat(Roster(memory), number, messages[0] if messages else None)
        taken.tell(made=True)
        return taken
    size = environ.get("WORLD_SIZE", "1")
    if size not in ("", "1"):
        raise ValueError(
            f"WORLD_SIZE={size}: this process was started by a launcher whose workers cannot come "
            "back after a death, which Ranks needs. Nothing was trained; start the script with "
            f"`closeranks run -n {size}`, or unset WORLD_SIZE to train alone."
        )
    why = is_possible()
    if why:
        raise ValueError(f"Ranks cannot run here: {why}. Nothing was trained; use x86-64 Linux.")
    roster = Roster.create(1)
    number = roster.admit(0)
    roster.started(number, os.getpid())
    return Seat(roster, number, None)
