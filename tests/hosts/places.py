"""Starts ranks on the hosts of a network. A rank is told nothing that would tell hosts apart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.hosts.network import INTERFACE, Network, why_not
from tests.ranks import Outcome, Place, run_ranks, try_ranks

TWO_BY_TWO = (0, 0, 1, 1)


@contextlib.contextmanager
def hosts(count: int, mbit: float | None = None) -> Iterator[Network]:
    """A network, or a test that is skipped where there can be none."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Network(count, mbit) as network:
        yield network
        assert not network.processes(), "something still runs on a host"


def places(network: Network, host_of: Sequence[int], port: int = 29500) -> list[Place]:
    """Where the ranks are; they meet on the host of rank 0."""
    meeting = f"tcp://{network.address(host_of[0])}:{port}"
    return [Place(network.names[host], meeting, INTERFACE) for host in host_of]


def run_on(
    network: Network, host_of: Sequence[int], fn: Callable[..., Any], *args: Any, **options: Any
) -> list[Any]:
    """tests.ranks.run_ranks, with rank r on host host_of[r]."""
    where = places(network, host_of)
    return run_ranks(len(host_of), fn, *args, places=where, **options)


def try_on(
    network: Network, host_of: Sequence[int], fn: Callable[..., Any], *args: Any, **options: Any
) -> list[Outcome]:
    """tests.ranks.try_ranks, likewise."""
    return try_ranks(len(host_of), fn, *args, places=places(network, host_of), **options)
