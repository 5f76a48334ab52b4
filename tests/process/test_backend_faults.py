"""A "closeranks" group when a rank dies, stops, or does something else than the others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from closeranks import ExchangeFailed, PeerLost, RankAbsent
from closeranks.observe import points
from tests.ranks import Outcome, run_ranks, try_ranks

POINTS = ("before arriving", "after arriving", "before done", "after done")
SIZE = 600_000  # float32: three pieces

COLLECTIVES: dict[str, Callable[[int], Any]] = {
    "all_reduce": lambda world: dist.all_reduce(torch.ones(SIZE)),
    "reduce_scatter": lambda world: dist.reduce_scatter_single(
        torch.empty(SIZE), torch.ones(SIZE * world)
    ),
    "all_gather": lambda world: dist.all_gather_single(torch.empty(SIZE * world), torch.ones(SIZE)),
    "broadcast": lambda world: dist.broadcast(torch.ones(SIZE), 0),
    "barrier": lambda world: dist.barrier(),
}


def _suffer(point: str, kind: str, sign: int) -> None:
    """This process gets a signal at a point of the second collective of a kind."""
    seen: list[int] = []

    def on_reach(name: str, **facts: Any) -> None:
        if name == point and facts.get("collective") == kind:
            seen.append(facts["tick"])
            if len(seen) == 1:
                Path(f"{os.environ['FOLDER']}/fired-{os.getpid()}").write_text(str(time.time()))
                os.kill(os.getpid(), sign)

    points.on_reach = on_reach


def _join(number: int, rank: int, world: int, timeout_s: float) -> None:
    """One of several jobs that run side by side, each a default group of its own."""
    dist.init_process_group(
        "closeranks",
        init_method=f"file://{os.environ['FOLDER']}/store-{number}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )


def _lose_one(rank: int, point: str, kinds: list[str], world: int) -> str | None:
    number, rank = divmod(rank, world)
    kind = kinds[number]
    _join(number, rank, world, timeout_s=60.0)
    collective = COLLECTIVES[kind]
    collective(world)
    if rank == world - 1:
        _suffer(point, kind, signal.SIGKILL)
    with pytest.raises(PeerLost) as caught:
        collective(world)
        dist.barrier()
        dist.barrier()
    assert caught.value.rank == world - 1
    fired = list(Path(os.environ["FOLDER"]).glob("fired-*"))
    assert len(fired) >= 1
    with pytest.raises(PeerLost):
        dist.all_reduce(torch.ones(1))
    return str(caught.value)


def _lost(world: int, point: str, kinds: list[str], folder: Path) -> list[Outcome]:
    outcomes = try_ranks(
        world * len(kinds),
        _lose_one,
        point,
        kinds,
        world,
        init_group=False,
        env={"FOLDER": str(folder)},
    )
    assert len(list(folder.glob("fired-*"))) == len(kinds), "not every fault was injected"
    return outcomes


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("world", [2, 4])
def test_survivors_name_the_dead(world: int, point: str, tmp_path: Path) -> None:
    kinds = list(COLLECTIVES) if world == 2 else ["all_reduce"]  # four ranks divide the sum
    for outcome in _lost(world, point, kinds, tmp_path):
        rank, kind = outcome.rank % world, kinds[outcome.rank // world]
        if rank == world - 1:
            assert outcome.exitcode == -signal.SIGKILL
            continue
        assert not outcome.failed, outcome.trace
        assert f"rank {world - 1} is gone: its process" in outcome.value
        assert outcome.value.startswith((kind, "barrier"))
        assert outcome.seconds < 20, "the survivors waited for the timeout"


def _meet_a_stopped_one(rank: int) -> str | None:
    _join(0, rank, 2, timeout_s=1.0)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"pid-{rank}", str(os.getpid()))
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        _suffer("before arriving", "all_reduce", signal.SIGSTOP)
        dist.all_reduce(torch.ones(3))
        return None
    try:
        with pytest.raises(RankAbsent) as caught:
            dist.all_reduce(torch.ones(3))
        return str(caught.value)
    finally:
        os.kill(int(store.get("pid-1")), signal.SIGKILL)


def test_a_stopped_rank_is_an_error_at_the_timeout(tmp_path: Path) -> None:
    first, second = try_ranks(
        2, _meet_a_stopped_one, init_group=False, env={"FOLDER": str(tmp_path)}
    )
    assert not first.failed, first.trace
    assert "timed out after 1.0 s: rank 1 did not come" in first.value
    assert "is stopped" in first.value
    assert second.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.glob("fired-*"))) == 1


def _own_timeout(rank: int) -> None:
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=0.3)
    if rank == 0:
        with pytest.raises(RankAbsent, match=r"barrier: timed out after 0\.3 s"):
            dist.group.WORLD.barrier(options).wait()
    else:
        time.sleep(1.0)


def test_a_collective_can_have_a_timeout_of_its_own() -> None:
    run_ranks(2, _own_timeout, backend="closeranks")


def _train_until_the_end(rank: int, folder: str) -> str | None:
    net = DistributedDataParallel(nn.Linear(600, 600))
    for step in range(3):
        if rank == 1 and step == 2:
            os.environ["FOLDER"] = folder
            _suffer("after arriving", "all_reduce", signal.SIGKILL)
        try:
            net(torch.ones(2, 600)).sum().backward()
        except RuntimeError as error:  # torch's C++ reducer passes on the text only
            return str(error)
    return None


def test_torchs_ddp_passes_on_who_died(tmp_path: Path) -> None:
    first, second = try_ranks(2, _train_until_the_end, str(tmp_path), backend="closeranks")
    assert second.exitcode == -signal.SIGKILL
    assert not first.failed, first.trace
    assert "rank 1 is gone" in first.value


def _disagree(rank: int) -> list[str]:
    """Each in a group of its own: a group in which ranks disagree cannot be used any more."""
    texts = []
    for here, there in (
        (lambda g: dist.all_reduce(torch.ones(3), group=g), lambda g: dist.barrier(group=g)),
        (
            lambda g: dist.all_reduce(torch.ones(3), group=g),
            lambda g: dist.all_reduce(torch.ones(4), group=g),
        ),
        (
            lambda g: dist.all_reduce(torch.ones(3), group=g),
            lambda g: dist.all_reduce(torch.ones(3, dtype=torch.float64), group=g),
        ),
        (
            lambda g: dist.all_reduce(torch.ones(3), group=g),
            lambda g: dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX, group=g),
        ),
        (
            lambda g: dist.broadcast(torch.ones(3), 0, group=g),
            lambda g: dist.broadcast(torch.ones(3), 1, group=g),
        ),
    ):
        group = dist.new_group()
        with pytest.raises(ExchangeFailed) as caught:
            (there if rank else here)(group)
        texts.append(str(caught.value))
    dist.all_reduce(torch.ones(3))  # other groups go on
    return texts


def test_ranks_that_come_for_different_things_are_told() -> None:
    for texts in run_ranks(2, _disagree, backend="closeranks"):
        other_call, size, dtype, operation, source = texts
        assert "all_reduce (sum) of 3 x torch.float32" in other_call and "barrier" in other_call
        assert "of 3 x" in size and "of 4 x" in size
        assert "torch.float64" in dtype
        assert "(sum)" in operation and "(max)" in operation
        assert "broadcast from rank 0" in source and "broadcast from rank 1" in source


def _leave_early(rank: int) -> str | None:
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        dist.destroy_process_group()
        time.sleep(2.0)
        return None
    with pytest.raises(PeerLost) as caught:
        dist.all_reduce(torch.ones(3))
    return str(caught.value)


def test_a_rank_that_destroys_the_group_is_not_waited_for() -> None:
    first, _ = run_ranks(2, _leave_early, backend="closeranks")
    assert "rank 1 is gone: it has left the group" in first


def _interrupt(rank: int) -> str | None:
    """Ctrl-C while waiting: the interruption goes on its way, and the others are told."""
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        time.sleep(1.0)
        dist.all_reduce(torch.ones(3))  # rank 0 has given its numbers to this one
        with pytest.raises(PeerLost, match="rank 0 is gone"):
            dist.all_reduce(torch.ones(3))
        return "told"
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        dist.all_reduce(torch.ones(3))
    with pytest.raises(ExchangeFailed, match="earlier collective"):
        dist.all_reduce(torch.ones(3))
    return "interrupted"


def test_an_interruption_is_passed_on() -> None:
    assert run_ranks(2, _interrupt, backend="closeranks") == ["interrupted", "told"]
