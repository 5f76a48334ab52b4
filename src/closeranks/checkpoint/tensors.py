"""Tensors in a file, in the format of safetensors, hashed on the way.

Written piece by piece with calls that let other threads run, because training goes on meanwhile.
A number type that the format lacks is written as one that it has, with one more dimension; the
reader is told the true type from elsewhere.

Knows files and tensors; must not know what they are for.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from closeranks.checkpoint.format import as_bytes, laid_out
from closeranks.observe import points

_PIECE_BYTES = 1 << 22
_HEADER_ALIGN = 64
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
_PAIRS = {torch.complex128: torch.float64, torch.complex32: torch.float16}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[str, int]:
    """Write a durable file; returns its sha256 and its size in bytes."""
    # Large elements first, so that each begins at a multiple of its size.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, object] = {}
    at = 0
    for name in names:
        stored, shape = _stored(tensors[name])
        end = at + tensors[name].numel() * tensors[name].element_size()
        header[name] = {"dtype": _NAMES[stored], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _HEADER_ALIGN)

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for name in names:
            yield from _pieces(tensors[name])

    return write_bytes(path, pieces(), 8 + len(text) + at)


def read_tensors(path: Path, wanted: Mapping[str, Shape]) -> dict[str, Tensor]:
    """The tensors with these names, each in memory of its own."""
    stored = load_file(path)
    return {name: shape.of(stored[name]) for name, shape in wanted.items()}


class Shape:
    """What a tensor is beside its elements."""

    def __init__(self, dtype: str, size: list[int], stride: list[int] | None) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.size = size
        self.stride = stride

    def of(self, stored: Tensor) -> Tensor:
        """The tensor that was stored, in memory that begins where torch likes it."""
        flat = stored.reshape(-1).view(torch.uint8) if stored.numel() else stored.new_empty(0)
        return laid_out(flat.to(torch.uint8), self.dtype, self.size, self.stride)


def write_bytes(
    path: Path, pieces: Iterator[bytes | memoryview], size_bytes: int
) -> tuple[str, int]:
    """Write a durable file; returns its sha256 and its size."""
    sha, written = hashlib.sha256(), 0
    is_half_told = False
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for piece in pieces:
            sha.update(piece)
            rest = memoryview(piece)
            while rest:
                done = os.write(fd, rest)
                written, rest = written + done, rest[done:]
                if 2 * written >= size_bytes and not is_half_told:
                    is_half_told = True
                    points.reach("checkpoint file half written", file=path.name)
        os.fsync(fd)
    finally:
        os.close(fd)
    return sha.hexdigest(), written


def hash_of(path: Path) -> tuple[str, int]:
    """sha256 and size of a file."""
    sha, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            sha.update(piece)
            size += len(piece)
    return sha.hexdigest(), size


def _stored(tensor: Tensor) -> tuple[torch.dtype, list[int]]:
    """As what a tensor is written."""
    shape = list(tensor.shape)
    if tensor.dtype in _NAMES:
        return tensor.dtype, shape
    if tensor.dtype in _PAIRS:
        return _PAIRS[tensor.dtype], [*shape, 2]
    return torch.uint8, [*shape, tensor.element_size()]


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    raw: memoryview = as_bytes(tensor).numpy().data
    for at in range(0, len(raw), _PIECE_BYTES):
        yield raw[at : at + _PIECE_BYTES]
