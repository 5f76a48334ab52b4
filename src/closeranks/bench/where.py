"""Where a measurement is taken: processor, cores, memory, versions and load. Knows no results."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from closeranks.launch import machine


def describe() -> dict[str, str]:
    return {
        "processor": _processor(),
        "cores": f"{cores()} usable of {os.cpu_count()}",
        "memory": f"{machine.memory().total / 2**30:.0f} GiB",
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "load average": ", ".join(f"{load:.2f}" for load in os.getloadavg()),
    }


def cores() -> int:
    return machine.cores().count


def load() -> float:
    """The load average of the last minute."""
    return os.getloadavg()[0]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
