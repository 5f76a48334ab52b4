"""The C kernels, loaded with ctypes: found beside this file if they were built, else not.

Knows addresses and sizes; what is computed is told in kernels.c.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from closeranks.segment.page import Page
from closeranks.segment.twin import TwinKernels, combine, share

if TYPE_CHECKING:
    from closeranks.segment.waiting import WaitPolicy

_VERSION = 1
_KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_X86 = ("x86_64", "AMD64")


class _Push(ctypes.Structure):
    _fields_ = (
        ("ranks", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p),
        ("start", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("kind", ctypes.c_int32),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they were not built."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_kernels{suffix}")
        if path.exists():
            return _load(path)
    return None


def _load(path: Path) -> ctypes.CDLL | None:
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError:  # Built for another machine.
        return None
    p, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    u32, real = ctypes.c_uint32, ctypes.c_double
    for name, result, arguments in (
        ("cr_version", i32, []),
        ("cr_publish", None, [p, i32, u32]),
        ("cr_await", i32, [p, i32, u32, i64]),
        ("cr_fold", None, [i32, p, i32, p, i32, i64, i64, real]),
        ("cr_push", i32, [p, u32, i32, i32, real, i64]),
        ("cr_handshakes", i64, [p, u32, i64, i64]),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded if loaded.cr_version() == _VERSION else None


def kinds_here() -> tuple[str, ...]:
    """Which kernels this process could use, best first."""
    compiled = ("c",) if library() is not None else ()
    return (*compiled, "python") if platform.machine() in _X86 else compiled


def make(kind: str, pages: Sequence[Page], rank: int, policy: WaitPolicy) -> TwinKernels:
    """The kernels of the chosen kind, for one rank of a team."""
    return CKernels(pages, rank, policy) if kind == "c" else TwinKernels(pages, rank, policy)


class CKernels(TwinKernels):
    """Words and sums in C; what C has no kernel for is done as the twin does it."""

    name = "C kernels"

    def __init__(self, pages: Sequence[Page], rank: int, policy: WaitPolicy) -> None:
        super().__init__(pages, rank, policy)
        loaded = library()
        assert loaded is not None, "C kernels are chosen where they can be loaded"
        self.library = loaded
        self.team = _team(pages, rank, policy)
        self.address = ctypes.addressof(self.team)

    def publish(self, which: int, word: int) -> None:
        self.library.cr_publish(self.address, which, word)

    def await_all(self, which: int, word: int, slice_us: int) -> int:
        late: int = self.library.cr_await(self.address, which, word, slice_us)
        return late

    def fold(self, sources: Sequence[Tensor], targets: Sequence[Tensor], scale: float) -> None:
        kind = _KINDS.get(targets[0].dtype)
        if kind is None:
            combine(sources, targets, scale)
            return
        self.library.cr_fold(
            kind,
            _addresses(sources),
            len(sources),
            _addresses(targets),
            len(targets),
            0,
            targets[0].numel(),
            scale,
        )

    def push(self, buffers: Sequence[Tensor]) -> Any:
        if buffers[0].dtype not in _KINDS:
            return super().push(buffers)
        return CPush(self, buffers)


class CPush:
    """An all-reduce over buffers at fixed addresses: one call, if nobody is late."""

    def __init__(self, kernels: CKernels, buffers: Sequence[Tensor]) -> None:
        self._buffers = _addresses(buffers)
        self._kernels = kernels
        start, end = share(buffers[0].numel(), len(buffers), kernels.rank)
        self._record = _Push(
            kernels.address,
            ctypes.addressof(self._buffers),
            start,
            end,
            _KINDS[buffers[0].dtype],
        )
        self._address = ctypes.addressof(self._record)
        self._range = start, end
        self._run = kernels.library.cr_push

    def advance(self, word: int, phase: int, until: int, scale: float, slice_us: int) -> int:
        reached: int = self._run(self._address, word, phase, until, scale, slice_us)
        return reached

    def share(self, scale: float) -> None:
        """This rank's share of the work."""
        record, count = self._record, len(self._buffers)
        self._kernels.library.cr_fold(
            record.kind, self._buffers, count, self._buffers, count, *self._range, scale
        )


def _team(pages: Sequence[Page], rank: int, policy: WaitPolicy) -> ctypes.Structure:
    class Team(ctypes.Structure):
        _fields_ = (
            ("n", ctypes.c_int32),
            ("self", ctypes.c_int32),
            ("polls", ctypes.c_int32),
            ("yield_us", ctypes.c_int32),
            ("pages", ctypes.c_void_p * len(pages)),
        )

    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(page.memory)) for page in pages]
    return Team(
        len(pages), rank, policy.polls, policy.yield_us, (ctypes.c_void_p * len(pages))(*addresses)
    )


def _addresses(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])
