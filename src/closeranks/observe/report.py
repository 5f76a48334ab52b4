"""The words of the launcher when something went wrong. Pure: values in, lines out.

A failure is told in at most 15 lines: which rank, what, where in the user's own code, what became
of the others, and where the rest can be read.
"""

from __future__ import annotations

from collections.abc import Sequence

from closeranks.observe.failure import Failure
from closeranks.observe.frames import Frame, worth_showing
from closeranks.observe.hang import Hang, Seen, where

_WHAT_LINES_MAX = 4
_FRAMES_MAX = 5
_CAUSES_MAX = 2
_CHARACTERS_MAX = 200
_ABSENT_MAX = 3
_PLACES_MAX = 4


def failure_report(failure: Failure, outcome: str, logs: str, here: str) -> str:
    """What happened, seen from the folder `here`; outcome and logs are sentences of the caller."""
    what = failure.what.splitlines() or [""]
    first = f"rank {failure.rank} failed first: {_cut(what[0])}"
    if failure.is_bare:
        first = "; ".join([f"rank {failure.rank} {what[0]}", *failure.notes])
    lines = [first]
    lines += [f"  {_cut(line)}" for line in what[1:_WHAT_LINES_MAX]]
    if len(what) > _WHAT_LINES_MAX:
        lines.append(f"  ... {len(what) - _WHAT_LINES_MAX} more lines, see its log")
    lines += [
        f"  caused by {_cut(cause.splitlines()[0])}" for cause in failure.causes[:_CAUSES_MAX]
    ]
    lines += stack_lines(failure.frames, here, _FRAMES_MAX)
    return "\n".join([*lines, outcome, logs])


def outcome(failed_after: int, stopped: int) -> str:
    """What became of the other ranks."""
    parts = []
    if failed_after:
        parts.append(f"{failed_after} other rank{_s(failed_after)} failed after it")
    if stopped:
        noun = "" if parts else f" other rank{_s(stopped)}"
        parts.append(f"{stopped}{noun} {'was' if stopped == 1 else 'were'} stopped")
    return (", ".join(parts) or "No other rank was running") + "."


def hang_report(hang: Hang, now_s: float, here: str, consequence: str) -> str:
    """Who did not come, what it does instead, and what the others wait in."""
    waited = f"{now_s - hang.since_s:.0f} s"
    waiting = f"{ranks_named([seen.rank for seen in hang.stuck])} "
    waiting += f"{'waits' if len(hang.stuck) == 1 else 'wait'} since {waited}"
    if hang.absent:
        absent = ranks_named([seen.rank for seen in hang.absent])
        lines = [f"{absent} did not come: {waiting}"]
    else:
        lines = [f"no rank is missing, but {waiting}: they do not wait for the same"]
    for seen in hang.absent[:_ABSENT_MAX]:
        lines += _absent_lines(seen, now_s, here)
    places: dict[str, list[int]] = {}
    for seen in hang.stuck:
        places.setdefault(where(seen), []).append(seen.rank)
    for place, ranks in list(places.items())[:_PLACES_MAX]:
        lines.append(f"  {ranks_named(ranks)} in {_cut(place)}")
        seen = next(each for each in hang.stuck if each.rank == ranks[0])
        lines += [f"  {line}" for line in stack_lines(seen.frames, here, 1)]
    return "\n".join([*lines, consequence])


def _absent_lines(seen: Seen, now_s: float, here: str) -> list[str]:
    name = f"rank {seen.rank} (pid {seen.pid})"
    if seen.has_ended:
        return [f"  rank {seen.rank} has ended, with exit code 0"]
    state = "is at" if seen.frames else "is somewhere that it does not tell"
    if seen.is_stopped:
        state = f"is stopped (`kill -CONT {seen.pid}` wakes it), at"
    elif seen.is_silent:
        state = "does not answer (something holds Python's lock), at"
    elif seen.wait is not None or seen.call is not None:
        state = f"waits elsewhere, in {_cut(where(seen))}, at"
    lines = [f"  {name} {state}"]
    lines += [f"  {line}" for line in stack_lines(seen.frames, here, _FRAMES_MAX)]
    if seen.span is not None:
        lines.append(f"    its last span: {seen.span[0]!r}, since {now_s - seen.span[1]:.0f} s")
    return lines


def stack_lines(frames: Sequence[Frame], here: str, count_max: int) -> list[str]:
    """The innermost frames of the user's own files, the innermost last."""
    return [f"  {frame.shown(here)}" for frame in worth_showing(frames, count_max)]


def ranks_named(ranks: Sequence[int], count_max: int = 8) -> str:
    """ "rank 3", "ranks 0, 1 and 2", "ranks 0, 1, ... (62 of them)"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > count_max:
        shown = ", ".join(map(str, ranks[: count_max - 2]))
        return f"ranks {shown}, ... ({len(ranks)} of them)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _cut(text: str) -> str:
    return text if len(text) <= _CHARACTERS_MAX else text[: _CHARACTERS_MAX - 3] + "..."
