"""Runs a function on n real ranks and returns what each of them made of it.

The ranks are forked from one server process that has already imported torch, so that starting
eight of them takes a fraction of a second. Every run has a deadline; when it passes, the Python
stacks of all threads of all ranks are part of the failure, and nothing is left running.

This module knows nothing of what is tested. A function given to it must be importable by name:
define it at the top level of a test module. Its first argument is the rank.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hosts import network

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["torch", "torch.distributed", "closeranks.ddp.wrapper", "tests.ranks"]
)
_STACK_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class Place:
    """Where a rank is: a network namespace or none, where it meets the others, its interface."""

    namespace: str
    init_method: str
    interface: str


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: a value, or an exception with its traceback, or a bare exit code."""

    rank: int
    value: Any = None
    error: str | None = None  # the exception's message
    error_type: str | None = None  # names of the exception's class and its bases, "A,B,C"
    trace: str = ""
    exitcode: int | None = None
    seconds: float = 0.0  # from the start of fn to its end, on the rank's own clock

    @property
    def failed(self) -> bool:
        return self.error is not None or self.exitcode != 0


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Run fn(rank, *args) on n ranks of one group and return the n values, by rank.

    Fails with every rank's traceback if one of them raised or died. Options as in try_ranks.
    """
    outcomes = try_ranks(n, fn, *args, **options)
    failures = [o for o in outcomes if o.failed]
    if failures:
        parts = [f"rank {o.rank} ended with exit code {o.exitcode}\n{o.trace}" for o in failures]
        raise AssertionError(f"{len(failures)} of {n} ranks failed\n" + "\n".join(parts))
    return [o.value for o in outcomes]


def try_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    deadline_s: float = 60.0,
    group_timeout_s: float = 30.0,
    init_group: bool = True,
    env: dict[str, str] | None = None,
    backend: str = "gloo",
    places: Sequence[Place] = (),
) -> list[Outcome]:
    """Run fn(rank, *args) on n ranks and return how each of them ended, by rank.

    init_group=False starts the ranks without a process group, with RANK, WORLD_SIZE, MASTER_ADDR
    and so on unset. `places` says where each rank is, if not here. Missing the deadline is always
    a failure of the test.
    """
    folder = Path(tempfile.mkdtemp(prefix="closeranks-test-"))
    ranks, pipes = [], []
    try:
        for rank in range(n):
            ours, theirs = _SERVER.Pipe(duplex=False)
            how = backend if init_group else ""
            place = places[rank] if places else Place("", f"file://{folder}/store", "lo")
            setup = _Setup(rank, n, str(folder), group_timeout_s, how, env or {}, place)
            process = _SERVER.Process(target=_rank_main, args=(setup, theirs, fn, args))
            process.start()
            theirs.close()
            ranks.append(process)
            pipes.append(ours)
        return _collect(ranks, pipes, deadline_s, folder)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class _Setup:
    rank: int
    size: int
    folder: str
    group_timeout_s: float
    backend: str  # of the group; empty is no group
    env: dict[str, str]
    place: Place


def _collect(ranks: list[Any], pipes: list[Any], deadline_s: float, folder: Path) -> list[Outcome]:
    """Wait for every rank's message and end, or fail with all stacks at the deadline."""
    messages: dict[int, dict[str, Any]] = {}
    open_ranks = set(range(len(ranks)))
    deadline = time.monotonic() + deadline_s
    while open_ranks:
        waiting = [pipes[r] for r in open_ranks]
        ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            _fail_with_stacks(ranks, sorted(open_ranks), deadline_s, folder)
        for rank in [r for r in open_ranks if pipes[r] in ready]:
            with contextlib.suppress(EOFError):  # it died without a message
                messages[rank] = pipes[rank].recv()
            open_ranks.discard(rank)
    for rank, process in enumerate(ranks):
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            _fail_with_stacks(ranks, [rank], deadline_s, folder)
    silent = {"trace": "(no message)"}
    return [
        Outcome(rank, exitcode=process.exitcode, **messages.get(rank, silent))
        for rank, process in enumerate(ranks)
    ]


def _fail_with_stacks(ranks: list[Any], hung: list[int], deadline_s: float, folder: Path) -> None:
    for process in ranks:
        if process.is_alive():
            os.kill(process.pid, _STACK_SIGNAL)
    time.sleep(1.0)
    stacks = []
    for rank in range(len(ranks)):
        file = folder / f"stacks-{rank}"
        text = file.read_text() if file.exists() else "(none)"
        stacks.append(f"--- stacks of rank {rank} ---\n{text}")
    raise AssertionError(f"ranks {hung} did not end within {deadline_s} s\n" + "\n".join(stacks))


def _rank_main(setup: _Setup, pipe: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """The life of one rank process; leaves by os._exit so that no other thread delays its end."""
    stacks = open(f"{setup.folder}/stacks-{setup.rank}", "w")  # noqa: SIM115 - lives as we do
    faulthandler.register(_STACK_SIGNAL, file=stacks, all_threads=True)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update({"GLOO_SOCKET_IFNAME": setup.place.interface} | setup.env)
    if setup.place.namespace:
        network.join(setup.place.namespace)
    started = time.monotonic()
    try:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        if setup.backend:
            torch.distributed.init_process_group(
                setup.backend,
                init_method=setup.place.init_method,
                rank=setup.rank,
                world_size=setup.size,
                timeout=datetime.timedelta(seconds=setup.group_timeout_s),
            )
        started = time.monotonic()
        message: dict[str, Any] = {"value": fn(setup.rank, *args)}
        code = 0
    except BaseException as error:  # noqa: BLE001 - whatever it was is the outcome
        names = ",".join(c.__name__ for c in type(error).__mro__)
        message = {"error": str(error), "error_type": names, "trace": traceback.format_exc()}
        code = 1
    message["seconds"] = time.monotonic() - started
    pipe.send(message)
    pipe.close()
    os._exit(code)
