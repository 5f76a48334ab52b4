"""The life of one worker process, from its first breath to the user's script and its end.

The same for a worker that was forked from the server and for one that was started anew:

    1. Belong: lead a process group, and die when the launcher does.
    2. Connect: output, crash reports and messages go to the launcher.
    3. Listen: a thread answers the launcher's questions about what this process does.
    4. Run the script, tell how it ended, and leave with its code.

Imports no torch: the script does, or the server has.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import io
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from closeranks.launch import kernel
from closeranks.launch.channel import Channel, Message
from closeranks.launch.script import Ending, run_target
from closeranks.observe import launcher, whereabouts
from closeranks.observe.frames import as_plain
from closeranks.segment.roster import SEAT_VARIABLE

# Only the launcher sends it. A real-time signal, because programs and schedulers have uses of
# their own for SIGUSR1 and SIGUSR2.
STACK_SIGNAL = 50

# What a worker is handed, in this order; a store's listening socket is there on one rank only.
OUT, ERR, FAULT, CONTROL, MEMORY, STORE = range(6)

_NOTED_LIMIT_S = 2.0
_BETWEEN_LIMIT_S = 120.0

_lasting: list[IO[Any] | Channel] = []  # Lives as long as the process does.


def main() -> int:
    """A worker that was started anew: its descriptors are named on its command line."""
    fds = [int(each) for each in sys.argv[1].split(",")]
    control = Channel(socket.socket(fileno=fds[CONTROL]))
    messages: list[Message] = []
    while not messages:
        messages = control.receive()
        if not control.is_open:
            return 1
    return live(messages[0], fds, control)


def live(job: Message, fds: list[int], control: Channel, between: int = 0) -> int:
    """Everything; returns the exit code. `between` is the process that forked this one."""
    # Phase 1
    os.setpgid(0, 0)
    wait_for_end_of(between)
    kernel.die_with_parent()
    if os.getppid() != job["launcher"]:
        return 1
    # Phase 2
    _connect_output(fds[OUT], fds[ERR])
    fault = os.fdopen(fds[FAULT], "w")
    os.set_inheritable(fds[FAULT], False)
    os.set_inheritable(control.fileno(), False)
    os.set_inheritable(fds[MEMORY], False)
    _lasting.extend((fault, control))
    faulthandler.enable(file=fault)
    faulthandler.register(STACK_SIGNAL, file=fault, all_threads=True)
    os.environ.update(job["env"])
    os.environ[SEAT_VARIABLE] = f"{fds[MEMORY]}:{job['seat']}"
    if job["cpus"]:
        with contextlib.suppress(OSError):  # a core may have gone offline
            os.sched_setaffinity(0, job["cpus"])
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        signal.signal(number, handler)  # A shell that starts jobs in the background ignores both.
    _seed_anew()
    kernel.set_title(job["title"])
    # Phase 3
    control.send({"kind": "hello", "pid": os.getpid()})
    launcher.tell = control.send
    noted = threading.Event()
    threading.Thread(
        target=_answer, args=(control, noted), name="closeranks-answers", daemon=True
    ).start()
    if len(fds) > STORE:
        _serve_store(fds[STORE])
    # Phase 4
    if job["is_program"]:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, programs do not.
        os.execvp(job["target"], [job["target"], *job["arguments"]])
    tell = functools.partial(_tell, control, noted)
    return run_target(job["target"], job["is_module"], job["arguments"], tell)


def wait_for_end_of(between: int) -> None:
    """A forked worker is the launcher's child once the process between them has ended.

    That one forks all the others first, which takes a while where there are many of them and few
    cores. Who gave up before would be killed as the child of somebody who ends. If the launcher has
    ended as well, somebody else is the parent, who is nobody to wait for.
    """
    deadline = time.monotonic() + _BETWEEN_LIMIT_S
    while os.getppid() == between and time.monotonic() < deadline:
        time.sleep(0.0005)


def _connect_output(out: int, err: int) -> None:
    for fd, number in ((out, 1), (err, 2)):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _seed_anew() -> None:
    """Processes forked from one must not draw the same random numbers; Python's own do not."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _serve_store(listener: int) -> None:
    """On rank 0: the store that all ranks meet at, on the socket that the launcher has opened."""
    from closeranks.world.meeting import serve_for_job

    serve_for_job(os.environ["MASTER_ADDR"], listener)


def _answer(control: Channel, noted: threading.Event) -> None:
    """Answer the launcher until it is gone."""
    while control.is_open:
        for message in control.receive():
            if message["kind"] == "where":
                control.send({"kind": "here", "id": message["id"], **whereabouts.now()})
            elif message["kind"] == "noted":
                noted.set()


def _tell(control: Channel, noted: threading.Event, ending: Ending) -> None:
    """Tell the launcher how the script ended, after everything that it has said.

    Wait until it knows: what is written from here on, like the traceback of a rank that failed
    only because another one did, is for the log.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by the script, or full
            stream.flush()
    control.send(
        {
            "kind": "ended",
            "code": ending.code,
            "at_s": ending.at_s,
            "what": ending.what,
            "classes": ending.classes,
            "causes": ending.causes,
            "frames": as_plain(ending.frames),
            "trace": "" if ending.is_printed else ending.trace,
        }
    )
    if ending.code:
        noted.wait(_NOTED_LIMIT_S)
    if ending.trace:
        _write_error_file(ending)


def _write_error_file(ending: Ending) -> None:
    """What torchrun's tools expect of a worker that failed, unless the script wrote it itself."""
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if path.name and not path.exists():
        extra = {"py_callstack": ending.trace, "timestamp": str(int(time.time()))}
        text = json.dumps({"message": {"message": ending.what, "extraInfo": extra}})
        with contextlib.suppress(OSError):
            path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
