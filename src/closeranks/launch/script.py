"""Runs the user's script or module as `python` would, and tells how it ended as plain values.

Knows nothing of ranks or of the launcher. The script becomes the process's __main__ for good, so
that pickling, atexit handlers and threads find it as they would without us.
"""

from __future__ import annotations

import importlib.machinery
import io
import os
import runpy
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from closeranks.observe.frames import Frame, frames_of_traceback

_INTERRUPTED = 130  # as Python itself ends when nobody catches it


@dataclass(frozen=True)
class Ending:
    """How a script ended: with an exit code, and perhaps an exception."""

    code: int
    at_s: float = 0.0
    what: str = ""  # "ValueError: bad batch", "sys.exit(3)"
    classes: tuple[str, ...] = ()  # of the exception, its bases included
    causes: tuple[str, ...] = ()
    frames: tuple[Frame, ...] = ()
    trace: str = ""  # the traceback as Python would print it
    is_printed: bool = False  # a hook of the script's will print it as well


def run_target(
    target: str, is_module: bool, arguments: Sequence[str], tell: Callable[[Ending], None]
) -> int:
    """Run it to its end, tell how it ended, and return its exit code.

    It is told before a hook for exceptions that the script has installed (torch.distributed
    installs one) says it in its own words.
    """
    ending, error = _run_target(target, is_module, arguments)
    tell(ending)
    if error is not None and sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, error.__traceback__)
    return ending.code


def _run_target(
    target: str, is_module: bool, arguments: Sequence[str]
) -> tuple[Ending, BaseException | None]:
    sys.argv = [target, *arguments]
    try:
        if is_module:
            _set_path(os.getcwd())
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            _set_path(os.path.dirname(os.path.realpath(target)))
            _run_script(target)
    except SystemExit as error:
        return _ending_of_exit(error), None
    except BaseException as error:  # noqa: BLE001 - whatever ended the script is what is told
        return _ending_of_exception(error), error
    return Ending(0, time.monotonic()), None


def _set_path(folder: str) -> None:
    """The first entry is ours, from `-m`; Python would have put the script's folder there."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _run_script(path: str) -> None:
    main = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __loader__=loader, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    with io.open_code(os.path.abspath(path)) as file:
        source = file.read()
    exec(compile(source, path, "exec"), vars(main))


def _ending_of_exit(error: SystemExit) -> Ending:
    code = error.code
    if code is None:
        return Ending(0, time.monotonic())
    shown = repr(code) if len(repr(code)) < 200 else "..."
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    return Ending(
        code & 0xFF,
        time.monotonic(),
        f"sys.exit({shown})",
        frames=_users_part(frames_of_traceback(error.__traceback__)),
    )


def _ending_of_exception(error: BaseException) -> Ending:
    at_s = time.monotonic()
    trace: types.TracebackType | None = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    error = error.with_traceback(trace)
    return Ending(
        _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1,
        at_s,
        "".join(traceback.format_exception_only(error)).strip(),
        tuple(each.__name__ for each in type(error).__mro__),
        _causes(error),
        _users_part(frames_of_traceback(trace)),
        "".join(traceback.format_exception(error)),
        sys.excepthook is not sys.__excepthook__,
    )


def _causes(error: BaseException) -> tuple[str, ...]:
    """What it was raised from, the nearest first; of a group, what it is made of."""
    found: list[str] = []
    if isinstance(error, BaseExceptionGroup):
        found = ["".join(traceback.format_exception_only(e)).strip() for e in error.exceptions]
    seen: set[int] = {id(error)}
    cause: Any = error
    while True:
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
        if cause is None or id(cause) in seen:
            return tuple(found)
        seen.add(id(cause))
        found.append("".join(traceback.format_exception_only(cause)).strip())


def _is_ours(file: str) -> bool:
    return file == __file__ or file.startswith("<frozen runpy") or file == runpy.__file__


def _users_part(frames: list[Frame]) -> tuple[Frame, ...]:
    return tuple(frame for frame in frames if not _is_ours(frame.file))
