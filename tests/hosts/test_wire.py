"""Wire formats between hosts, with memory shared inside them: what every rank must end with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.hosts.places import TWO_BY_TWO, hosts, run_on
from tests.process.reference import assert_replicas_equal, reference_grads, wrap
from tests.process.wide import FORMATS, Wide, near, step_of


def _train(rank: int, world: int) -> list[str]:
    """In every format: near the mean, equal on all, and resumed to the same bits."""
    ways = []
    for form in (*FORMATS, "auto"):
        net = wrap(Wide(), wire=form, bucket_cap_mb=0.012)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        step_of(net, rank, 0)
        near(net, reference_grads(Wide(), world, step_of, 0), form)
        for step in range(1, 25):
            optimizer.step()
            optimizer.zero_grad()
            step_of(net, rank, step)
        optimizer.step()
        assert_replicas_equal(list(net.parameters()))
        ways.append(net.exchange)
        if form != "auto":
            _resume(net, rank, form)
    return ways


def _resume(net: Any, rank: int, form: str) -> None:
    twin = wrap(Wide(), wire=form, bucket_cap_mb=0.012)
    twin.load_state_dict(net.state_dict())
    twin.load_wire_state_dict(net.wire_state_dict())
    for each in (net, twin):
        each.zero_grad()
        step_of(each, rank, 99)
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad)


@pytest.mark.parametrize(
    ("host_of", "shape"),
    ((TWO_BY_TWO, "2 x 2 ranks, shm inside"), ((0, 1, 2), "3 x 1 rank"), ((0, 1, 2, 2, 1), "")),
    ids=("two by two", "three hosts", "three uneven hosts"),
)
def test_every_format_between_hosts(host_of: tuple[int, ...], shape: str) -> None:
    with hosts(max(host_of) + 1) as network:
        outcomes = run_on(network, host_of, _train, len(host_of), deadline_s=120.0)
    for ways in outcomes:
        for form, way in zip((*FORMATS, "auto"), ways, strict=True):
            assert way.startswith(f"hosts: {shape}") and f"gloo between, {form}" in way, way
