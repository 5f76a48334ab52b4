"""The C kernels, loaded with ctypes: found beside this file if they were built, else not.

CLOSERANKS_KERNELS=python leaves them alone. Knows addresses and sizes; what is computed is told in
int8.py and powersgd.py.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

_VERSION = 1


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they were not built."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_kernels{suffix}")
        if path.exists():
            return _load(path)
    return None


def wanted() -> ctypes.CDLL | None:
    """The compiled kernels, unless the user wants those in Python."""
    return None if os.environ.get("CLOSERANKS_KERNELS") == "python" else library()


def _load(path: Path) -> ctypes.CDLL | None:
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError:  # Built for another machine.
        return None
    p, i32, i64, real = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
    for name, result, arguments in (
        ("cw_version", i32, []),
        ("cw_int8_encode", None, [p, p, p, p, i64]),
        ("cw_int8_sum", None, [p, p, i32, real, p, i64]),
        ("cw_product", None, [p, p, i64, i64, i32, p]),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded if loaded.cw_version() == _VERSION else None


def addresses(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])
