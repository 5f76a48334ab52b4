"""A checkpoint becomes a tree again. Every byte is compared with the hash it was written with.

    manifest.json    facts about the training, and size and sha256 of all other files; signed with
                     a sha256 of its own
    state.json       the tree as typed JSON, and where its tensors are
    *.safetensors    tensors: one file for each module, and the rest

Runs no code from a checkpoint. Knows files; must not know what the tree is for.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from closeranks.checkpoint.format import decode
from closeranks.checkpoint.tensors import Shape, hash_of, read_tensors
from closeranks.errors import CheckpointDamaged, CheckpointMismatch

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"
_UNREADABLE = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError),
    SafetensorError,
)


@dataclass(frozen=True)
class Checkpoint:
    """What was written: facts about the training, and its state."""

    path: Path
    facts: dict[str, Any]
    tree: Any


def file_of(name: str) -> str:
    return f"{name}.safetensors"


def read(path: Path) -> Checkpoint:
    """Everything; CheckpointDamaged if it is not what was written."""
    manifest = verify(path)
    try:
        state = json.loads((path / STATE).read_bytes())
        wanted: dict[str, dict[str, Shape]] = {}
        for file, key, dtype, size, stride in state["tensors"]:
            wanted.setdefault(file, {})[key] = Shape(dtype, size, stride)
        found = {file: read_tensors(path / file_of(file), keys) for file, keys in wanted.items()}
        tensors: list[Tensor] = [found[file][key] for file, key, *_ in state["tensors"]]
        tree = decode(state["tree"], tensors)
    except _UNREADABLE as error:
        why = f"{type(error).__name__}: {error}"
        raise _damaged(path, f"its files do not belong together ({why})") from error
    return Checkpoint(path, manifest["facts"], tree)


def read_facts(path: Path) -> dict[str, Any]:
    """What the manifest says; the other files are not looked at."""
    facts: dict[str, Any] = _manifest(path)["facts"]
    return facts


def verify(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files all have their hashes."""
    manifest = _manifest(path)
    for name, told in manifest["files"].items():
        try:
            sha, size = hash_of(path / name)
        except OSError as error:
            raise _damaged(path, f"{name} cannot be read: {error.strerror}") from error
        if size != told["bytes"]:
            raise _damaged(path, f"{name} has {size} bytes instead of {told['bytes']}")
        if sha != told["sha256"]:
            raise _damaged(path, f"{name} was altered: its sha256 is another")
    return manifest


def _manifest(path: Path) -> dict[str, Any]:
    try:
        signed = json.loads((path / MANIFEST).read_bytes())
        manifest: dict[str, Any] = signed["manifest"]
        text = json.dumps(manifest, separators=(",", ":"), sort_keys=True).encode()
        if hashlib.sha256(text).hexdigest() != signed["sha256"]:
            raise _damaged(path, f"{MANIFEST} was altered: its sha256 is another")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, f"{MANIFEST} cannot be read: {error}") from error
    if manifest["format"] != FORMAT:
        raise CheckpointMismatch(
            f"{path} has format {manifest['format']}, and this version of closeranks reads "
            f"{FORMAT}. Nothing was loaded; use the version that wrote it, or another folder."
        )
    return manifest


def _damaged(path: Path, why: str) -> CheckpointDamaged:
    return CheckpointDamaged(
        f"{path} is not a whole checkpoint: {why}. Nothing of it was loaded; take an older one."
    )
