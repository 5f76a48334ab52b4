"""Where a measurement was taken: processor, versions, commit, load. Knows nothing of results."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

from ranks import usable_cores

ROOT = Path(__file__).resolve().parents[1]


def describe() -> dict[str, str]:
    return {
        "processor": _processor(),
        "cores": f"{cores()} usable of {os.cpu_count()}",
        "memory": f"{_memory_gib():.0f} GiB",
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load average": ", ".join(f"{load:.2f}" for load in os.getloadavg()),
        "commit": commit(),
    }


def cores() -> int:
    return len(usable_cores()) or os.cpu_count() or 1


def load() -> float:
    """The load average of the last minute."""
    return os.getloadavg()[0]


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


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
