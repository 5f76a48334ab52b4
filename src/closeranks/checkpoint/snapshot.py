"""Everything of one checkpoint, copied at one moment, so that it can be written while all changes.

Knows values; must not know files or what the values are for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from closeranks.checkpoint.format import encode, stride_of

Entry = tuple[str, str, str, list[int], list[int] | None]  # file, key, type, shape, strides
REST = "rest"  # the file of all tensors that have no other


@dataclass(frozen=True)
class Snapshot:
    """Copies. A checkpoint is told by its name, its facts, its text and its tensors' files."""

    name: str
    facts: dict[str, Any]  # plain JSON, to be read without anything else
    text: str  # the tree, whose tensors are numbers of entries
    entries: list[Entry]
    files: dict[str, dict[str, Tensor]]


def take(
    name: str, facts: dict[str, Any], tree: Any, files: Mapping[str, Mapping[str, Tensor]]
) -> Snapshot:
    """Copy a tree. Tensors of it that are in `files` go there by name, the others into REST."""
    text, tensors = encode(tree, "the state")
    places = {id(t): (file, key) for file, named in files.items() for key, t in named.items()}
    copies = _Copies()
    made = {
        file: {key: copies.of(tensor) for key, tensor in named.items()}
        for file, named in files.items()
        if named
    }
    entries = []
    for index, tensor in enumerate(tensors):
        file, key = places.get(id(tensor), (REST, str(index)))
        if file == REST:
            made.setdefault(REST, {})[key] = copies.of(tensor)
        kind = str(tensor.dtype).removeprefix("torch.")
        entries.append((file, key, kind, list(tensor.shape), stride_of(tensor)))
    return Snapshot(name, facts, text, entries, made)


class _Copies:
    """One copy for tensors that are the same memory."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Tensor] = {}

    def of(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.device.type != "cpu":
            return tensor.cpu()
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj())
        if not tensor.numel():
            return torch.empty_like(tensor)
        if key not in self._known:
            self._known[key] = tensor.clone()
        return self._known[key]
