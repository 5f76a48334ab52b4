"""A host that cannot share memory, or not enough of it: other ways, said once, and right results.

What is missing is injected at named points: a full file system, no memory, no descriptors, a system
that forbids it. Results are compared with the reference in every case.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from closeranks.observe import points
from tests.process.faults import fail_at, happened_at_s
from tests.process.noticed import noticed
from tests.process.reference import Chain, rows, train_and_compare, wrap
from tests.ranks import Outcome, run_ranks, try_ranks

_AUTO = {"CLOSERANKS_EXCHANGE": "auto", "CLOSERANKS_KERNELS": "auto"}
_FULL: tuple[Callable[[], OSError], ...] = (
    lambda: OSError(errno.ENOSPC, "No space left on device"),
    lambda: OSError(errno.ENOMEM, "Cannot allocate memory"),
    lambda: OSError(errno.EMFILE, "Too many open files"),
)


def _step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step)).square().mean().backward()


def _train(net: Any, rank: int, world: int) -> None:
    """Three steps; a collective of the user's own between them must not meet one of ours."""

    def step(net: Any, rank: int, number: int) -> None:
        _step(net, rank, number)
        if hasattr(net, "exchange"):
            flag = torch.ones(7)
            dist.all_reduce(flag)
            assert torch.equal(flag, torch.full((7,), float(world)))

    train_and_compare(Chain, rank, world, step, steps=3, net=net)


def _without(
    rank: int, world: int, point: str, who: tuple[int, ...], kind: int, folder: str
) -> tuple[str, list[str]]:
    logging.getLogger("closeranks").setLevel(logging.WARNING)
    with noticed() as said:
        if rank in who:
            fail_at(point, _FULL[kind], Path(folder) / f"fired {rank}")
        net = wrap(Chain(), bucket_cap_mb=0.0001)  # several buckets
        _train(net, rank, world)
        points.on_reach = None
    if rank in who:
        happened_at_s(Path(folder) / f"fired {rank}")
    return net.exchange, said


@pytest.mark.parametrize("who", ((1,), (0, 1, 2)), ids=("one rank", "all ranks"))
@pytest.mark.parametrize("kind", range(len(_FULL)), ids=("no space", "no memory", "no descriptors"))
def test_without_a_page_the_group_is_used(who: tuple[int, ...], kind: int, tmp_path: Path) -> None:
    outcomes = run_ranks(3, _without, 3, "make page", who, kind, str(tmp_path), env=_AUTO)
    assert [way for way, _ in outcomes] == ["group: gloo"] * 3
    assert len(outcomes[0][1]) == 1, "rank 0 says it once"
    for wanted in (
        "rank 1 cannot" if 0 not in who else "rank 0 cannot",
        "by group: gloo",
        "could not be made",
        _FULL[kind]().strerror,
    ):
        assert wanted in outcomes[0][1][0]
    assert not outcomes[1][1] and not outcomes[2][1]


@pytest.mark.parametrize("point", ("allocate", "map"))
@pytest.mark.parametrize("who", ((1,), (0, 1, 2)), ids=("one rank", "all ranks"))
def test_without_room_for_gradients_they_are_copied(
    point: str, who: tuple[int, ...], tmp_path: Path
) -> None:
    outcomes = run_ranks(3, _without, 3, point, who, 0, str(tmp_path), env=_AUTO)
    for rank, (way, said) in enumerate(outcomes):
        assert way.startswith("shm: 3 ranks on one host")
        if rank in who:
            assert len(said) == 1, f"there are several buckets, and it is said once: {said}"
            for wanted in (f"rank {rank}", "No space left", "slower, but right", "Free memory"):
                assert wanted in said[0], said[0]
        elif point == "allocate":
            assert not said, said


def test_what_cannot_be_mapped_is_not_used(tmp_path: Path) -> None:
    """As with ranks of several users: the kernel refuses the memory of another."""
    outcomes = run_ranks(3, _without, 3, "meet", (2,), 0, str(tmp_path), env=_AUTO)
    assert [way for way, _ in outcomes] == ["group: gloo"] * 3
    assert len(outcomes[0][1]) == 1 and "could not map" in outcomes[0][1][0]


def _insist(rank: int) -> None:
    if rank == 1:
        fail_at("meet", _FULL[0])
    wrap(Chain())


def test_who_insists_on_memory_is_told_that_it_cannot_be_mapped() -> None:
    errors = _errors(try_ranks(2, _insist, env={"CLOSERANKS_EXCHANGE": "shm"}))
    assert len(errors) == 1 and "could not map the memory of another" in errors.pop()


def _without_memfd(rank: int, who: tuple[int, ...]) -> str:
    if rank in who:
        del os.memfd_create
    with noticed() as said:
        net = wrap(Chain())
        _train(net, rank, 2)
    assert not said, said
    return net.exchange


