"""Shared memory from its making to its end: nothing is left behind, and nobody meets a stranger.

Wrapped models and groups are made and destroyed, copied by one rank, forked, forgotten and killed;
descriptors, mappings and bytes are counted by the kernel's own tables.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from closeranks.errors import CloseranksError
from tests.process.exchange_ways import WAYS, exchange_here, need
from tests.process.reference import Chain, assert_replicas_equal, rows, train_and_compare, wrap
from tests.ranks import run_ranks, try_ranks

_SHM = {"CLOSERANKS_EXCHANGE": "shm", "CLOSERANKS_KERNELS": "auto"}


def _step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step)).square().mean().backward()


def _descriptors() -> list[str]:
    """What is open, without the numbers that make it unique, and without connections of groups."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}").split("[")[0]
        except FileNotFoundError:
            continue  # the one with which the folder was read
        if not name.startswith(("socket:", "/tmp")):
            found.append(name)
    return sorted(found)


def _mappings() -> int:
    """Mappings of shared memory of ours."""
    return Path("/proc/self/maps").read_text().count("memfd:closeranks")


def _open_doors() -> list[str]:
    return [name for name in _descriptors() if "memfd" in name]


def _shared_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssShmem:")[1].split()[0])


def _count_at_rest(mappings: int = 0) -> tuple[list[str], int]:
    """Descriptors and bytes when a forgotten model's thread, which has a moment, has ended."""
    deadline = time.monotonic() + 20.0
    while _mappings() > mappings:
        gc.collect()
        assert time.monotonic() < deadline, f"{_mappings() - mappings} mappings are left"
        time.sleep(0.05)
    return _descriptors(), _shared_bytes()


def _make_and_destroy(rank: int, cycles: int, with_group: bool) -> list[Any]:
    counts = []
    for cycle in range(cycles):
        group = dist.new_group() if with_group else None
        net: Any = wrap(Chain(), process_group=group, gradient_as_bucket_view=cycle % 2 == 0)
        for step in range(2):
            _step(net, rank, step)
        assert net.exchange.startswith("shm"), net.exchange
        del net
        if group is not None:
            dist.destroy_process_group(group)
            del group
        if cycle in (cycles // 3, cycles - 1):
            dist.barrier()
            counts.append(_count_at_rest())
    return counts


def _check_counts(outcomes: list[Any]) -> None:
    for rank, ((descriptors, size_bytes), (descriptors_after, size_after)) in enumerate(outcomes):
        assert descriptors_after == descriptors, f"rank {rank} leaks descriptors"
        assert size_after <= size_bytes + (1 << 20), f"rank {rank} leaks bytes"


@pytest.mark.parametrize("way", ("shm-c", "shm-python"))
def test_wrapped_models_leave_nothing_behind(way: str) -> None:
    need(way)
    _check_counts(run_ranks(2, _make_and_destroy, 30, False, env=WAYS[way]))


def test_groups_leave_nothing_behind() -> None:
    _check_counts(run_ranks(2, _make_and_destroy, 30, True, env=_SHM))


def _nothing_when_it_ends(rank: int) -> None:
    before = _mappings()
    net: Any = wrap(Chain())
    _step(net, rank, 0)
    _step(net, rank, 1)
    assert _mappings() > before
    assert not _open_doors(), "all have mapped it: nobody else is to find it"
    for parameter in net.parameters():
        parameter.grad = None
    dist.barrier()
    del net
    _count_at_rest(before)


def test_the_memory_ends_with_the_model() -> None:
    run_ranks(3, _nothing_when_it_ends, env=_SHM)


def _gradients_outlive_the_model(rank: int) -> None:
    module = Chain()
    net: Any = wrap(module, gradient_as_bucket_view=True)
    for step in range(2):
        net.zero_grad()
        _step(net, rank, step)
    kept = [p.grad.clone() for p in module.parameters()]
    del net
    gc.collect()
    dist.barrier()
    for p, was in zip(module.parameters(), kept, strict=True):
        assert torch.equal(p.grad, was)
        p.grad.add_(1.0)


def test_gradients_in_the_bucket_outlive_the_model() -> None:
    run_ranks(2, _gradients_outlive_the_model, env=_SHM)


# Whose memory it is.


def _change_in_place(rank: int, as_view: bool) -> None:
    """Between two steps every rank does to its gradients what it likes."""
    net: Any = wrap(Chain(), gradient_as_bucket_view=as_view)
    for step in range(4):
        net.zero_grad(set_to_none=step % 2 == 0)
        _step(net, rank, step)
        grads = [p.grad for p in net.parameters()]
        assert_replicas_equal(grads)
        wanted = [grad.clone() for grad in grads]
        if rank == 1:
            for grad in grads:
                grad.mul_(-7.0).add_(3.0)
        dist.barrier()
        if rank != 1:
            for grad, want in zip(grads, wanted, strict=True):
                assert torch.equal(grad, want), "another rank's change is seen here"


@pytest.mark.parametrize("as_view", (False, True))
def test_gradients_are_each_ranks_own(as_view: bool) -> None:
    run_ranks(3, _change_in_place, as_view, env=_SHM)


def _hurry(rank: int, world: int, as_view: bool) -> None:
    """Ranks take turns at being late, so that the others start the next step at once."""

    def step(net: Any, rank: int, number: int) -> None:
        if hasattr(net, "exchange") and number % world == rank:
            time.sleep(0.003)
        _step(net, rank, number)

    train_and_compare(
        Chain, rank, world, step, steps=40, gradient_as_bucket_view=as_view, bucket_cap_mb=0.0001
    )


@pytest.mark.parametrize("way", ("shm-c", "shm-python"))
@pytest.mark.parametrize("as_view", (False, True))
def test_no_rank_overtakes_one_that_still_reads(way: str, as_view: bool) -> None:
    need(way)
    run_ranks(3, _hurry, 3, as_view, env=WAYS[way])


def _views(rank: int) -> None:
    net: Any = wrap(Chain(), gradient_as_bucket_view=True)
    for step in range(3):
        _step(net, rank, step)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line]
    spans = [tuple(int(x, 16) for x in line.split()[0].split("-")) for line in maps]
    for p in net.parameters():
        address = p.grad.data_ptr()
        assert any(lo <= address < hi for lo, hi in spans), "a gradient lies outside of the bucket"


