"""The few things that are asked of Linux through ctypes: deaths, orphans, and names of processes.

Every function does nothing where the kernel does not know it; none of them decides anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
# A process shows the memory of its first arguments as its command line. We hand every process that
# will have a title an argument as long as this one, and write the title over it.
PADDING = "-" * 160

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent's starting thread ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_title(title: str) -> None:
    """What ps and top show: the command line, if there is room for it, and the short name."""
    _libc.prctl(_PR_SET_NAME, title.encode(errors="replace")[:15], 0, 0, 0)
    text = Path("/proc/self/stat").read_text()
    fields = text[text.rindex(")") + 2 :].split()
    start, end = int(fields[45]), int(fields[46])
    room = end - start
    if _has_padding() and room > 0:
        ctypes.memmove(start, title.encode(errors="replace")[: room - 1].ljust(room, b"\0"), room)


@functools.cache  # A forked process keeps the answer: the padding is overwritten by then.
def _has_padding() -> bool:
    return PADDING.encode() in Path("/proc/self/cmdline").read_bytes()


def children() -> list[int]:
    """The pids of this process's children, adopted ones included."""
    me, found = os.getpid(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and state_and_parent(int(folder.name))[1] == me:
            found.append(int(folder.name))
    return found


def state_and_parent(pid: int) -> tuple[str, int]:
    """The state letter of a process (T is stopped, Z is dead and not yet buried), its parent."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", 0
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[1])


def signal_main_thread(pid: int, number: int) -> None:
    """A signal that the main thread handles before it does anything else, if the process is there.

    A signal to the whole process goes to any thread; the main one may then move on first.
    """
    _libc.tgkill(pid, pid, number)


def kill_group(leader: int, number: int) -> None:
    """A signal to a process group; nobody may be there any more."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