@pytest.mark.parametrize("who", ((0,), (1,), (0, 1)))
def test_a_system_without_memfd_is_not_worth_a_warning(who: tuple[int, ...]) -> None:
    assert run_ranks(2, _without_memfd, who, env=_AUTO) == ["group: gloo"] * 2


def _as_another_user(rank: int) -> str:
    """Rank 1 gives up its rights: it may not look into rank 0, which keeps them."""
    if rank == 1:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    net = wrap(Chain())
    _train(net, rank, 2)
    return net.exchange


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_ranks_of_two_users_do_not_share_memory() -> None:
    assert run_ranks(2, _as_another_user, env=_AUTO) == ["group: gloo"] * 2


def _elsewhere(rank: int) -> str:
    os.environ["CLOSERANKS_HOST"] = f"host{rank}"
    with noticed() as said:
        net = wrap(Chain())
        _train(net, rank, 2)
    assert not said, said
    return net.exchange


def test_ranks_of_two_hosts_do_not_share_memory() -> None:
    wanted = "hosts: 2 x 1 rank, gloo between, float32"
    assert run_ranks(2, _elsewhere, env=_AUTO) == [wanted] * 2


def _wish(rank: int, wishes: dict[int, dict[str, str]]) -> str:
    os.environ.update(wishes.get(rank, {}))
    return str(wrap(Chain()).exchange)


def _errors(outcomes: list[Outcome]) -> set[str]:
    for outcome in outcomes:
        assert outcome.error_type is not None, f"rank {outcome.rank} trains"
        assert outcome.error_type.startswith("ValueError"), outcome.trace
    return {str(outcome.error) for outcome in outcomes}


@pytest.mark.parametrize(
    ("wishes", "said"),
    (
        ({1: {"CLOSERANKS_EXCHANGE": "fast"}}, "CLOSERANKS_EXCHANGE='fast' on rank 1"),
        ({0: {"CLOSERANKS_KERNELS": "C"}}, "CLOSERANKS_KERNELS='C' on rank 0"),
        (
            {0: {"CLOSERANKS_EXCHANGE": "shm"}, 1: {"CLOSERANKS_HOST": "x"}},
            "CLOSERANKS_EXCHANGE=shm, but the ranks are on several hosts",
        ),
    ),
)
def test_a_wish_that_cannot_be_granted_is_the_same_error_on_all_ranks(
    wishes: dict[int, dict[str, str]], said: str
) -> None:
    errors = _errors(try_ranks(2, _wish, wishes, env=_AUTO))
    assert len(errors) == 1 and said in errors.pop()


def _without_library(rank: int, who: tuple[int, ...]) -> tuple[str, list[str]]:
    from closeranks.segment import kernels

    if rank in who:
        kernels.library = lambda: None  # type: ignore[assignment]
    net = wrap(Chain())
    _train(net, rank, 2)
    return net.exchange, []


@pytest.mark.parametrize("who", ((1,), (0, 1)))
def test_without_a_library_all_sum_in_python(who: tuple[int, ...]) -> None:
    for way, _ in run_ranks(2, _without_library, who, env=_AUTO):
        assert way == "shm: 2 ranks on one host, pure Python"


def test_c_kernels_that_are_wished_for_and_missing_are_an_error() -> None:
    errors = _errors(try_ranks(2, _without_library, (1,), env={"CLOSERANKS_KERNELS": "c"}))
    assert len(errors) == 1
    assert "CLOSERANKS_KERNELS=c, but rank 1 has no C kernels" in errors.pop()


def _on_another_machine(rank: int) -> str:
    import platform

    from closeranks.segment import kernels

    platform.machine = lambda: "aarch64"
    kernels.library = lambda: None  # type: ignore[assignment]
    logging.getLogger("closeranks").setLevel(logging.INFO)
    with noticed() as said:
        net = wrap(Chain())
        _train(net, rank, 2)
    assert any("C kernels" in text and "not x86" in text for text in said), said
    return net.exchange


def test_a_machine_that_is_not_x86_shares_memory_in_c_only() -> None:
    assert run_ranks(2, _on_another_machine, env=_AUTO) == ["group: gloo"] * 2


def _say_the_way(rank: int) -> tuple[str, list[str]]:
    logging.getLogger("closeranks").setLevel(logging.INFO)
    with noticed() as said:
        net = wrap(Chain())
    return net.exchange, [text for text in said if "exchanges by" in text]


@pytest.mark.parametrize("exchange", ("shm", "group"))
def test_the_way_is_said_once_with_its_reason(exchange: str) -> None:
    outcomes = run_ranks(2, _say_the_way, env=_AUTO | {"CLOSERANKS_EXCHANGE": exchange})
    for rank, (way, said) in enumerate(outcomes):
        reason = "CLOSERANKS_EXCHANGE=group" if exchange == "group" else "all ranks share this host"
        assert way.startswith(exchange)
        assert len(said) == 1 and said[0].startswith(f"rank {rank} exchanges by {way}: {reason}")
