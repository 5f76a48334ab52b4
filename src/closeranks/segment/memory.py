"""A piece of memory that other processes of this host can map: anonymous, so never left behind.

The piece is a memfd. It has no name in any file system: other processes open it through the /proc
entry of the process that made it, which the kernel allows to the same user only, and when the last
process that maps it is gone, however it went, the memory is free. All of it is allocated when it is
made, so that a host without memory is an error there and not a SIGBUS later.

Knows bytes and descriptors; must not know what they mean.
"""

from __future__ import annotations

import mmap
import os
import sys

PAGE_BYTES = mmap.PAGESIZE


def is_possible() -> str:
    """Why memory cannot be shared on this system, or nothing if it can."""
    if not hasattr(os, "memfd_create"):
        return f"{sys.platform} has no memfd_create"
    if not hasattr(os, "pidfd_open"):
        return f"{sys.platform} has no pidfd_open"
    return ""


class Memory:
    """Bytes that this process has made, open for others until close_door()."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = max(PAGE_BYTES, -(-size_bytes // PAGE_BYTES) * PAGE_BYTES)
        self.fd = os.memfd_create("closeranks", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.fd, 0, self.size_bytes)
            self.map = mmap.mmap(self.fd, self.size_bytes)
        except OSError:
            self.close_door()
            raise

    def close_door(self) -> None:
        """Nobody else can find the memory from now on; who has mapped it keeps it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close_door()


def attach(pid: int, fd: int, size_bytes: int) -> mmap.mmap:
    """Map the memory that process `pid` has made; OSError if there is none or it is not ours."""
    found = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(found).st_size < size_bytes:
            raise OSError(f"descriptor {fd} of process {pid} is not the memory that was announced")
        return mmap.mmap(found, size_bytes)
    finally:
        os.close(found)
