"""A tree of values as JSON and a list of tensors, and back: types survive, and nothing is executed.

JSON has no tuples, no keys but strings and no tensors. Whatever it lacks becomes an object with the
key "!" that names the type; tensors become their place in a list. A type that is not in the table
below is refused with its path, because what cannot be read back must not be written.

    plain      None, bool, int, str, float, list, dict with string keys
    tagged     tuple, set, bytes, complex, other dicts, Counter, OrderedDict, defaultdict,
               numpy scalars and arrays, torch.Size, torch.dtype, torch.device, tensors

Knows values and text; must not know files or what the values are for.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TAG = "!"
# Number types of which torch itself cannot copy a tensor.
_PARTS_OF_BYTES = {f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
_PARTS_OF_BYTES.add("torch.bit")
_FACTORIES: dict[str, Callable[[], Any]] = {"int": int, "float": float, "list": list, "dict": dict}
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", torch.Size: "Size"}


def encode(tree: Any, where: str = "", is_sorted: bool = False) -> tuple[str, list[Tensor]]:
    """The tree as text and tensors, which are not copied; `where` names the tree in errors.

    is_sorted: dicts in the order of their keys, so that equal trees give equal texts.
    """
    encoder = _Encoder(is_sorted)
    plain = encoder.value(tree, where or "state")
    return json.dumps(plain, separators=(",", ":")), encoder.tensors


def decode(text: str, tensors: Sequence[Tensor]) -> Any:
    """The tree that was encoded."""
    return _value(json.loads(text), tensors)


def digest(tree: Any) -> str:
    """sha256 over everything in a tree, in the order of its keys."""
    text, tensors = encode(tree, is_sorted=True)
    sha = hashlib.sha256(text.encode())
    for tensor in tensors:
        sha.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        sha.update(as_bytes(tensor).numpy().data)
    return sha.hexdigest()


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements of a tensor in order, as bytes in the memory of the CPU; copied if needed."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def stride_of(tensor: Tensor) -> list[int] | None:
    """The order of a tensor's elements in its memory; None for the usual one.

    Some functions add up in the order of memory, so it decides about the last bits.
    """
    if tensor.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return None
    return list(tensor.stride())


def laid_out(
    flat: Tensor, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int] | None
) -> Tensor:
    """A tensor of its own from the bytes that as_bytes() gave."""
    if stride is None:
        made = torch.empty(list(shape), dtype=dtype)
    else:
        made = torch.empty_strided(list(shape), list(stride), dtype=dtype)
    if made.numel():
        elements = torch.empty(list(shape), dtype=dtype) if stride is not None else made
        elements.view(-1).view(torch.uint8).copy_(flat)
        if stride is not None:
            made.copy_(elements)
    return made


class _Encoder:
    def __init__(self, is_sorted: bool) -> None:
        self.is_sorted = is_sorted
        self.tensors: list[Tensor] = []

    def value(self, value: Any, where: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str, float):
            return value
        if kind is list:
            return [self.value(v, f"{where}[{i}]") for i, v in enumerate(value)]
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if kind in _DICTS or kind is defaultdict:
            return self._dict(value, where)
        if kind in _SEQUENCES:
            ordered = sorted(value, key=repr) if kind is set else value
            return _tagged(_SEQUENCES[kind], [self.value(v, f"{where}[...]") for v in ordered])
        return self._scalar(value, where)

    def _tensor(self, tensor: Tensor, where: str) -> Any:
        is_small = str(tensor.dtype) in _PARTS_OF_BYTES
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or is_small:
            raise TypeError(
                f"{where} is a tensor of {tensor.dtype} and layout {tensor.layout} on "
                f"{tensor.device}, which cannot be kept: wanted a dense one of whole bytes. "
                "Nothing was prepared; leave it out, or keep its values as such a tensor."
            )
        self.tensors.append(tensor)
        return _tagged("tensor", len(self.tensors) - 1)

    def _dict(self, value: Any, where: str) -> Any:
        items = list(value.items())
        if self.is_sorted:
            items.sort(key=lambda item: (type(item[0]).__name__, repr(item[0])))
        kind = type(value)
        if kind is dict and all(type(k) is str and not k.startswith(_TAG) for k, _ in items):
            return {k: self.value(v, f"{where}.{k}") for k, v in items}
        pairs = [[self.value(k, where), self.value(v, f"{where}[{k!r}]")] for k, v in items]
        if kind is not defaultdict:
            return _tagged(_DICTS[kind], pairs)
        factory = getattr(value.default_factory, "__name__", None)
        if factory is not None and factory not in _FACTORIES:
            raise _unknown(value, where)
        return _tagged("defaultdict", [factory, pairs])

    def _scalar(self, value: Any, where: str) -> Any:
        if type(value) is bytes:
            return _tagged("bytes", base64.b64encode(value).decode())
        if type(value) is complex:
            return _tagged("complex", [value.real, value.imag])
        if isinstance(value, torch.dtype):
            return _tagged("dtype", str(value).removeprefix("torch."))
        if isinstance(value, torch.device):
            return _tagged("device", str(value))
        if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufcSU":
            array = np.ascontiguousarray(value)
            raw = base64.b64encode(array.tobytes()).decode()
            kind = "array" if isinstance(value, np.ndarray) else "scalar"
            return _tagged(kind, [value.dtype.str, list(value.shape), raw])
        raise _unknown(value, where)


def _tagged(name: str, value: Any) -> dict[str, Any]:
    return {_TAG: name, "v": value}


def _unknown(value: Any, where: str) -> TypeError:
    kind = type(value)
    return TypeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be kept: wanted "
        "numbers, strings, tensors, numpy values, and lists, tuples, sets and dicts of them. "
        "Nothing was prepared; leave the object out, or give it a state_dict() of such values."
    )


def _value(plain: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(plain, list):
        return [_value(v, tensors) for v in plain]
    if not isinstance(plain, dict):
        return plain
    if _TAG not in plain:
        return {k: _value(v, tensors) for k, v in plain.items()}
    name, value = plain[_TAG], plain["v"]
    if name == "tensor":
        return tensors[value]
    if name in ("dict", "OrderedDict", "Counter"):
        kind: Any = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}[name]
        return kind({_value(k, tensors): _value(v, tensors) for k, v in value})
    if name in ("tuple", "set", "Size"):
        sequence: Any = {"tuple": tuple, "set": set, "Size": torch.Size}[name]
        return sequence(_value(v, tensors) for v in value)
    if name == "defaultdict":
        factory = None if value[0] is None else _FACTORIES[value[0]]
        return defaultdict(factory, {_value(k, tensors): _value(v, tensors) for k, v in value[1]})
    return _scalar(name, value)


def _scalar(name: str, value: Any) -> Any:
    if name == "bytes":
        return base64.b64decode(value)
    if name == "complex":
        return complex(value[0], value[1])
    if name == "dtype":
        return getattr(torch, value)
    if name == "device":
        return torch.device(value)
    if name in ("array", "scalar"):
        raw = np.frombuffer(base64.b64decode(value[2]), np.dtype(value[0])).reshape(value[1])
        return raw.copy() if name == "array" else raw.reshape(1)[0]
    raise ValueError(
        f"a value of the unknown type {name!r}: the file was written by a newer version, or altered"
    )