def test_gradients_as_views_lie_in_shared_memory() -> None:
    run_ranks(2, _views, env=_SHM)


# Strangers.


def _two_of_everything(rank: int, world: int) -> None:
    """Models and groups side by side, with steps interleaved in the same order everywhere."""
    groups = [None, dist.new_group(), dist.new_group(list(reversed(range(world))))]
    nets = [wrap(Chain(), process_group=group) for group in groups] + [wrap(Chain())]
    for number in range(3):
        for factor, net in enumerate(nets, start=1):
            net.zero_grad()
            (net(rows(rank, number)).square().mean() * factor).backward()
        first = [p.grad for p in nets[0].parameters()]
        for factor, net in enumerate(nets, start=1):
            grads = [p.grad for p in net.parameters()]
            assert_replicas_equal(grads)
            for grad, one in zip(grads, first, strict=True):
                torch.testing.assert_close(grad, one * factor)


def test_groups_and_models_of_a_process_never_meet() -> None:
    run_ranks(3, _two_of_everything, 3, env=_SHM)


def _halves(rank: int) -> None:
    """Two groups of two ranks each at the same time, on one host."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    exchange = exchange_here(groups[rank // 2])
    resident = exchange.allocate([10_000], torch.float32, torch.device("cpu"))[0]
    for number in range(50):
        resident.fill_(rank + number)
        exchange.all_reduce(resident).wait()
        wanted = (0 + 1 if rank < 2 else 2 + 3) + 2 * number
        assert torch.equal(resident, torch.full((10_000,), float(wanted)))


def test_two_groups_on_one_host_never_meet() -> None:
    run_ranks(4, _halves, env=_SHM)


# Copies.


def _copy_alone(rank: int) -> None:
    """One rank copies and saves; the others know nothing of it."""
    net: Any = wrap(Chain())
    _step(net, rank, 0)
    if rank == 0:
        twin = copy.deepcopy(net)
        loaded = pickle.loads(pickle.dumps(net))
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        for one in (twin, loaded, again):
            assert one.exchange == "chosen at the first exchange"
            with torch.no_grad():
                one.eval()(rows(rank, 0))
        del twin, loaded, again, one
    net.zero_grad()
    train_and_compare(Chain, rank, 2, _step, steps=2, net=net)


def test_one_rank_may_copy_the_model_alone() -> None:
    run_ranks(2, _copy_alone, env=_SHM)


def _copies_exchange_too(rank: int) -> None:
    net: Any = wrap(Chain())
    _step(net, rank, 0)
    net.zero_grad()
    twin = pickle.loads(pickle.dumps(net))
    train_and_compare(Chain, rank, 2, _step, steps=2, net=twin)
    assert twin.exchange == net.exchange and twin.exchange.startswith("shm")
    train_and_compare(Chain, rank, 2, _step, steps=2, net=net)


def test_a_copy_finds_its_way_at_the_first_exchange() -> None:
    run_ranks(2, _copies_exchange_too, env=_SHM)


# Forks.


def _fork(act: Any) -> int:
    """Run act in a child that ends as an ordinary process does, exit handlers included."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            import atexit

            atexit._run_exitfuncs()
            os._exit(code)
    return pid


