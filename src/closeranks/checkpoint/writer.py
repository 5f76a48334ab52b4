"""A snapshot becomes a checkpoint: whole and durable under its name, or not there at all.

    Phase 1  build    all files in a folder with a temporary name, each made durable
    Phase 2  name     the folder gets its name, which the kernel does at once or not at all
    Phase 3  prune    older ones than the newest few are removed

Whoever dies on the way leaves a temporary folder, which the next writer removes, and the
checkpoints as they were.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from closeranks.checkpoint.folder import Folder, key_of, sync_folder
from closeranks.checkpoint.reader import FORMAT, MANIFEST, STATE, file_of, verify
from closeranks.checkpoint.snapshot import Snapshot
from closeranks.checkpoint.tensors import write_bytes, write_tensors
from closeranks.errors import CheckpointDamaged
from closeranks.observe import points


def write(folder: Folder, snapshot: Snapshot, owner: str, keep: int) -> Path:
    """Write a checkpoint, and remove all but the newest `keep`. OSError: nothing has changed."""
    # Phase 1
    final = folder.path / snapshot.name
    temporary = folder.temporary(snapshot.name, owner)
    points.reach("checkpoint begun", checkpoint=snapshot.name)
    try:
        temporary.mkdir(parents=True)
        _build(temporary, snapshot)
        points.reach("checkpoint not named", checkpoint=snapshot.name)
        # Phase 2
        _name(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    points.reach("checkpoint named", checkpoint=snapshot.name)
    # Phase 3
    _prune(folder, snapshot.name, owner, keep)
    return final


def _build(temporary: Path, snapshot: Snapshot) -> None:
    files: dict[str, tuple[str, int]] = {}
    for name, tensors in snapshot.files.items():
        files[file_of(name)] = write_tensors(temporary / file_of(name), tensors)
    state = _dumped({"tree": snapshot.text, "tensors": snapshot.entries})
    files[STATE] = write_bytes(temporary / STATE, iter([state]), len(state))
    manifest: dict[str, Any] = {"format": FORMAT, "facts": snapshot.facts}
    manifest["files"] = {
        name: {"sha256": sha, "bytes": size} for name, (sha, size) in sorted(files.items())
    }
    text = _dumped(manifest)
    signed = _dumped({"manifest": manifest, "sha256": hashlib.sha256(text).hexdigest()})
    write_bytes(temporary / MANIFEST, iter([signed]), len(signed))
    sync_folder(temporary)


def _name(temporary: Path, final: Path) -> None:
    if final.exists():
        try:
            verify(final)
            return  # Somebody else has written the same, and whoever writes it writes the same.
        except CheckpointDamaged:
            final.rename(temporary.with_name(temporary.name + "-damaged"))
    os.rename(temporary, final)
    sync_folder(final.parent)
    shutil.rmtree(temporary.with_name(temporary.name + "-damaged"), ignore_errors=True)


def _prune(folder: Folder, name: str, owner: str, keep: int) -> None:
    """Of each number of steps the newest is kept, and of those the newest few.

    What is newer than the one just written was damaged, or this job would have gone on from it; it
    does not count.
    """
    mine = key_of(name)
    assert mine is not None, "checkpoints have a name"
    steps: list[int] = []
    for path in folder.checkpoints():
        key = key_of(path.name)
        if key is None or key > mine:
            continue
        if key[0] not in steps:
            steps.append(key[0])
            if len(steps) <= keep:
                continue
        # Under a temporary name first: half of it must not look like a checkpoint.
        old = folder.temporary(path.name, owner)
        try:
            path.rename(old)
        except FileNotFoundError:
            continue
        shutil.rmtree(old, ignore_errors=True)


def _dumped(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
