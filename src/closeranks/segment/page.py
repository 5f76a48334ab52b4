"""The page of one rank: the words by which it tells the others where it is, and nothing else.

Every word is written by the page's owner only. Words that others wait for stand in cache lines of
their own. The layout is repeated in kernels.c; tests compare the two.

    0     arrived   the last tick for which this rank's data is ready
    64    done      the last tick in which this rank has done its share
    128   asleep    not 0 while this rank sleeps in the kernel and wants to be woken (C only)
    192   closed    not 0 once this rank will come to no further tick
    256   nonce     16 bytes that prove that it is this page
    320   landed    the last crossing whose result this rank has given to its host
    384   note      why this rank left before its time: length and text
    4096  regions   a ring of entries (number, size, descriptor): memory that this rank has made
    then  slots     data on its way to others

Knows bytes. Must not know tensors or what a tick stands for.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmap import mmap

    from closeranks.segment.memory import Bytes

    Buffer = Bytes | mmap

ARRIVED, DONE, ASLEEP, CLOSED = 0, 64, 128, 192
NONCE, NONCE_BYTES = 256, 16
LANDED = 320
NOTE, NOTE_BYTES_MAX = 384, 3000
REGIONS = 4096
REGION_COUNT = 4096
_ENTRY_WORDS = 3
_SLOTS = REGIONS + REGION_COUNT * _ENTRY_WORDS * 8
SLOT_BYTES, SLOT_COUNT = 1 << 20, 2
PAGE_SIZE_BYTES = _SLOTS + SLOT_COUNT * SLOT_BYTES
UNUSABLE = -1  # the size of a region that its owner could not make, or whose twins it cannot map

_WORD_MASK = 0xFFFFFFFF


class Page:
    """Words in shared memory; `memory` is a mapping of PAGE_SIZE_BYTES."""

    def __init__(self, memory: Buffer) -> None:
        self.memory = memory
        self._bytes = memoryview(memory).cast("B")
        self.words = self._bytes.cast("I")
        self._entries = self._bytes[REGIONS:_SLOTS].cast("q")

    @property
    def nonce(self) -> bytes:
        return bytes(self._bytes[NONCE : NONCE + NONCE_BYTES])

    def sign(self) -> str:
        """Write a nonce, and return it for others to look for."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._bytes[NONCE : NONCE + NONCE_BYTES] = nonce
        return nonce.hex()

    def leave_note(self, text: str) -> None:
        """Say why this rank will come to no further tick, before it is told that it will not."""
        told = text.encode()[:NOTE_BYTES_MAX]
        self._bytes[NOTE + 4 : NOTE + 4 + len(told)] = told
        self.words[NOTE // 4] = len(told)

    @property
    def note(self) -> str:
        length = self.words[NOTE // 4]
        return bytes(self._bytes[NOTE + 4 : NOTE + 4 + length]).decode(errors="ignore")

    def announce_region(self, number: int, size_bytes: int, fd: int) -> None:
        """Tell where the number-th region of this rank is, before any tick that needs it."""
        at = number % REGION_COUNT * _ENTRY_WORDS
        self._entries[at + 1] = size_bytes
        self._entries[at + 2] = fd
        self._entries[at] = number + 1

    def region(self, number: int) -> tuple[int, int]:
        """Size and descriptor of the number-th region."""
        at = number % REGION_COUNT * _ENTRY_WORDS
        assert self._entries[at] == number + 1, f"region {number} is announced before it is used"
        return self._entries[at + 1], self._entries[at + 2]

    def slot(self, number: int) -> memoryview:
        """Place for data of SLOT_BYTES."""
        start = _SLOTS + number * SLOT_BYTES
        return self._bytes[start : start + SLOT_BYTES]


def has_reached(word: int, tick: int) -> bool:
    """Whether a word that only grows, and wraps around, is at a tick or beyond."""
    return (word - tick) & _WORD_MASK < 1 << 31


def wrapped(tick: int) -> int:
    """The word of a tick."""
    return tick & _WORD_MASK
