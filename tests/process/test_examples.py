"""The examples, started as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.findings import ROOT


@pytest.mark.parametrize(
    ("script", "announced"),
    [
        ("accelerate_digits.py", "DistributedDataParallel over closeranks"),
        ("fabric_digits.py", "DDPStrategy over closeranks"),
    ],
)
def test_an_example_ends_with_equal_replicas(script: str, announced: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr=127.0.0.1", "--nproc-per-node=2", f"examples/{script}"]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert announced in done.stdout
    assert "of 400)" in done.stdout
    assert done.stdout.endswith("The 2 replicas are equal in every bit.\n")


def test_kill_me_ends_with_equal_digests() -> None:
    command = [sys.executable, "examples/kill_me.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kill -9") == 2
    assert done.stderr.count("was killed by SIGKILL; it is started again") == 2
    digests = re.findall(r"^sha256 of weights and optimizer: (\w+)$", done.stdout, re.MULTILINE)
    assert len(digests) == 2 and digests[0] == digests[1]
    assert done.stdout.endswith("\nEqual in every bit.\n")


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
OURS = ["-m", "closeranks", "run"]
LINE = r"y = (2\.[89]|3\.[01])\d x \+ (1\.[89]|2\.[01])\d, by {} workers?, {}\n"


@pytest.mark.parametrize(
    ("launcher", "workers", "exchange"),
    [
        ([*OURS, "-n", "2"], 2, "shm"),
        ([*TORCHRUN, "--nproc-per-node=2"], 2, "shm"),
        ([], 1, "group"),
    ],
    ids=["ours", "torchrun", "alone"],
)
def test_one_script_runs_under_every_launcher(
    tmp_path: Path, launcher: list[str], workers: int, exchange: str
) -> None:
    log_dir = ["--log-dir", str(tmp_path)] if launcher[:2] == OURS[:2] else []
    command = [sys.executable, *launcher, *log_dir, "examples/anywhere.py"]
    done = _run(command)
    assert done.returncode == 0, done.stderr
    assert re.search(LINE.format(workers, f"{exchange}: .*"), done.stdout), done.stdout
    assert re.search(r"step 200/200 \(100%\), .* samples/s|step 200/200 .* loss 0", done.stderr)


def test_a_plain_script_runs_under_our_launcher(tmp_path: Path) -> None:
    """The digits know torch.distributed and our class, and nothing of our launcher."""
    options = ["-n", "2", "--log-dir", str(tmp_path)]
    command = [sys.executable, *OURS, *options, "examples/digits.py", "--epochs=1"]
    done = _run(command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("rank 0 | The 2 replicas are equal in every bit.\n")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=_env(), capture_output=True, text=True, timeout=150
    )


def _env() -> dict[str, str]:
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    return environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
