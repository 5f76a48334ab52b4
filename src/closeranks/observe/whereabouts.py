"""What this process does right now, for somebody outside who wonders why it does not come.

    span    the last thing begun, by name: enter("forward")
    wait    what a Watch sees this process wait for
    call    the collective of torch.distributed that the main thread is in, with its group and size
    groups  how many collectives have been started on each group
    frames  the main thread's Python stack

`now()` is called from a thread of its own and reads what the others do without stopping them. It
uses torch only if the process has loaded it already, and imports nothing.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from types import FrameType
from typing import Any, Protocol

from closeranks.observe.frames import as_plain, frames_of_thread

_C10D = "torch.distributed.distributed_c10d"
_MEETINGS = {"init_process_group": "init_process_group()", "join_group": "closeranks.init()"}
_FRAMES_MAX = 40

_span: tuple[str, float] | None = None


class Waiting(Protocol):
    """Somebody who knows what is being waited for; Watch is one."""

    def current(self) -> tuple[str, float] | None:
        """What this process waits for and since when (time.monotonic()), or None."""


_waited_s = 0.0
_watches: weakref.WeakSet[Any] = weakref.WeakSet()


def enter(span: str) -> None:
    """Something begins; it is this process's last span until the next one."""
    global _span
    _span = (span, time.monotonic())


def ask(waiting: Waiting) -> None:
    """From now on ask this one, too, what is being waited for."""
    _watches.add(waiting)


def waited(seconds: float) -> None:
    """This process has waited for others."""
    global _waited_s
    _waited_s += seconds


def waited_s() -> float:
    """For how long in all."""
    return _waited_s


def now() -> dict[str, Any]:
    """All of it, ready for JSON."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    waits = [wait for watch in list(_watches) if (wait := watch.current()) is not None]
    return {
        "at_s": time.monotonic(),
        "span": _span,
        "wait": min(waits, key=lambda wait: wait[1]) if waits else None,
        "call": _collective(frame),
        "groups": _sequence_numbers(),
        "frames": as_plain(frames_of_thread(frame)[-_FRAMES_MAX:]),
    }


def _collective(frame: FrameType | None) -> str | None:
    """The innermost call of torch.distributed, or of ours, that waits for other ranks."""
    c10d = sys.modules.get(_C10D)
    file = getattr(c10d, "__file__", None)
    found = None
    while frame is not None:
        code = frame.f_code
        if code.co_name in _MEETINGS and (
            code.co_filename == file or "closeranks" in code.co_filename
        ):
            return _MEETINGS[code.co_name]
        if code.co_filename == file and not code.co_name.startswith("_"):
            found = _described(code.co_name, frame.f_locals, c10d)
        frame = frame.f_back
    return found


def _described(name: str, values: dict[str, Any], c10d: Any) -> str:
    """ "all_reduce of 1000 x float32, the default group (4 ranks)"."""
    text = name
    for key in ("tensor", "object", "input", "output", "tensor_list", "input_tensor"):
        value: Any = values.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        if hasattr(value, "numel") and hasattr(value, "dtype"):
            text += f" of {value.numel()} x {str(value.dtype).removeprefix('torch.')}"
            break
    label = _label(values.get("group"), c10d)
    return f"{text}, {label}" if label else text


def _label(group: Any, c10d: Any) -> str:
    """ "the default group (4 ranks)"; the same words on every rank of the group."""
    try:
        size = c10d.get_world_size(group)
        if group is None or group is c10d._get_default_group():
            return f"the default group ({size} ranks)"
        return f"group {c10d._get_process_group_name(group)} ({size} ranks)"
    except (RuntimeError, ValueError, KeyError, AttributeError):
        return ""


def _sequence_numbers() -> dict[str, int]:
    c10d = sys.modules.get(_C10D)
    world = getattr(c10d, "_world", None)
    found: dict[str, int] = {}
    for group in list(getattr(world, "pg_names", {})):
        label = _label(group, c10d)
        try:
            found[label] = int(group._get_sequence_number_for_group())
        except (RuntimeError, AttributeError):
            continue
    return found
