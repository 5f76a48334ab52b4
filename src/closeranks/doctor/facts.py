"""What this machine has, as plain values: the shell around the checks.

Reads /proc, /sys and the environment, and asks a process of its own about torch, because torch is
slow to import and may be what is broken. Judges nothing.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import psutil  # type: ignore[import-untyped]

from closeranks.launch import machine

_TORCH_LIMIT_S = 120.0
_SHM = "/dev/shm"
_NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CLOSERANKS_KERNELS")


@dataclass(frozen=True)
class Space:
    """Bytes of a file system."""

    free: int
    total: int


@dataclass(frozen=True)
class Facts:
    """Everything that is judged. None: the system does not tell, or there is no limit."""

    python: tuple[int, int]
    architecture: str
    cores: machine.Cores
    cores_of_machine: int
    gpus: int
    memory: machine.Memory
    shm: Space | None
    limits: dict[str, int | None]  # nofile, memlock, nproc
    pids_max: int | None  # processes and threads that the control group allows
    interfaces: dict[str, tuple[bool, list[str]]]  # by name: is it up, its addresses
    environ: dict[str, str]
    torch: dict[str, Any]  # or {"error": why it could not be asked}


def gather() -> Facts:
    return Facts(
        python=sys.version_info[:2],
        architecture=platform.machine(),
        cores=machine.cores(),
        cores_of_machine=os.cpu_count() or 1,
        gpus=machine.gpus(),
        memory=machine.memory(),
        shm=_space(_SHM),
        limits={
            "nofile": _limit(resource.RLIMIT_NOFILE),
            "memlock": _limit(resource.RLIMIT_MEMLOCK),
            "nproc": _limit(resource.RLIMIT_NPROC),
        },
        pids_max=machine.pids_max(),
        interfaces=_interfaces(),
        environ={name: os.environ[name] for name in _NAMES if os.environ.get(name)},
        torch=ask_torch(),
    )


def ask_torch() -> dict[str, Any]:
    """What measure/build.py says of the torch that workers would import."""
    command = [sys.executable, "-m", "closeranks.measure.build"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"it did not answer within {_TORCH_LIMIT_S:.0f} s"}
    last = (done.stdout.strip().splitlines() or [""])[-1]
    try:
        told: dict[str, Any] = json.loads(last)
    except ValueError:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"error": why}
    return told


def _space(folder: str) -> Space | None:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return Space(usage.free, usage.total)


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _interfaces() -> dict[str, tuple[bool, list[str]]]:
    stats = psutil.net_if_stats()
    wanted = (socket.AF_INET, socket.AF_INET6)
    return {
        name: (
            name in stats and stats[name].isup,
            [each.address for each in addresses if each.family in wanted],
        )
        for name, addresses in psutil.net_if_addrs().items()
    }
