"""Memory that a class needs for gradients: what a process grows by, in a process for each class.

Runs inside a rank. The method is the same for every variant: resident memory with the model in
place and no gradients, against resident memory with gradients and buckets (after a backward), and
against the highest within one more step. Freed memory is given back to the system at once, so
that it is not counted.
"""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn

from closeranks.measure.cases import loss_of, make_optimizer, perceptron
from closeranks.measure.variants import VARIANTS

LAYERS = 25
_M_MMAP_THRESHOLD = -3  # mallopt: from this size on, memory is mapped and unmapped by itself


@dataclass
class Memory:
    """Megabytes (1e6 bytes) that one rank grew by."""

    gradients: float  # the sizes of all gradients, added up: what the others compare with
    at_rest: float  # after a backward: gradients and buckets
    peak: float | None  # within a step, activations included; None where the system does not tell


def measure(rank: int, variant_name: str) -> Memory:
    """Grow by one variant."""
    _give_back_freed_memory()
    torch.manual_seed(0)
    wrap = VARIANTS[variant_name].wrap
    _use_everything_once(wrap)
    module, batch = perceptron(LAYERS), torch.randn(2, 1024)
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss - _counted_twice()

    model = wrap(module)
    optimizer = make_optimizer(module)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
    gc.collect()
    at_rest = process.memory_info().rss - _counted_twice() - before

    knows_peak = _forget_peak()
    optimizer.zero_grad()
    loss_of(model(batch)).backward()
    optimizer.step()
    peak = (_peak() - _counted_twice() - before) / 1e6 if knows_peak else None
    gradients = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)
    return Memory(gradients / 1e6, at_rest / 1e6, peak)


def _use_everything_once(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Take one step with one layer, so that code and buffers for any model are in memory."""
    module = perceptron(layers=1)
    model, optimizer = wrap(module), make_optimizer(module)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model(torch.randn(2, 1024))).backward()
        optimizer.step()


def _give_back_freed_memory() -> None:
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 64 * 1024)


def _forget_peak() -> bool:
    """Let the highest resident memory be that of now; whether the system knows how."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _counted_twice() -> int:
    """Bytes of shared memory that are resident here and belong to the count of other ranks."""
    counted, ours = 0, False
    smaps = Path("/proc/self/smaps")
    for line in smaps.read_text().splitlines() if smaps.exists() else ():
        name, *values = line.split()
        if "-" in name and not name.endswith(":"):  # the head of the next mapping
            ours = "memfd:closeranks" in line
        elif ours and name in ("Rss:", "Pss:"):
            counted += int(values[0]) * (1024 if name == "Rss:" else -1024)
    return counted


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
