"""Where a measurement was taken: processor, versions, load, and the commit. Knows no results."""

from __future__ import annotations

import subprocess
from pathlib import Path

from closeranks.bench import where
from closeranks.bench.where import cores, load

__all__ = ["ROOT", "commit", "cores", "describe", "load"]

ROOT = Path(__file__).resolve().parents[1]


def describe() -> dict[str, str]:
    return where.describe() | {"commit": commit()}


def commit() -> str:
    """What was measured; names it changed if src/ or bench/ differ from it."""
    found = _git("rev-parse", "HEAD")
    if found is None:
        return "not a git checkout"
    changed = _git("status", "--porcelain", "--", "src", "bench/*.py")
    return f"{found}, with changes" if changed else found


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
