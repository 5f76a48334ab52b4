"""The area of one incarnation of a worker: words that tell what is done, and the data they tell of.

An area has a head of 64-bit words and a few sections of data. Only its owner writes. The rule for
every piece of data that others read (here `write` and `is_still`):

    the owner    clears the word, changes the bytes, sets the word
    a reader     reads the word, uses the bytes, reads the word again, and forgets what it made of
                 them if the word has changed

Memory is taken piece by piece before it is first written, so that a host without memory is an
OSError there and not a SIGBUS later. Every piece begins at a multiple of 64 bytes, because other
alignments change the bits of some kernels.

Knows bytes, words and flat tensors; must not know what they mean.
"""

from __future__ import annotations

import mmap
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from closeranks.segment.roster import AREA_BYTES, HEAD_BYTES, area_start, clear

ALIGN_BYTES = 64
_SECTION_BYTES = 1 << 40
_SECTIONS = AREA_BYTES // _SECTION_BYTES

_barrier = threading.Lock()


def order_writes() -> None:
    """Nothing written after this is seen by another process before what was written before it.

    Taking a lock is a locked instruction, which on x86 also drains streaming stores. Ordinary
    stores are never reordered there.
    """
    with _barrier:
        pass


def is_possible() -> str:
    """Why areas cannot be shared between processes of this machine, or nothing if they can."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"{platform.machine()} does not keep the order of ordinary stores"
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create"
    return ""


class Area:
    """The area of incarnation `number` in the file `fd`."""

    def __init__(self, fd: int, number: int) -> None:
        self.fd = fd
        self.number = number
        self._start = area_start(number)
        self._head = mmap.mmap(fd, HEAD_BYTES, offset=self._start)
        self.words = memoryview(self._head).cast("q")
        self._maps: dict[int, tuple[mmap.mmap, int]] = {}
        self._taken: dict[tuple[int, int], int] = {}

    def take_head(self) -> None:
        """For the owner: take memory for the words."""
        os.posix_fallocate(self.fd, self._start, HEAD_BYTES)

    def take(self, section: int, start: int, length: int) -> None:
        """For the owner: take memory for a piece of a section, if that was not done before."""
        if self._taken.get((section, start), 0) < length:
            at = self._start + section * _SECTION_BYTES + start
            os.posix_fallocate(self.fd, at, length)
            self._taken[section, start] = length

    def release(self, section: int, start: int, length: int) -> None:
        """For the owner: a piece is not needed any more; its words no longer tell of it."""
        page = mmap.PAGESIZE
        first, end = -(-start // page) * page, (start + length) // page * page
        if end > first:
            clear(self.fd, self._start + section * _SECTION_BYTES + first, end - first)
        self._taken.pop((section, start), None)

    def give_back(self, section: int) -> None:
        """For the owner: the memory of a whole section is not needed any more."""
        clear(self.fd, self._start + section * _SECTION_BYTES, _SECTION_BYTES)
        self._taken = {k: v for k, v in self._taken.items() if k[0] != section}

    def bytes(self, section: int, start: int, length: int) -> memoryview:
        """A piece of a section."""
        return memoryview(self._map(section, start + length))[start : start + length]

    def tensor(self, section: int, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A piece of a section as a flat tensor."""
        assert start % ALIGN_BYTES == 0, "pieces are aligned"
        mapped = self._map(section, start + numel * dtype.itemsize)
        return torch.frombuffer(mapped, dtype=dtype, count=numel, offset=start)

    def head_text(self, start: int, length: int) -> str:
        """Text in the head, up to the first zero byte."""
        raw = bytes(self._head[start : start + length])
        return raw.split(b"\0", 1)[0].decode("utf-8", "replace")

    def set_head_text(self, start: int, length: int, text: str) -> None:
        raw = text.encode()[: length - 1]
        self._head[start : start + length] = raw + bytes(length - len(raw))

    @contextmanager
    def write(self, word: int, value: int) -> Iterator[None]:
        """For the owner: the data that `word` tells of changes inside; then it says `value`."""
        self.words[word] = 0
        order_writes()
        yield
        order_writes()
        self.words[word] = value

    def forget(self) -> None:
        """Let go of all memory that is mapped here; the tensors made of it stay valid."""
        self._maps.clear()

    def _map(self, section: int, end: int) -> mmap.mmap:
        assert section < _SECTIONS and end <= _SECTION_BYTES, "an area has room for everything"
        known = self._maps.get(section)
        if known is None or known[1] < end:
            size = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
            if known is not None:
                size = max(size, 2 * known[1])
            at = self._start + section * _SECTION_BYTES
            known = self._maps[section] = (mmap.mmap(self.fd, size, offset=at), size)
        return known[0]
