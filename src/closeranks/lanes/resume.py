"""From which checkpoint a job goes on, and whether it may.

Must be the same: lanes, seed, and what is prepared; otherwise the training would be another one.
Should be the same, because the bits depend on it: the build of torch, the kind of CPU, the threads
of a worker. Knows checkpoints and facts; must not know workers.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from closeranks.checkpoint.folder import Folder
from closeranks.checkpoint.reader import Checkpoint, read, read_facts
from closeranks.errors import CheckpointDamaged, CheckpointMismatch

Note = Callable[[str], None]

_SHOULD_BE = {"torch": "the build of torch", "cpu": "the CPU", "threads": "threads of a worker"}


def made_by() -> dict[str, Any]:
    """What the bits of a training depend on, beside the training."""
    return {"torch": torch.__version__, "cpu": _cpu(), "threads": torch.get_num_threads()}


def newest(folder: Folder, note: Note) -> Checkpoint | None:
    """The newest whole checkpoint; damaged ones are passed over with a note."""
    skipped: list[Path] = []
    for path in folder.checkpoints():
        try:
            found = read(path)
        except CheckpointDamaged as error:
            if path.exists():  # Otherwise a worker that is further on has removed it as too old.
                skipped.append(path)
                note(f"warning: {error}")
            continue
        if skipped:
            note(f"warning: going on from {found.path.name}, the newest whole checkpoint")
        return found
    if skipped:
        note(f"warning: {folder.path} has no whole checkpoint: training begins at step 0")
    return None


def newest_facts(folder: Folder) -> dict[str, Any]:
    """What the newest checkpoint says of itself, before anything is loaded."""
    for path in folder.checkpoints():
        try:
            return read_facts(path)
        except CheckpointDamaged:
            continue
    return {}


def check(folder: Folder, facts: dict[str, Any], wanted: dict[str, Any], note: Note) -> None:
    """CheckpointMismatch if a job with these arguments may not go on from here."""
    for name in ("lanes", "seed"):
        if facts[name] != wanted[name]:
            raise CheckpointMismatch(
                f"{folder.path} is of a training with {name}={facts[name]}, and this one has "
                f"{name}={wanted[name]}: its result would be that of neither. Nothing was "
                f"trained; take {name}={facts[name]}, or another folder as checkpoint=."
            )
    was, now = facts["made_by"], made_by()
    differing = [name for name in _SHOULD_BE if was.get(name) != now[name]]
    if differing:
        told = "; ".join(f"{_SHOULD_BE[n]}: {was.get(n)}, now {now[n]}" for n in differing)
        note(
            f"warning: {folder.path} was written under other conditions ({told}). Training goes "
            "on, but its last bits may differ from those of an undisturbed run"
        )


def find(path: Path) -> Checkpoint:
    """A checkpoint that somebody names, or the newest whole one of a folder that is named."""
    if (path / "manifest.json").exists():
        return read(path)
    found = newest(Folder(path), _ignore)
    if found is None:
        raise CheckpointDamaged(
            f"{path} is no checkpoint and holds no whole one. Nothing was loaded; name a folder "
            "that was given to Ranks as checkpoint=, or one of the step-... folders in it."
        )
    return found


def _ignore(text: str) -> None:
    """An older one was asked for as well as a newer one."""


def _cpu() -> str:
    """The kind of CPU, and which of its instructions torch uses."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            model = value.strip()
            break
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}"
