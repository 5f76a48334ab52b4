"""Hosts on one machine: network namespaces, joined by a switch, each on a link of a given speed.

    with Network(3, mbit=100) as network:
        network.enter(1)            in a process of its own: it is on the second host from now on
        network.unplug(2)           the third host's link is down

Every host has one interface, `eth0`, and the switch is a bridge in a namespace of its own, so that
nothing of this machine's own network is touched or can be reached. Links are shaped with tbf, both
ways. Names hold the pid of whoever made them: two users never meet, and what a killed one has left
behind is swept up by the next. Needs root and Debian's iproute2. Knows nothing of what runs there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

INTERFACE = "eth0"
_PREFIX = "closeranks"
_NAMESPACES = Path("/run/netns")
_NEW_NETWORK = 0x40000000
_BURST_S, _QUEUE_MS = 0.005, 50
_numbers = itertools.count()


@functools.cache
def why_not() -> str:
    """Why there can be no namespaces here, or nothing if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if _found(tool) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 is not installed"
    try:
        with Network(1, mbit=100):
            return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


class Network:
    """So many hosts, from enter to exit."""

    def __init__(self, hosts: int, mbit: float | None = None) -> None:
        """`mbit` is the speed of every link, in both directions; None is as fast as it goes."""
        stem = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self.names = [f"{stem}-host{number}" for number in range(hosts)]
        self._switch = f"{stem}-switch"
        self._mbit = mbit

    def __enter__(self) -> Network:
        _sweep()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def enter(self, host: int) -> None:
        """This process, as long as it has one thread, is on that host from now on."""
        join(self.names[host])

    def run(self, host: int, *command: str) -> str:
        """What a command prints on a host."""
        return _run("ip", "netns", "exec", self.names[host], *command)

    def unplug(self, host: int) -> None:
        """Nothing comes to the host or from it; it does not notice, as with a switch that fails."""
        self._on_switch("ip", "link", "set", self._port(host), "nomaster")

    def plug(self, host: int) -> None:
        self._on_switch("ip", "link", "set", self._port(host), "master", "bridge")

    def take_down(self, host: int) -> None:
        """The host's own interface is down."""
        self.run(host, "ip", "link", "set", INTERFACE, "down")

    def narrow(self, host: int, mtu: int) -> None:
        """The way to a host lets no larger packets pass, and nobody is told."""
        limits = ("rate", "10gbit", "burst", str(mtu), "latency", f"{_QUEUE_MS}ms")
        self._on_switch("tc", "qdisc", "replace", "dev", self._port(host), "root", "tbf", *limits)

    def processes(self) -> list[int]:
        """The pids of whatever still runs on any host."""
        return [pid for host in range(len(self.names)) for pid in self.processes_of(host)]

    def processes_of(self, host: int) -> list[int]:
        return [int(pid) for pid in _run("ip", "netns", "pids", self.names[host]).split()]

    def _make(self) -> None:
        for name in (*self.names, self._switch):
            _run("ip", "netns", "add", name)
        self._on_switch("ip", "link", "add", "bridge", "type", "bridge")
        self._on_switch("ip", "link", "set", "bridge", "up")
        for host, name in enumerate(self.names):
            peer = ("peer", "name", self._port(host), "netns", self._switch)
            _run("ip", "-n", name, "link", "add", INTERFACE, "type", "veth", *peer)
            self._on_switch("ip", "link", "set", self._port(host), "master", "bridge", "up")
            _run("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _run("ip", "-n", name, "link", "set", interface, "up")
            if self._mbit is not None:
                self.run(host, *_shape(INTERFACE, self._mbit))
                if len(self.names) > 2:  # with two, what one may send the other may receive
                    self._on_switch(*_shape(self._port(host), self._mbit))

    def _remove(self) -> None:
        for name in (*self.names, self._switch):
            _delete(name)

    def _port(self, host: int) -> str:
        return f"port{host}"

    def _on_switch(self, *command: str) -> None:
        _run("ip", "netns", "exec", self._switch, *command)


def join(name: str) -> None:
    """Move this thread into a namespace."""
    with open(_NAMESPACES / name) as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEW_NETWORK) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot enter {name}: {os.strerror(code)}")


def _shape(interface: str, mbit: float) -> Sequence[str]:
    bits = mbit * 1e6
    burst = max(32_000, int(bits / 8 * _BURST_S))
    limits = ("rate", f"{bits:.0f}bit", "burst", str(burst), "latency", f"{_QUEUE_MS}ms")
    return ("tc", "qdisc", "replace", "dev", interface, "root", "tbf", *limits)


def _sweep() -> None:
    """Remove what was made by processes that are no more."""
    if not _NAMESPACES.is_dir():
        return
    for name in os.listdir(_NAMESPACES):
        match = re.match(rf"{_PREFIX}-(\d+)-", name)
        if match and not Path(f"/proc/{match[1]}").exists():
            _delete(name)


def _delete(name: str) -> None:
    if (_NAMESPACES / name).exists():
        with contextlib.suppress(subprocess.CalledProcessError):
            _run("ip", "netns", "delete", name)


def _found(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _run(*command: str) -> str:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
        env=os.environ | {"PATH": path},
    )
    return done.stdout
