"""The workers of one launcher as processes: starts them, reads from them, buries them.

Tells a listener what happened and decides nothing. Everything that is opened for a worker is
closed when its streams have ended, or when the crew is closed.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from closeranks.launch import kernel
from closeranks.launch.channel import Channel, Message
from closeranks.launch.guard import Guard
from closeranks.launch.lifecycle import Event, State
from closeranks.launch.loop import Loop
from closeranks.launch.record import Worker
from closeranks.launch.starter import ForkStarter, Order, Starter

_READ_BYTES = 1 << 16
_FAULT_BYTES_MAX = 1 << 20
_DRAIN_S = 0.5


class Listener(Protocol):
    """Who is told."""

    def on_lines(self, worker: Worker, is_err: bool, lines: bytes) -> None: ...

    def on_message(self, worker: Worker, message: Message) -> None: ...

    def on_gone(self, worker: Worker, code: int) -> None: ...

    def on_death(self, worker: Worker) -> None: ...

    def on_noise(self, data: bytes) -> None: ...

    def on_starter_lost(self) -> None: ...


class Crew:
    """All workers of this host."""

    def __init__(
        self,
        workers: Sequence[Worker],
        starter: Starter,
        guard: Guard,
        loop: Loop,
        listener: Listener,
        memory: int,
    ) -> None:
        self.workers = list(workers)
        self._memory = memory  # the descriptor of what all workers share
        self._by_rank = {worker.rank: worker for worker in workers}
        self._starter = starter
        self._guard = guard
        self._loop = loop
        self._listener = listener
        self._unknown: dict[int, int] = {}  # died before anybody said who they were
        if isinstance(starter, ForkStarter):
            loop.watch(starter.channel.fileno(), self._starter_spoke)
            loop.watch(starter.noise, self._noise_came)

    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.is_alive]

    def start(
        self,
        workers: Sequence[Worker],
        job_of: Callable[[Worker], Message],
        listener_of: Callable[[Worker], socket.socket | None],
    ) -> None:
        """Start these, each with its job; one of them may be handed a listening socket."""
        orders = []
        for worker in workers:
            worker.step(Event.START)
            orders.append(self._order(worker, job_of(worker), listener_of(worker)))
        self._starter.start(orders, self._is_known)

    def signal(self, number: int, workers: Sequence[Worker] | None = None) -> None:
        """To the workers alone; SIGKILL to their whole groups."""
        for worker in self.alive() if workers is None else workers:
            if not worker.pid or not worker.is_alive:
                continue
            worker.was_ended_by_us = True
            if number == signal.SIGINT and worker.state is State.STARTING:
                number = signal.SIGTERM  # Python would tell of an interrupted import.
            if number == signal.SIGKILL:
                kernel.kill_group(worker.pid, number)
            kernel.kill(worker.pid, number)
            if number != signal.SIGKILL and kernel.state_and_parent(worker.pid)[0] in ("T", "t"):
                kernel.kill(worker.pid, signal.SIGCONT)

    def cancel(self) -> None:
        """Whoever has not been started will not be."""
        for rank in self._starter.cancel():
            worker = self._by_rank[rank]
            worker.was_ended_by_us = True
            worker.step(Event.DEATH)
            self._close_rest(worker)

    def bury(self) -> None:
        """Ask the kernel which children have ended: workers, the server, adopted orphans."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            worker = next((w for w in self.workers if w.pid == pid and w.is_alive), None)
            if worker is not None:
                # Before the pid is free for somebody else, whom nobody may take for the worker.
                self._listener.on_gone(worker, _code_of(ended))
            _, status = os.waitpid(pid, 0)
            if worker is not None:
                self._died(worker, status)
            else:
                self._unknown[pid] = status

    def is_drained(self) -> bool:
        """Whether all output has been read, or will not come: somebody else holds the pipe."""
        late_s = time.monotonic() - _DRAIN_S
        return all(not worker.streams or worker.died_s < late_s for worker in self.workers)

    def drain(self, worker: Worker) -> None:
        """Read what is there now from a worker's streams, lines without an end included."""
        for fd, is_err in list(worker.streams.items()):
            self._read_output(worker, fd)
            self._listener.on_lines(worker, is_err, worker.lines[is_err].finish())
        self._read_fault(worker)

    def close_streams(self, worker: Worker) -> None:
        """Stop reading from a dead worker's streams, ended or not."""
        for fd in list(worker.streams):
            self._end_of_stream(worker, fd)

    def close(self) -> None:
        """Kill whatever is left, and wait for it."""
        self._starter.close()
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            left = [pid for pid in kernel.children() if pid != self._guard.pid]
            if not left:
                break
            for pid in left:
                kernel.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
            self.bury()
        for worker in self.workers:
            self.close_streams(worker)
            self._close_rest(worker)
        self._guard.close()

    def _order(self, worker: Worker, job: Message, listening: socket.socket | None) -> Order:
        """The descriptors of one worker: the order of them is that of worker.py."""
        out, out_w = os.pipe()
        err, err_w = os.pipe()
        fault, fault_w = os.pipe()
        control, control_w = socket.socketpair()
        control.setblocking(False)
        worker.streams = {out: False, err: True}
        worker.fault_fd = fault
        worker.control = Channel(control)
        for fd in (out, err, fault):
            os.set_blocking(fd, False)
        for fd in (out, err):
            read = functools.partial(self._read_output, worker, fd)
            self._loop.watch(fd, read, is_output=True)
        self._loop.watch(fault, lambda: self._read_fault(worker))
        self._loop.watch(control.fileno(), lambda: self._read_control(worker))
        theirs = [out_w, err_w, fault_w, control_w.detach(), os.dup(self._memory)]
        if listening is not None:
            theirs.append(listening.detach())
        return Order(job, tuple(theirs), worker.control)

    def _is_known(self, rank: int, pid: int) -> None:
        worker = self._by_rank[rank]
        worker.pid = pid
        self._guard.watch(pid)
        self._listener.on_message(worker, {"kind": "pid"})
        if pid in self._unknown:
            status = self._unknown.pop(pid)
            self._listener.on_gone(worker, os.waitstatus_to_exitcode(status))
            self._died(worker, status)

    def _died(self, worker: Worker, status: int) -> None:
        worker.status = status
        self.drain(worker)
        self._read_control(worker)
        kernel.kill_group(worker.pid, signal.SIGKILL)
        self._guard.forget(worker.pid)
        worker.step(Event.DEATH)
        self._close_rest(worker)
        self._listener.on_death(worker)

    def _read_output(self, worker: Worker, fd: int) -> None:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._end_of_stream(worker, fd)
            return
        is_err = worker.streams[fd]
        lines = worker.lines[is_err].feed(data, time.monotonic())
        self._listener.on_lines(worker, is_err, lines)

    def _end_of_stream(self, worker: Worker, fd: int) -> None:
        is_err = worker.streams.pop(fd)
        self._loop.forget(fd)
        os.close(fd)
        self._listener.on_lines(worker, is_err, worker.lines[is_err].finish())

    def _read_fault(self, worker: Worker) -> None:
        if worker.fault_fd < 0:
            return
        try:
            data = os.read(worker.fault_fd, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.forget(worker.fault_fd)
            os.close(worker.fault_fd)
            worker.fault_fd = -1
        elif len(worker.fault) < _FAULT_BYTES_MAX:
            worker.fault += data

    def _read_control(self, worker: Worker) -> None:
        control = worker.control
        if control is None or not control.is_open:
            return
        while messages := control.receive():
            for message in messages:
                if message["kind"] == "hello":
                    worker.step(Event.HELLO)
                self._listener.on_message(worker, message)
        if not control.is_open:
            self._loop.forget(control.fileno())
            control.close()

    def _close_rest(self, worker: Worker) -> None:
        if worker.fault_fd >= 0:
            self._loop.forget(worker.fault_fd)
            os.close(worker.fault_fd)
            worker.fault_fd = -1
        if worker.control is not None and worker.control.is_open:
            self._loop.forget(worker.control.fileno())
            worker.control.close()

    def _starter_spoke(self) -> None:
        assert isinstance(self._starter, ForkStarter), "only a server speaks"
        self._starter.heard()
        if not self._starter.channel.is_open:
            self._loop.forget(self._starter.channel.fileno())
            self._listener.on_starter_lost()

    def _noise_came(self) -> None:
        assert isinstance(self._starter, ForkStarter), "only a server makes noise"
        data = os.read(self._starter.noise, _READ_BYTES)
        if data:
            self._listener.on_noise(data)
        else:
            self._loop.forget(self._starter.noise)
            os.close(self._starter.noise)


def _code_of(ended: os.waitid_result) -> int:
    """The exit code, or minus the signal."""
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
