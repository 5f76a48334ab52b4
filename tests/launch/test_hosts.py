"""One job on several machines: two launchers that meet. Here both are on one machine."""

import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from tests.launch.job import DEADLINE_S, Running, launched

SCRIPT = """
    import os, sys, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    names = ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"]
    print([int(os.environ[name]) for name in names], int(x), flush=True)
    if sys.argv[1] == "fail" and dist.get_rank() == 2:
        raise ValueError("bad batch")
    if sys.argv[1] != "end":
        dist.all_reduce(x)
        time.sleep(60)
    if dist.get_rank() == 0:
        time.sleep(1)  # a store is asked until the last has left
    dist.destroy_process_group()
"""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def _two(
    folder: Path, how: str, first: tuple[str, ...] = (), second: tuple[str, ...] = ()
) -> Iterator[tuple[Running, Running]]:
    """A launcher with one worker, and one with two."""
    folders = folder / "a", folder / "b"
    for each in folders:
        each.mkdir()
    both = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{_free_port()}")
    options = [
        (*both, "-n", "1", *first, "train.py", how),
        (*both, "-n", "2", *second, "train.py", how),
    ]
    with (
        launched(folders[0], *options[0], script=SCRIPT) as one,
        launched(folders[1], *options[1], script=SCRIPT) as other,
    ):
        yield one, other


def test_ranks_are_counted_through_all_machines(tmp_path: Path) -> None:
    with _two(tmp_path, "end", ("--node-rank=0",), ("--node_rank", "1")) as (one, other):
        first, second = one.end(), other.end()
    assert (first.code, second.code) == (0, 0), (first, second)
    assert first.lines_of(0) == ["[0, 0, 1, 0, 2] 3"]
    assert second.lines_of(1) == ["[1, 0, 2, 1, 2] 3"]
    assert second.lines_of(2) == ["[2, 1, 2, 1, 2] 3"]


def test_machines_without_numbers_are_numbered(tmp_path: Path) -> None:
    with _two(tmp_path, "end") as (one, other):
        first, second = one.end(), other.end()
    assert (first.code, second.code) == (0, 0), (first, second)
    assert (first.out + second.out).count("] 3\n") == 3


def test_a_failure_on_one_machine_is_named_on_all(tmp_path: Path) -> None:
    with _two(tmp_path, "fail", ("--node-rank=0",), ("--node-rank=1",)) as (one, other):
        second, first = other.end(), one.end()
    assert (first.code, second.code) == (1, 1)
    said = (
        f"rank 2 on {socket.gethostname()} failed first: ValueError: bad batch; stopping 1 worker"
    )
    assert first.report == [f"{said} here"]
    assert second.report[-4] == "rank 2 failed first: ValueError: bad batch"


def test_ctrl_c_on_one_machine_ends_all(tmp_path: Path) -> None:
    with _two(tmp_path, "wait", ("--node-rank=0",), ("--node-rank=1",)) as (one, other):
        other.wait_for(lambda: other.text().count("] 3") == 2, "the start")
        other.send(signal.SIGINT)
        second, first = other.end(), one.end()
    assert (first.code, second.code) == (130, 130)
    said = f"interrupted on {socket.gethostname()}; stopping 1 worker here"
    assert first.report == [said]


def test_a_launcher_that_vanishes_ends_all(tmp_path: Path) -> None:
    with _two(tmp_path, "wait", ("--node-rank=0",), ("--node-rank=1",)) as (one, other):
        other.wait_for(lambda: other.text().count("] 3") == 2, "the start")
        one.send(signal.SIGKILL)
        one.process.wait()
        second = other.end()
        deadline = time.monotonic() + DEADLINE_S
        while one.left():
            assert time.monotonic() < deadline, one.left()
            time.sleep(0.05)
    assert second.code == 1
    assert any("the launcher of machine 0 has gone" in line for line in second.report), second.err


def test_machines_that_disagree_start_nothing(tmp_path: Path) -> None:
    with _two(
        tmp_path, "end", ("--rdzv-id=a", "--node-rank=0"), ("--rdzv-id=b", "--node-rank=1")
    ) as (one, other):
        second = other.end()
        one.send(signal.SIGINT)
        first = one.end()
    assert (first.code, second.code) == (130, 2)
    assert first.out == second.out == ""
    assert "--rdzv-id b there, a here: two jobs, one endpoint. Nothing was started" in second.err


def test_a_first_machine_that_cannot_listen_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        options = ["--nnodes=2", "--node-rank=0", "--rdzv-endpoint", endpoint, "train.py", "end"]
        with launched(tmp_path, *options, script=SCRIPT) as running:
            done = running.end()
    assert done.code == 2 and len(done.report) == 1
    assert f"cannot listen at {endpoint}: Address already in use" in done.report[0]


def test_who_knocks_without_being_asked_does_no_harm(tmp_path: Path) -> None:
    with _two(tmp_path, "end", ("--node-rank=0",), ("--node-rank=1",)) as (one, other):
        arguments = list(one.process.args)  # type: ignore[arg-type]
        host, port = arguments[arguments.index("--rdzv-endpoint") + 1].split(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port))) as rogue:
            rogue.sendall(b'["not what is wanted"]\n\xff\xff\n')
        first, second = one.end(), other.end()
    assert (first.code, second.code) == (0, 0), (first, second)
