"""Runs the launcher on a terminal of 100 columns, as a person would see it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Shown:
    """What came out of the terminal, escape sequences and all, and how the launcher ended."""

    code: int
    text: str


def on_terminal(
    folder: Path, *arguments: str, script: str, until: str = "", env: dict[str, str] | None = None
) -> Shown:
    """Run a job to its end; when `until` was shown, press Ctrl-C."""
    (folder / "train.py").write_text(textwrap.dedent(script))
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ.pop("NO_COLOR", None)
        os.environ.update({"TERM": "xterm-256color"} | (env or {}))
        command = [sys.executable, "-m", "closeranks", "run", *arguments]
        os.execv(sys.executable, command)
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        shown, deadline, pressed = b"", time.monotonic() + _DEADLINE_S, False
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 1.0)[0]:
                continue
            try:
                data = os.read(terminal, 65536)
            except OSError:  # The last process on the terminal has closed it.
                break
            shown += data
            if until and not pressed and until.encode() in shown:
                pressed = True
                os.write(terminal, b"\x03")
        else:
            raise AssertionError(f"it did not end:\n{shown.decode(errors='replace')}")
        _, status = os.waitpid(pid, 0)
        return Shown(os.waitstatus_to_exitcode(status), shown.decode())
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise
    finally:
        os.close(terminal)
