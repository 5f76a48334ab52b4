"""From the bytes that workers write to the lines that people read. Pure.

A line is shown whole or not at all, whatever else is written in the meantime; its text is never
interpreted. What a program overwrites with carriage returns (a bar) would be hundreds of lines:
only the last state of each line is kept, and of one that goes on, a state every few seconds.
"""

from __future__ import annotations

_LINE_BYTES_MAX = 1 << 16
_OVERWRITTEN_EVERY_S = 5.0
_COLOURS = (36, 32, 35, 33, 34, 96, 92, 95, 93, 94)  # red is left for errors
_RESET = b"\x1b[0m"


class Lines:
    """Cuts one stream of bytes into whole lines."""

    def __init__(self) -> None:
        self._tail = b""
        self._shown_at_s = 0.0

    def feed(self, data: bytes, now_s: float) -> bytes:
        """The lines that these bytes complete, each with its newline."""
        whole, newline, self._tail = (self._tail + data).rpartition(b"\n")
        lines = whole + newline
        if b"\r" in lines:
            lines = b"".join(_last_state(line) + b"\n" for line in lines[:-1].split(b"\n"))
        if b"\r" in self._tail:
            lines += self._look_at_overwritten(now_s)
        if len(self._tail) > _LINE_BYTES_MAX:
            lines, self._tail = lines + self._tail + b"\n", b""
        return lines

    def finish(self) -> bytes:
        """What is left when the stream ends."""
        tail, self._tail = _last_state(self._tail), b""
        return tail + b"\n" if tail else b""

    def _look_at_overwritten(self, now_s: float) -> bytes:
        """The newest state of a line that is being overwritten, now and then."""
        *before, last = self._tail.split(b"\r")
        states = [state for state in before if state.strip()]
        if last.strip():
            self._tail = b"\r" + last
        else:
            self._tail = b"\r" + (states[-1] if states else b"") + b"\r"
        if not states or now_s - self._shown_at_s < _OVERWRITTEN_EVERY_S:
            return b""
        self._shown_at_s = now_s
        return states[-1] + b"\n"


class Prefix:
    """Writes "rank 3 | " before every line of rank 3."""

    def __init__(self, rank: int, size: int, coloured: bool) -> None:
        label = f"rank {rank:{len(str(size - 1))}}" if size > 1 else ""
        self._coloured = coloured and bool(label)
        if self._coloured:
            label = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{label}\x1b[0m"
        self._prefix = f"{label} | ".encode() if label else b""

    def put_before(self, lines: bytes) -> bytes:
        if not self._prefix or not lines:
            return lines
        end = b"\n"
        if self._coloured and b"\x1b" in lines:
            end = _RESET + b"\n"  # A colour that a line leaves on ends with it.
        return self._prefix + lines[:-1].replace(b"\n", end + self._prefix) + end


def _last_state(line: bytes) -> bytes:
    """What a terminal would show of a line in the end."""
    if b"\r" not in line:
        return line
    states = [state for state in line.split(b"\r") if state.strip()]
    return states[-1] if states else b""
