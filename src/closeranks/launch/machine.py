"""What this machine has for workers: cores, memory and GPUs, as the kernel tells it.

The parsers are pure; `cores`, `memory_bytes` and `gpus` read /proc, /sys and the environment.
Respects what limits this process: affinity, and the quota of its control group.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Cores:
    """The cores this process may use."""

    cpus: tuple[int, ...]  # its affinity
    quota: float | None  # of processor time, in cores, if its control group has one

    @property
    def count(self) -> int:
        """How many workers may run at full speed."""
        limit = len(self.cpus) if self.quota is None else int(self.quota)
        return max(1, min(len(self.cpus), limit))


@dataclass(frozen=True)
class Memory:
    """Bytes in use and in all, of the machine or of the control group where that is smaller."""

    used: int
    total: int

    def shown(self) -> str:
        return f"{self.used / 1e9:.1f} of {self.total / 1e9:.1f} GB were in use"


def cores() -> Cores:
    return Cores(tuple(sorted(os.sched_getaffinity(0))), _quota())


def memory() -> Memory:
    machine = parse_meminfo(_read(Path("/proc/meminfo")))
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = _read(_own_group() / limit_name), _read(_own_group() / used_name)
        if limit.strip().isdigit() and used.strip().isdigit() and int(limit) < machine.total:
            return Memory(int(used), int(limit))
    return machine


def pids_max() -> int | None:
    """How many processes and threads the control group allows; None if it sets no limit."""
    for name in ("pids.max", "pids/pids.max"):
        text = _read(_own_group() / name).strip()
        if text.isdigit():
            return int(text)
    return None


def gpus() -> int:
    """How many CUDA devices a worker would see."""
    present = len([f for f in _listed("/dev") if re.fullmatch(r"nvidia\d+", f)])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len(parse_visible_devices(visible)))


def parse_cpu_max(text: str) -> float | None:
    """The quota in cores, from the cpu.max of a control group: "150000 100000" is 1.5."""
    parts = text.split()
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        return None
    return int(parts[0]) / int(parts[1])


def parse_meminfo(text: str) -> Memory:
    values = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M)}
    total = values.get("MemTotal", 0)
    return Memory(total - values.get("MemAvailable", 0), total)


def parse_visible_devices(text: str) -> list[str]:
    """The devices before the first one that is not: "-1" and "" hide all."""
    devices = []
    for each in text.split(","):
        if not each.strip() or each.strip().startswith("-"):
            break
        devices.append(each.strip())
    return devices


def _quota() -> float | None:
    quota = parse_cpu_max(_read(_own_group() / "cpu.max"))
    if quota is not None:
        return quota
    first = _read(_own_group() / "cpu/cpu.cfs_quota_us").strip()
    period = _read(_own_group() / "cpu/cpu.cfs_period_us").strip()
    return parse_cpu_max(f"{first} {period}")


def _own_group() -> Path:
    """The folder of this process's control group; a container sees its own as the root."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        number, _, path = line.split(":", 2)
        folder = _CGROUP / path.lstrip("/")
        if number == "0" and (folder / "cpu.max").exists():
            return folder
    return _CGROUP


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
