"""One command per host: two launchers in two network namespaces, and the job that they run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.hosts.network import Network
from tests.hosts.places import hosts
from tests.launch.job import Running, launched

_SCRIPT = """
    import os, sys, time
    import torch, closeranks
    world = closeranks.init(timeout=60)
    torch.manual_seed(1)
    net = closeranks.DistributedDataParallel(torch.nn.Linear(300, 300))
    steps = 5 if sys.argv[1] == "end" else 1_000_000
    for step in range(steps):
        net(torch.full((2, 300), float(world.rank))).sum().backward()
        if step == 3:
            told = [world.local_rank, world.local_size, os.environ["GLOO_SOCKET_IFNAME"]]
            print(*told, net.exchange, os.getpid(), flush=True)
        if step == 4 and sys.argv[1] == "fail" and world.rank == 3:
            raise ValueError("bad batch")
"""
EXCHANGE = "hosts: 2 x 2 ranks, shm inside, gloo between, float32"


@contextlib.contextmanager
def on_both(network: Network, folder: Path, how: str) -> Iterator[list[Running]]:
    endpoint = f"{network.address(0)}:29400"
    with contextlib.ExitStack() as stack:
        running = []
        for host in range(2):
            (folder / f"host{host}").mkdir()
            options = ("--nnodes", "2", "--node-rank", str(host), "--rdzv-endpoint", endpoint)
            one = launched(
                folder / f"host{host}",
                *options,
                *("-n", "2", "train.py", how),
                script=_SCRIPT,
                env={"TORCH_CPP_LOG_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": ""},
                before=("ip", "netns", "exec", network.names[host]),
            )
            running.append(stack.enter_context(one))
        yield running


def test_a_job_on_two_hosts_runs_to_its_end(tmp_path: Path) -> None:
    with hosts(2) as network, on_both(network, tmp_path, "end") as running:
        ended = [one.end() for one in running]
    for host, done in enumerate(ended):
        assert done.code == 0, done
        for local in range(2):
            (line,) = done.lines_of(2 * host + local)
            assert line.startswith(f"{local} 2 eth0 {EXCHANGE} "), line


def test_a_failure_on_one_host_ends_the_other(tmp_path: Path) -> None:
    with hosts(2) as network, on_both(network, tmp_path, "fail") as running:
        ended = [one.end() for one in running]
    for done in ended:
        assert done.code != 0
        assert "bad batch" in done.err and "rank 3" in done.err, done.err
