"""A batch in a piece of memory without a name, handed from one process to its parent.

    bytes 0..16     how long the table and the pickled part are
    then            the table of pieces: start and length of each, as JSON
    then            what is not a tensor, pickled
    then            the pieces: the bytes of tensors and arrays

A tensor keeps its type, shape and strides, and its place relative to a cache line, because other
strides or alignments change the bits of some kernels. Every opening maps the memory anew and
privately: whatever is done to what it gives, the next opening gives the same.

What is unpickled here comes from a process that this one has forked, never from elsewhere.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGN = 64
_HEAD = 16


class Parcel:
    """Memory of `size` bytes behind a descriptor, which it owns."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self._size = size

    def open(self) -> Any:
        """What was packed, in memory of its own."""
        memory = memoryview(mmap.mmap(self._fd, self._size, access=mmap.ACCESS_COPY))
        table_bytes, pickled_bytes = (int.from_bytes(memory[k : k + 8], "little") for k in (0, 8))
        end = _HEAD + table_bytes
        table = json.loads(bytes(memory[_HEAD:end]))
        pieces = [memory[start : start + length] for start, length in table]
        return pickle.loads(memory[end : end + pickled_bytes], buffers=pieces)

    def close(self) -> None:
        """The descriptor is not needed any more; what was opened stays."""
        os.close(self._fd)


def pack(value: Any) -> tuple[int, int]:
    """The descriptor and size of memory that holds the value; the caller closes it."""
    text = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    pickler = _Pickler(text, buffers)
    pickler.dump(value)
    raws = [buffer.raw() for buffer in buffers]
    pickled = text.getbuffer()
    # The table's own length is not known before the pieces' places are: room for long numbers.
    at = _HEAD + len(raws) * 44 + 2 + len(pickled)
    table = []
    for raw, offset in zip(raws, pickler.offsets_of(buffers), strict=True):
        at = -(-at // _ALIGN) * _ALIGN + offset
        table.append((at, raw.nbytes))
        at += raw.nbytes
    size = max(at, 1)
    told = json.dumps(table).encode()
    is_done = False
    fd = os.memfd_create("closeranks-batch", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size)  # No memory is an error here, and no signal later.
        with mmap.mmap(fd, size) as memory:
            memory[0:_HEAD] = len(told).to_bytes(8, "little") + len(pickled).to_bytes(8, "little")
            start = _HEAD + len(told)
            memory[_HEAD:start] = told
            memory[start : start + len(pickled)] = pickled
            for (start, length), raw in zip(table, raws, strict=True):
                memory[start : start + length] = raw
        is_done = True
    finally:
        if not is_done:
            os.close(fd)
    return fd, size


class _Pickler(pickle.Pickler):
    """Pickles as usual, but the bytes of dense tensors become pieces of their own."""

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._offsets: dict[int, int] = {}
        self._kept: list[Tensor] = []  # so that no address is used twice

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or not _is_plain(value):
            return NotImplemented
        span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        flat = value.as_strided((span,), (1,), value.storage_offset())
        raw = flat.view(torch.uint8).numpy()  # Every type has bytes, also those unknown to numpy.
        self._offsets[raw.ctypes.data] = value.data_ptr() % _ALIGN
        self._kept.append(flat)
        name = str(value.dtype).removeprefix("torch.")
        facts = (name, tuple(value.shape), value.stride())
        return _tensor, (pickle.PickleBuffer(raw.data), *facts)

    def offsets_of(self, buffers: list[pickle.PickleBuffer]) -> list[int]:
        """Where each buffer begins in a cache line."""
        return [self._offsets.get(_address(buffer), 0) for buffer in buffers]


def _address(buffer: pickle.PickleBuffer) -> int:
    return int(np.frombuffer(buffer.raw(), np.uint8).ctypes.data)


def _is_plain(value: Tensor) -> bool:
    return (
        value.layout == torch.strided
        and value.device.type == "cpu"
        and value.numel() > 0
        and not value.requires_grad
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
        and not value.is_complex()
        and not vars(value)
    )


def _tensor(piece: Any, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    flat = torch.frombuffer(piece, dtype=getattr(torch, dtype))
    return flat.as_strided(shape, strides)
