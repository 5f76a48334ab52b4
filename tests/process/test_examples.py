"""The examples end as they promise: over another library, and with workers that are killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys

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
