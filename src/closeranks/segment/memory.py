"""A piece of memory that other processes of this host can map: anonymous, so never left behind.

The piece is a memfd. It has no name in any file system: other processes open it through the /proc
entry of the process that made it, which the kernel allows to the same user only, and when the last
process that maps it is gone, however it went, the memory is free. All of it is allocated when it is
made, so that a host without memory is an error there and not a SIGBUS later.

A mapping keeps no descriptor open, as mmap.mmap would: there are as many mappings as ranks times
buckets, and a process may have a thousand descriptors. It ends with the last view of it.

Knows bytes and descriptors; must not know what they mean.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import weakref

PAGE_BYTES = mmap.PAGESIZE
Bytes = ctypes.Array[ctypes.c_ubyte]  # a mapping: writable, a buffer, and at a fixed address

_FAILED = ctypes.c_void_p(-1).value


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
            self.map = _map(self.fd, self.size_bytes)
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


def attach(pid: int, fd: int, size_bytes: int) -> Bytes:
    """Map the memory that process `pid` has made; OSError if there is none or it is not ours."""
    found = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(found).st_size < size_bytes:
            raise OSError(f"descriptor {fd} of process {pid} is not the memory that was announced")
        return _map(found, size_bytes)
    finally:
        os.close(found)


@functools.cache
def _system() -> ctypes.CDLL:
    """The C library's own mmap and munmap."""
    system = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    system.mmap.restype = pointer
    system.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
    system.munmap.argtypes = [pointer, size]
    return system


def _map(fd: int, size_bytes: int) -> Bytes:
    system = _system()
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    address = system.mmap(None, size_bytes, rights, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    mapping = (ctypes.c_ubyte * size_bytes).from_address(address)
    weakref.finalize(mapping, system.munmap, address, size_bytes).atexit = False
    return mapping
