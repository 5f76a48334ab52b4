"""closeranks.world.init() in real processes: every way to be started, and every way to go wrong."""

import contextlib
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from closeranks import RankAbsent
from closeranks.world import World, init
from tests.ranks import Outcome, run_ranks, try_ranks

# The harness points gloo at the loopback interface; an empty variable counts as unset.
BARE = {"GLOO_SOCKET_IFNAME": "", "MASTER_ADDR": ""}
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _free_port() -> int:
    """Not from the range that the kernel gives to whoever asks for any port, meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _sum_of_ranks() -> float:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


def _listening() -> set[str]:
    connections = psutil.Process().net_connections(kind="tcp")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


def _init_with(rank: int, *environs: dict[str, str]) -> tuple[World, float, set[str]]:
    """Take this rank's environment, init, and say what came of it."""
    os.environ.update(environs[rank])
    world = init(timeout=20)
    return world, _sum_of_ranks(), _listening()


def _places(results: list[tuple[World, float, set[str]]]) -> list[tuple[int, int, int, int]]:
    for world, total, _ in results:
        assert total == sum(range(world.size))
        assert world.host and world.epoch == 0
    return [(w.rank, w.size, w.local_rank, w.local_size) for w, _, _ in results]


# --- a world of one ----------------------------------------------------------------------------


def _alone(rank: int) -> tuple[World, dict[str, str], set[str], str]:
    world = init()
    dist.barrier()
    environ = {name: os.environ[name] for name in (*NAMES, "GLOO_SOCKET_IFNAME")}
    return world, environ, _listening(), str(dist.get_backend())


def test_without_a_launcher_it_is_a_world_of_one_that_only_loopback_can_reach() -> None:
    world, environ, listening, backend = run_ranks(1, _alone, init_group=False, env=BARE)[0]
    assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
    assert backend == "gloo"
    assert environ.pop("GLOO_SOCKET_IFNAME") in ("lo", "lo0")
    assert int(environ.pop("MASTER_PORT")) > 0
    assert list(environ.values()) == ["0", "1", "0", "1", "127.0.0.1"]
    assert listening == {"127.0.0.1"}


def _alone_again_and_again(rank: int) -> list[World]:
    worlds = []
    for _ in range(3):
        worlds.append(init())
        dist.barrier()
        dist.destroy_process_group()
    dist.init_process_group("gloo")  # torch's own way, on what init() left in the environment
    dist.barrier()
    return worlds


def test_a_destroyed_group_can_be_made_again() -> None:
    worlds = run_ranks(1, _alone_again_and_again, init_group=False, env=BARE)[0]
    assert len(worlds) == 3 and len(set(worlds)) == 1


def _meet_twice(rank: int, *environs: dict[str, str]) -> list[float]:
    os.environ.update(environs[rank])
    sums = []
    for _ in range(3):
        init(timeout=20)
        sums.append(_sum_of_ranks())
        dist.destroy_process_group()
        time.sleep(0.2 * (1 - rank))  # rank 1 comes back while rank 0 is still away
    return sums


def test_ranks_can_meet_again_at_the_same_place() -> None:
    environs = _plain([0, 1], size=2)
    assert run_ranks(2, _meet_twice, *environs, init_group=False, env=BARE) == 2 * [[1.0] * 3]


def _second_meeting_without_rank_1(rank: int, *environs: dict[str, str]) -> str:
    os.environ.update(environs[rank])
    init(timeout=20)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 1:
        return ""
    with pytest.raises(RankAbsent) as caught:
        init(timeout=0.5)
    return str(caught.value)


def test_a_meeting_does_not_take_the_last_ones_guests_for_its_own() -> None:
    environs = _plain([0, 1], size=2)
    run = run_ranks(2, _second_meeting_without_rank_1, *environs, init_group=False, env=BARE)
    assert "1 absent: rank 1." in run[0]


def _alone_on_a_taken_port(rank: int) -> bool:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        os.environ["MASTER_PORT"] = str(other.getsockname()[1])
        init()
        return int(os.environ["MASTER_PORT"]) != other.getsockname()[1]


def test_a_world_of_one_does_not_mind_a_taken_port() -> None:
    assert run_ranks(1, _alone_on_a_taken_port, init_group=False, env=BARE) == [True]


# --- every launcher ----------------------------------------------------------------------------


