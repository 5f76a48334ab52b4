"""Runs the suites, each in a worker process, and gathers one Result for every selected test.

A worker that dies or hangs costs one failed test: that is reported with the end of its output or
with the stacks of all its processes, they are killed, and another worker does the rest. Nothing
stays behind: a worker and its ranks are one process group, and all their files are in one
temporary folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from tests.conformance import stacks
from tests.conformance.result import FAIL, Message, Result
from tests.conformance.settings import Settings
from tests.conformance.suites import SUITES, Suite
from tests.conformance.worker import LOG, MESSAGES

ROOT = Path(__file__).resolve().parents[2]

_POLL_S = 0.1
_GRACE_S = 60.0  # beyond a test's time limit: importing torch, writing stacks
_FOREIGN = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "DDP_", "TORCH_", "NCCL_")
_ENVIRONMENT = {
    "BACKEND": "gloo",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # more would be processes that outlive the test
}


def run(settings: Settings, on_result: Callable[[Result], None] | None = None) -> list[Result]:
    """Run all selected tests and return how each ended; on_result sees each at once."""
    deadline = _Deadline(settings.deadline_s)
    results: list[Result] = []
    for suite in SUITES.values():
        if settings.only and not any(_is_in(suite, test) for test in settings.only):
            continue
        for result in _run_suite(suite, settings, deadline):
            results.append(result)
            if on_result:
                on_result(result)
    return results


def _is_in(suite: Suite, test: str) -> bool:
    return test.split(".")[0] in suite.classes


def _run_suite(suite: Suite, settings: Settings, deadline: _Deadline) -> Iterator[Result]:
    settings = replace(settings, force_cpu=settings.force_cpu and suite.for_devices)
    done: list[str] = []
    while True:
        left = replace(settings, done=tuple(done))
        with _worker(suite, left) as worker:
            for result in worker.follow(deadline):
                done.append(result.test)
                yield result
            if worker.has_done_all:
                return


@dataclass
class _Deadline:
    """For the whole run. It starts with the first test: importing torch takes as long as it may."""

    seconds: float
    _end: float | None = None

    def start(self) -> None:
        if self._end is None:
            self._end = time.monotonic() + self.seconds

    @property
    def has_passed(self) -> bool:
        return self._end is not None and time.monotonic() > self._end


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    settings: Settings
    selected: list[str] | None = None
    running: str | None = None
    reported: set[str] = field(default_factory=set)
    _read_to: int = 0

    @property
    def has_done_all(self) -> bool:
        return self.selected is not None and set(self.selected) <= self.reported

    def follow(self, deadline: _Deadline) -> Iterator[Result]:
        """Results as they come; ends when the worker has, whether or not all is done."""
        last_news = time.monotonic()
        while True:
            ended = self.process.poll() is not None  # before reading: nothing is overlooked
            for message in self._news():
                deadline.start()
                last_news = time.monotonic()
                if message.result is not None:
                    yield self._report(message.result)
            if ended:
                yield from self._explain_end()
                return
            if deadline.has_passed:
                yield from self._give_up()
                return
            if time.monotonic() - last_news > self.settings.timeout_s + _GRACE_S:
                yield self._fail_running(f"the worker hung\n{self._stacks()}")
                return
            time.sleep(_POLL_S)

    def _news(self) -> Iterator[Message]:
        file = self.settings.in_scratch(MESSAGES)
        if not file.exists():
            return
        with file.open("rb") as messages:
            messages.seek(self._read_to)
            text = messages.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._read_to += len(complete)
        for line in complete.decode().splitlines():
            message = Message.decode(line)
            self.selected = message.selected if message.selected is not None else self.selected
            self.running = message.running or self.running
            yield message

    def _report(self, result: Result) -> Result:
        self.reported.add(result.test)
        self.running = None
        return result

    def _explain_end(self) -> Iterator[Result]:
        if not self.has_done_all:
            yield self._fail_running(
                f"the worker died with exit code {self.process.returncode}\n{self._output()}"
            )

    def _give_up(self) -> Iterator[Result]:
        why = f"not ended within {self.settings.deadline_s} s for the whole run\n"
        stacks = self._stacks()
        for test in self.selected or []:
            if test not in self.reported:
                yield self._report(Result(test, FAIL, why + stacks))

    def _fail_running(self, why: str) -> Result:
        if self.running is None:
            raise RuntimeError(f"no test was running, but {why}")
        return self._report(Result(self.running, FAIL, why))

    def _output(self) -> str:
        return self.settings.in_scratch(LOG).read_text(errors="replace")[-3000:]

    def _stacks(self) -> str:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker = psutil.Process(self.process.pid)
            family = [worker.pid, *(child.pid for child in worker.children(recursive=True))]
            stacks.write(family, self.settings)
        return stacks.take(self.settings)


@contextlib.contextmanager
def _worker(suite: Suite, settings: Settings) -> Iterator[_Worker]:
    """Start a worker; afterwards it, its ranks and its files are gone."""
    scratch = tempfile.mkdtemp(prefix="closeranks-conformance-")
    settings = replace(settings, scratch=scratch)
    process = None
    try:
        with settings.in_scratch(LOG).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.conformance.worker", suite.name],
                stdin=subprocess.PIPE,  # its end tells the worker that we are gone
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=scratch,
                env=_environment(settings),
                start_new_session=True,
            )
        yield _Worker(process, settings)
    finally:
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdin.close()  # type: ignore[union-attr] # it is a pipe
        shutil.rmtree(scratch, ignore_errors=True)


def _environment(settings: Settings) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    path = os.pathsep.join(filter(None, [str(ROOT), os.getcwd(), os.environ.get("PYTHONPATH")]))
    places = {"PYTHONPATH": path, "TMPDIR": settings.scratch, "TEMP_DIR": settings.scratch}
    sizes = {"WORLD_SIZE": str(settings.world_size)}
    return kept | _ENVIRONMENT | settings.environment() | places | sizes
