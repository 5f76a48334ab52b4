"""Places in Python code as plain values: read from a traceback, a running thread or faulthandler.

A report shows the places that its reader can change: the user's own files first. Source lines are
read by whoever shows a frame, so that a process that is in trouble has little to do.
"""

from __future__ import annotations

import itertools
import linecache
import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

_LIBRARIES = tuple(
    {os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")}
)
_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")
_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_FAULTHANDLER_LINE = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_SOURCE_CHARACTERS_MAX = 90


@dataclass(frozen=True)
class Frame:
    """One place in the code; a list of them runs from the outermost to the innermost."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether the file is neither of Python, nor an installed package, nor ours."""
        if self.file.startswith("<") or _PACKAGES.search(self.file):
            return False
        return not os.path.realpath(self.file).startswith((*_LIBRARIES, _OURS))

    def shown(self, folder: str) -> str:
        """ "train.py:12 in step: loss.backward()", the path as seen from the folder."""
        path = self.file
        if path.startswith(folder + os.sep):
            path = path[len(folder) + 1 :]
        source = linecache.getline(self.file, self.line).strip()
        if len(source) > _SOURCE_CHARACTERS_MAX:
            source = source[: _SOURCE_CHARACTERS_MAX - 3] + "..."
        where = f"{path}:{self.line} in {self.function}"
        return f"{where}: {source}" if source else where


def frames_of_traceback(trace: TracebackType | None) -> list[Frame]:
    found = []
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append(Frame(code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return found


def frames_of_thread(frame: FrameType | None) -> list[Frame]:
    found = []
    while frame is not None:
        code = frame.f_code
        found.append(Frame(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return found[::-1]


def frames_of_faulthandler(text: str) -> list[Frame]:
    """The main thread's stack, outermost first, from the text of all threads' stacks.

    faulthandler prints the thread that got the signal as "Current thread", which is the main one
    whenever the kernel has the choice, and otherwise the main thread last.
    """
    header = "Current thread" if "Current thread" in text else "Thread 0x"
    lines = text.rpartition(header)[2].splitlines()[1:]
    found: list[Frame] = []
    for line in lines:
        match = _FAULTHANDLER_LINE.match(line)
        if match:
            found.append(Frame(match["file"], int(match["line"]), match["function"]))
        elif found:
            break
    return found[::-1]


def worth_showing(frames: Sequence[Frame], count_max: int) -> list[Frame]:
    """The innermost frames of the user's files; if there are none, the innermost at all.

    A function that calls itself again and again is shown once.
    """
    users = [frame for frame in frames if frame.is_users] or frames
    return [frame for frame, _ in itertools.groupby(users)][-count_max:]


def as_plain(frames: Iterable[Frame]) -> list[list[object]]:
    """For a message between processes."""
    return [[frame.file, frame.line, frame.function] for frame in frames]


def from_plain(plain: Iterable[Sequence[object]]) -> list[Frame]:
    return [Frame(str(f), int(str(line)), str(function)) for f, line, function in plain]