def test_ranks_of_a_plain_environment_meet_on_loopback_alone() -> None:
    environs = [
        {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        for port in [str(_free_port())]
        for rank in range(3)
    ]
    results = run_ranks(3, _init_with, *environs, init_group=False, env=BARE)
    assert _places(results) == [(0, 3, 0, 3), (1, 3, 1, 3), (2, 3, 2, 3)]
    assert all(listening == {"127.0.0.1"} for _, _, listening in results)


def test_local_ranks_are_counted_by_host_where_nobody_told() -> None:
    environs = [
        {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        | {"CLOSERANKS_HOST": host}
        for port in [str(_free_port())]
        for rank, host in enumerate(["a", "b", "a"])
    ]
    results = run_ranks(3, _init_with, *environs, init_group=False)
    assert _places(results) == [(0, 3, 0, 2), (1, 3, 0, 1), (2, 3, 1, 2)]
    assert [world.host for world, _, _ in results] == ["a", "b", "a"]


def _slurm(rank: int, size: int, nodelist: str, tasks_per_node: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": str(time.monotonic_ns() % 16),
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(size),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NODELIST": nodelist,
        "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
        "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1",
    }


def test_an_srun_step_on_one_node() -> None:
    step = _slurm(0, 3, "node07", "3") | {"SLURM_NODEID": "0"}
    environs = [step | {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)} for r in range(3)]
    results = run_ranks(3, _init_with, *environs, init_group=False, env=BARE)
    assert _places(results) == [(0, 3, 0, 3), (1, 3, 1, 3), (2, 3, 2, 3)]
    assert all(listening == {"127.0.0.1"} for _, _, listening in results)


def test_an_srun_step_on_two_nodes_whose_user_set_the_address() -> None:
    step = _slurm(0, 3, "node[07-08]", "2,1") | {"MASTER_ADDR": "127.0.0.1"}
    environs = [
        step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": local, "SLURM_NODEID": node}
        for rank, (local, node) in enumerate([("0", "0"), ("1", "0"), ("0", "1")])
    ]
    results = run_ranks(3, _init_with, *environs, init_group=False)
    assert _places(results) == [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1)]


def test_an_mpirun_job() -> None:
    environs = [
        {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "PMIX_NAMESPACE": f"job-{os.getpid()}-{time.monotonic_ns()}",
        }
        for rank in range(2)
    ]
    environs[1]["PMIX_NAMESPACE"] = environs[0]["PMIX_NAMESPACE"]
    results = run_ranks(2, _init_with, *environs, init_group=False, env=BARE)
    assert _places(results) == [(0, 2, 0, 2), (1, 2, 1, 2)]


SCRIPT = """
import atexit, sys
import torch.distributed as dist
atexit.register(lambda: sys.stdout.write(f"left {dist.is_initialized()}\\n"))  # runs last
from closeranks.world import init
world = init()
dist.barrier()
sys.stdout.write(f"rank {world.rank} {world.size} {world.local_rank} {world.local_size}\\n")
"""


