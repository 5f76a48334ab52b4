"""Exceptions whose message holds the traceback of another process: what really happened there.

A data loader raises in its parent what one of its workers raised, with the worker's traceback as
text in the message; so does torch.multiprocessing. Pure.
"""

from __future__ import annotations

import re

from closeranks.observe.frames import Frame

_MARK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)$')


def unfold(message: str) -> tuple[str, str, list[Frame]]:
    """The message without the traceback, what was raised in the other process, and where.

    The same message, "" and no frames if it holds no traceback.
    """
    before, mark, trace = message.rpartition(_MARK)
    if not mark:
        return message, "", []
    lines = trace.splitlines()
    frames = [
        Frame(match["file"], int(match["line"]), match["function"])
        for match in map(_FRAME.match, lines)
        if match
    ]
    raised = next((n for n, line in enumerate(lines) if line and not line[0].isspace()), None)
    cause = "\n".join(lines[raised:]).strip() if raised is not None else ""
    words = [line.strip() for line in before.replace(_MARK, "").splitlines()]
    headline = " ".join(word for word in words if word and word != "Original")
    return headline, cause, frames