def _fork_after_wrapping(rank: int) -> None:
    net: Any = wrap(Chain())
    _step(net, rank, 0)
    net.zero_grad()

    def speak_for_the_rank() -> None:
        with pytest.raises(CloseranksError, match="forked from rank"):
            _step(net, rank, 1)

    def forget_it() -> None:
        nonlocal net
        del net
        gc.collect()

    def look_at_it() -> None:
        with torch.no_grad():
            assert net.module(rows(rank, 0)).isfinite().all()

    for act in (speak_for_the_rank, forget_it, look_at_it):
        _, status = os.waitpid(_fork(act), 0)
        assert status == 0, f"{act.__name__} failed in the child"
        dist.barrier()
        assert not net._waiter.attendance.has_left(1 - rank), (
            "the child's end was taken for its rank's"
        )
    train_and_compare(Chain, rank, 2, _step, steps=2, net=net)


def test_a_forked_child_cannot_speak_for_its_rank() -> None:
    run_ranks(2, _fork_after_wrapping, env=_SHM)


def _load_with_workers(rank: int) -> None:
    """A DataLoader forks its workers from a rank that shares memory."""
    net: Any = wrap(Chain())
    data = torch.utils.data.TensorDataset(torch.randn(12, 4))
    for _ in range(2):
        for (batch,) in torch.utils.data.DataLoader(data, 4, num_workers=2):
            net.zero_grad()
            net(batch).sum().backward()
        assert_replicas_equal([p.grad for p in net.parameters()])


def test_workers_of_a_data_loader_do_no_harm() -> None:
    run_ranks(2, _load_with_workers, env=_SHM)


# The end.

_SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from closeranks import DistributedDataParallel as DDP
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[2]), world_size=2)
net = DDP(torch.nn.Linear(200, 200), gradient_as_bucket_view=sys.argv[3] == "view")
for _ in range(3):
    net(torch.ones(2, 200)).sum().backward()
assert net.exchange.startswith("shm"), net.exchange
print("trained", flush=True)
if sys.argv[3] == "wait":
    time.sleep(60)
if sys.argv[3] == "destroy":
    dist.destroy_process_group()
"""


def _start(folder: Path, how: str) -> list[subprocess.Popen[str]]:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | _SHM
    return [
        subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, str(folder / f"store {how}"), str(rank), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]


@pytest.mark.parametrize("how", ("view", "destroy"))
def test_a_script_ends_without_a_word(how: str, tmp_path: Path) -> None:
    for process in _start(tmp_path, how):
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0 and out == "trained\n", err
        assert "closeranks" not in err and "Exception" not in err, err


def test_nothing_is_left_of_ranks_that_were_killed(tmp_path: Path) -> None:
    names = set(os.listdir("/dev/shm"))
    processes = _start(tmp_path, "wait")
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "trained\n"
        for process in processes:
            assert "memfd:closeranks" in Path(f"/proc/{process.pid}/maps").read_text()
            kept = [os.readlink(fd) for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
            assert not [name for name in kept if "memfd" in name], "a door was left open"
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    assert not {name for name in set(os.listdir("/dev/shm")) - names if "closeranks" in name}


def _use_after_destroying(rank: int) -> None:
    """As with torch's class, a wrapped module keeps what it needs of a destroyed group."""
    net: Any = wrap(Chain())
    _step(net, rank, 0)
    dist.destroy_process_group()
    _step(net, rank, 1)


def test_destroying_the_group_ends_no_memory_in_use() -> None:
    outcomes = try_ranks(2, _use_after_destroying, env=_SHM)
    assert not any(outcome.failed for outcome in outcomes), outcomes