def test_under_torchrun_and_gone_at_exit(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environ = {k: v for k, v in os.environ.items() if k not in NAMES} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(tmp_path / "train.py")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "failed to bind" not in done.stderr, done.stderr
    assert sorted(done.stdout.split("\n")) == [
        "",
        *2 * ["left False"],
        "rank 0 2 0 2",
        "rank 1 2 1 2",
    ]


# --- a group that is there already -------------------------------------------------------------


def _adopt(rank: int, host: str) -> tuple[World, list[str], list[str]]:
    os.environ["CLOSERANKS_HOST"] = host if rank else "another"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = init()
        assert init("gloo") == first  # as often as one likes, and the variables are believed now
        init("nccl")
    _sum_of_ranks()
    return first, [os.environ[name] for name in NAMES[:4]], [str(w.message) for w in caught]


def test_a_group_that_is_there_is_used() -> None:
    results = run_ranks(3, _adopt, "here")
    worlds = [world for world, _, _ in results]
    assert [(w.rank, w.size, w.local_rank, w.local_size, w.host) for w in worlds] == [
        (0, 3, 0, 1, "another"),
        (1, 3, 0, 2, "here"),
        (2, 3, 1, 2, "here"),
    ]
    assert results[2][1] == ["2", "3", "1", "2"]
    for _, _, messages in results:
        assert len(messages) == 1 and "'nccl'" in messages[0] and "'gloo'" in messages[0]


# --- what goes wrong ---------------------------------------------------------------------------


def _wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def _meet(rank: int, environs: list[dict[str, str]], timeout_s: float, folder: Path) -> World:
    import closeranks.world.group  # noqa: F401 - not while others wait

    (folder / str(rank)).touch()
    for other in range(len(environs)):  # all start to wait at once, however busy the machine is
        _wait_for(folder / str(other))
    os.environ.update(environs[rank])
    return init(timeout=timeout_s)


def _try_to_meet(environs: list[dict[str, str]], timeout_s: float, folder: Path) -> list[Outcome]:
    n = len(environs)
    return try_ranks(n, _meet, environs, timeout_s, folder, init_group=False, env=BARE)


def _plain(ranks: list[int], size: int) -> list[dict[str, str]]:
    meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    return [
        meeting | {"RANK": str(rank), "MASTER_PORT": port}
        for port in [str(_free_port())]
        for rank in ranks
    ]


def test_contradictory_variables_end_before_anything_is_started(tmp_path: Path) -> None:
    outcome = _try_to_meet([_slurm(1, 3, "n[1-2]", "2,1") | {"WORLD_SIZE": "2"}], 20, tmp_path)[0]
    assert outcome.error_type is not None and outcome.error_type.startswith("ValueError,")
    assert "WORLD_SIZE=2 and SLURM_NTASKS=3 contradict" in str(outcome.error)
    assert outcome.seconds < 5


def test_ranks_that_do_not_come_are_named_by_all_that_did(tmp_path: Path) -> None:
    for outcome in _try_to_meet(_plain([0, 2], size=4), 1.0, tmp_path):
        assert outcome.error_type is not None and outcome.error_type.startswith("RankAbsent,")
        assert "of 4 waits" in str(outcome.error)
        assert "2 absent: rank 1, 3." in str(outcome.error)


def test_a_rank_0_that_does_not_come_is_named_with_where_it_should_be(tmp_path: Path) -> None:
    environ = _plain([1], size=2)[0]
    outcome = _try_to_meet([environ], 0.5, tmp_path)[0]
    assert outcome.error_type is not None and outcome.error_type.startswith("RankAbsent,")
    assert f"MASTER_ADDR=127.0.0.1, MASTER_PORT={environ['MASTER_PORT']}" in str(outcome.error)
    assert outcome.seconds < 5


def test_two_processes_with_one_rank_are_told_so_at_once_and_everywhere(tmp_path: Path) -> None:
    outcomes = _try_to_meet(_plain([0, 1, 1], size=3), 20.0, tmp_path)
    for outcome in outcomes:
        assert outcome.error_type is not None and outcome.error_type.startswith("ValueError,")
        assert "two processes say that they are rank 1 of 3" in str(outcome.error)
        assert outcome.seconds < 10


def test_two_processes_with_rank_0_cannot_both_serve(tmp_path: Path) -> None:
    outcomes = _try_to_meet(_plain([0, 0], size=2), 1.0, tmp_path)
    errors = sorted(str(o.error_type).split(",")[0] for o in outcomes)
    assert errors == ["ExchangeFailed", "RankAbsent"]
    told = next(str(o.error) for o in outcomes if str(o.error_type).startswith("ExchangeFailed"))
    assert "only one process has RANK=0" in told and "MASTER_PORT=" in told


def _late(rank: int, environs: list[dict[str, str]], folder: Path) -> list[str]:
    """Rank 2 comes when rank 0 has warned about it, and rank 1 when rank 2 has warned as well."""
    from closeranks.world import meeting

    meeting._WARN_AFTER_S = 0.1
    messages: list[str] = []
    handler = logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        messages.append(record.getMessage())
        (folder / f"{rank} warned").touch()

    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("closeranks").addHandler(handler)
    if rank > 0:
        _wait_for(folder / ("2 warned" if rank == 1 else "0 warned"))
    os.environ.update(environs[rank])
    init(timeout=50)
    dist.barrier()  # rank 0 serves the store: it must not leave before the others have their group
    return messages


def test_a_late_rank_is_warned_about_once_and_waited_for(tmp_path: Path) -> None:
    environs = _plain([0, 1, 2], size=3)
    messages = run_ranks(3, _late, environs, tmp_path, init_group=False, env=BARE)
    assert len(messages[0]) == 1 and "rank 0 of 3 waits" in messages[0][0]
    assert "for 2 absent: rank 1, 2;" in messages[0][0]
    assert messages[1] == []
    assert len(messages[2]) == 1 and "for 1 absent: rank 1;" in messages[2][0]


def _bad_timeout(rank: int, timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout="):
        init(timeout=timeout_s)


def test_a_timeout_of_nothing_is_refused() -> None:
    run_ranks(1, _bad_timeout, 0.0, init_group=False)


def test_waiting_for_rank_0_can_be_interrupted() -> None:
    script = "import sys, closeranks.world.group, closeranks.world as w\n"
    script += "sys.stdout.write('ready\\n'); sys.stdout.flush(); w.init()"
    environ = os.environ | _plain([1], size=2)[0]
    child = subprocess.Popen(
        [sys.executable, "-c", script], env=environ, stdout=-1, stderr=-1, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=20)
        assert "KeyboardInterrupt" in errors
    finally:
        child.kill()
        child.wait()
