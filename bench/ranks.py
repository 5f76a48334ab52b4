"""Starts ranks for a measurement from one warm process, and leaves none behind.

The ranks are forked from a server that has imported torch, meet over the loopback through a file,
compute with one thread each, and are pinned to a core each where there are enough. A rank ends
with its parent, however that ends. Knows nothing of what is measured.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import multiprocessing.connection
import os
import platform
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch", "torch.distributed", "closeranks.ddp.wrapper"])
_LOOPBACK = "lo0" if platform.system() == "Darwin" else "lo"
_GROUP_TIMEOUT_S = 60.0


class RankFailed(Exception):
    """A rank raised, died or did not end in time; the message holds what is known."""


def usable_cores() -> list[int]:
    """The cores that this process may run on; where the system does not tell, none to pin to."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return []


def pins(size: int) -> list[int] | None:
    """A core for each rank, or None if ranks have to share cores."""
    cores = usable_cores()
    return cores[:size] if size <= len(cores) else None


@dataclass(frozen=True)
class Place:
    """Where a rank is: its network namespace, where it meets the others, and its interface."""

    namespace: str
    meeting: str
    interface: str


def run(
    size: int,
    deadline_s: float,
    fn: Callable[..., Any],
    *args: Any,
    places: Sequence[Place] = (),
) -> list[Any]:
    """Run fn(rank, *args) on ranks that share a gloo group, and return their values, by rank."""
    cores = pins(size)
    processes, pipes = [], []
    with tempfile.TemporaryDirectory(prefix="closeranks-bench-") as folder:
        try:
            for rank in range(size):
                ours, theirs = _SERVER.Pipe(duplex=False)
                core = None if cores is None else cores[rank]
                here = Place("", f"file://{folder}/store", _LOOPBACK)
                setup = (rank, size, core, places[rank] if places else here)
                process = _SERVER.Process(target=_main, args=(setup, theirs, fn, args))
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return _collect(pipes, deadline_s)
        finally:
            for process in processes:
                process.join(1.0)
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def _collect(pipes: list[Any], deadline_s: float) -> list[Any]:
    """One value from every rank; the first failure ends the wait for the others."""
    values: dict[int, Any] = {}
    deadline = time.monotonic() + deadline_s
    while len(values) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in values]
        left_s = max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(open_pipes, left_s)
        if not ready:
            raise RankFailed(f"the ranks did not end within {deadline_s:.0f} s (--deadline-s)")
        for pipe in (pipe for pipe in open_pipes if pipe in ready):
            rank = pipes.index(pipe)
            try:
                value, trace = pipe.recv()
            except EOFError:
                raise RankFailed(f"rank {rank} died without a word") from None
            if trace is not None:
                raise RankFailed(f"rank {rank} failed\n{trace}")
            values[rank] = value
    return [values[rank] for rank in range(len(pipes))]


def _main(setup: tuple[Any, ...], pipe: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """The life of one rank; leaves by os._exit, so that no thread of gloo delays its end."""
    rank, size, core, place = setup
    if place.namespace:
        _enter(place.namespace)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    code = 1
    try:
        import torch

        if core is not None:
            os.sched_setaffinity(0, {core})
        os.environ["GLOO_SOCKET_IFNAME"] = place.interface
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo",
            init_method=place.meeting,
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=_GROUP_TIMEOUT_S),
        )
        pipe.send((fn(rank, *args), None))
        torch.distributed.barrier()  # Nobody leaves while another still talks to it.
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the parent is told
        with contextlib.suppress(OSError):
            pipe.send((None, traceback.format_exc()))
    finally:
        os._exit(code)


def _enter(namespace: str) -> None:
    """Before this process has a second thread, which would stay where it is."""
    from tests.hosts import network

    network.join(namespace)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is started by a parent"
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
