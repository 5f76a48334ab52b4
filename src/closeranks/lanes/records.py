"""What workers tell each other of a tick in texts: of each lane, of its buffers, of what came out.

Records of lanes and buffers have two places, for even and odd ticks. What came out of a tick is
kept for some hundred ticks, for those who have missed it.

Knows words and texts; must not know gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from closeranks.lanes import words as w
from closeranks.lanes.board import Board
from closeranks.lanes.buffers import Buffers
from closeranks.lanes.lane import Lane
from closeranks.segment.area import Area


class Records:
    """Texts of everybody, written by one worker into its own area."""

    def __init__(self, board: Board) -> None:
        self.board = board

    def write(self, tick: int, lane: int, text: str) -> None:
        number = (tick & 1) * w.LANES_MAX + lane
        self._write(w.RECORD_DATA, number, w.record_word(tick, lane), tick, text)

    def read(self, tick: int, lane: int) -> str | None:
        number = (tick & 1) * w.LANES_MAX + lane
        return self._read(w.RECORD_DATA, number, w.record_word(tick, lane), tick)

    def lanes(self, tick: int, count: int) -> list[Lane] | None:
        """All lanes of a tick, as they were told; None if one is missing."""
        texts = [self.read(tick, lane) for lane in range(count)]
        if None in texts:
            return None
        return [Lane.read(tick, k, text) for k, text in enumerate(texts) if text is not None]

    def keep(self, tick: int, text: str) -> None:
        """What came out of a tick."""
        slot = tick % w.HISTORY_COUNT
        self._write(w.HISTORY_DATA, slot, w.HISTORY + slot, tick, text)

    def kept(self, tick: int) -> str | None:
        slot = tick % w.HISTORY_COUNT
        return self._read(w.HISTORY_DATA, slot, w.HISTORY + slot, tick)

    def tell_looks(self, slot: int, word: int, value: int, text: str) -> None:
        """How the values of this worker look (likeness.py)."""
        self._write(w.LOOKS_DATA, slot, word, value, text)

    def looks_of(self, area: Area, slot: int, word: int, value: int) -> str | None:
        return _read_from(area, w.LOOKS_DATA, slot, word, value)

    def tell_buffers(self, tick: int, buffers: Buffers) -> None:
        """The buffers as lane 0 has left them."""
        me, size = self.board.me, buffers.size_bytes
        # Nobody may find an older record of lane 0 whose buffers are gone.
        me.words[w.record_word(tick, 0)] = 0
        me.take(w.buffer_data(tick), 0, size)
        with me.write(w.BUFFERS + (tick & 1), tick):
            buffers.pack(me.tensor(w.buffer_data(tick), 0, size, torch.uint8))

    def buffers(self, tick: int, buffers: Buffers) -> list[Tensor] | None:
        """The values of the buffers after lane 0, or None if nobody has them any more."""
        size, word = buffers.size_bytes, w.BUFFERS + (tick & 1)
        for area in self.board.known:
            if area.words[word] == tick:
                source = area.tensor(w.buffer_data(tick), 0, size, torch.uint8)
                values = buffers.unpack(source)
                if area.words[word] == tick:
                    return values
        return None

    def _write(self, section: int, number: int, word: int, value: int, text: str) -> None:
        """A text of mine that others may read while the word has this value."""
        raw = text.encode()
        if len(raw) > w.TEXT_BYTES_MAX - 8:
            raise ValueError(
                f"what was logged or summed in one lane or tick is {len(raw)} bytes long, at most "
                f"{w.TEXT_BYTES_MAX - 8}. Training stopped; log or sum less at a time."
            )
        start, me = number * w.TEXT_BYTES_MAX, self.board.me
        me.take(section, start, len(raw) + 8)
        with me.write(word, value):
            place = me.bytes(section, start, len(raw) + 8)
            place[:8] = len(raw).to_bytes(8, "little")
            place[8:] = raw

    def _read(self, section: int, number: int, word: int, value: int) -> str | None:
        """Such a text from whoever has it."""
        for area in self.board.known:
            text = _read_from(area, section, number, word, value)
            if text is not None:
                return text
        return None


def _read_from(area: Area, section: int, number: int, word: int, value: int) -> str | None:
    if area.words[word] != value:
        return None
    place = area.bytes(section, number * w.TEXT_BYTES_MAX, w.TEXT_BYTES_MAX)
    length = int.from_bytes(place[:8], "little")
    raw = bytes(place[8 : 8 + length])
    return raw.decode() if area.words[word] == value else None
