"""A job that made a Ranks under the real launcher: whoever dies or stops, the job goes on."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

from tests.launch.job import Done, launched, run, run_dir

TRAIN = """
    import os, signal, sys, time
    import torch
    from torch import nn
    import closeranks as cr

    ranks = cr.Ranks(lanes=6)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    ranks.prepare(model, optimizer)
    data = torch.utils.data.TensorDataset(torch.arange(12.0 * 3 * 60).view(-1, 3) / 1000)
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for step in ranks.steps(data, 12):
        for (x,) in step:
            if len(sys.argv) > 1:
                exec(sys.argv[1])
            model(x).square().mean().backward()
            step.log(loss=1.0)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        if step.number % 20 == 0:
            ranks.print("step", step.number)
    ranks.print("digest", ranks.digest())
"""

DIE = "if ranks.rank == 1 and life == 0 and step.number == 10: os.kill(os.getpid(), 9)"
STOP = "if ranks.rank == 1 and step.number == 10: os.kill(os.getpid(), signal.SIGSTOP)"
ALL_DIE = "if life == 0 and step.number == 10: os.kill(os.getpid(), 9)"
NEVER_UP = TRAIN.replace(
    "    model = nn", "    if ranks.rank == 1: os.kill(os.getpid(), 9)\n    model = nn", 1
)
RAISE = "if step.number == 10: raise ValueError('bad sample')"


def digest_of(done: Done) -> str:
    assert done.code == 0, done.err
    assert done.out.splitlines()[:3] == ["step 0", "step 20", "step 40"]
    (digest,) = re.findall(r"^digest (\w+)$", done.out, re.MULTILINE)
    return str(digest)


def test_a_worker_that_dies_is_started_again_and_changes_nothing(tmp_path: Path) -> None:
    alone = digest_of(run(tmp_path, "-n", "1", "train.py", script=TRAIN))
    for fault in (DIE, ALL_DIE):
        done = run(tmp_path, "-n", "3", "train.py", fault, script=TRAIN)
        assert digest_of(done) == alone
        killed = "rank 1 was killed by SIGKILL; it is started again (1 of 3)"
        assert any(line.startswith(killed) for line in done.report), done.err
        gone = [line for line in done.report if "warning: all workers were gone" in line]
        assert len(gone) == (fault == ALL_DIE), done.err
    assert digest_of(run(tmp_path, "-n", "2", "--no-fork", "train.py", DIE, script=TRAIN)) == alone


def test_a_worker_that_is_back_says_so(tmp_path: Path) -> None:
    slow = TRAIN.replace("time.sleep(0.02)", "time.sleep(0.1)")
    done = run(tmp_path, "-n", "2", "train.py", DIE, script=slow)
    assert any(re.match(r"rank 1 is back after \d+\.\d s, at step \d+", t) for t in done.report)


def test_a_stopped_worker_is_killed_at_the_end(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "2", "train.py", STOP, script=TRAIN)
    assert digest_of(done)


def test_a_worker_that_never_finishes_a_step_is_given_up(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "2", "--max-restarts", "2", "train.py", script=NEVER_UP)
    assert digest_of(done)
    assert [line for line in done.report if line.startswith("rank 1 was killed")] == [
        "rank 1 was killed by SIGKILL; it is started again (1 of 2)",
        "rank 1 was killed by SIGKILL; it is started again (2 of 2)",
        "rank 1 was killed by SIGKILL; it was started again 2 times and finished no step, "
        "so it is given up",
    ]


def test_an_exception_in_a_lane_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "3", "train.py", RAISE, script=TRAIN)
    assert done.code == 1
    assert sum("ValueError: bad sample" in line for line in done.report) >= 1, done.err
    assert any("Nobody else can do it" in line for line in done.report), done.err
    assert done.report[-1].startswith("Logs: runs/train-")
    logs = "".join(path.read_text() for path in run_dir(tmp_path).glob("rank-*.log"))
    assert "Traceback (most recent call last)" in logs


def test_a_signal_ends_the_job_while_a_worker_is_started_again(tmp_path: Path) -> None:
    """Again and again in all moments of a restart; launched() looks for what is left."""
    dying = "if ranks.rank == 1: os.kill(os.getpid(), 9)"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        (folder := tmp_path / str(number)).mkdir()
        options = ("-n", "2", "--max-restarts", "1000", "train.py", dying)
        with launched(folder, *options, script=TRAIN) as running:
            running.wait_for(running.has_said("(2 of 1000)"), "the second restart")
            running.send(number)
            running.process.wait(20.0)
            deadline = time.monotonic() + 5.0  # The kernel ends them after the launcher.
            while running.left():
                assert time.monotonic() < deadline, f"left behind: {running.left()}"
                time.sleep(0.02)


def test_a_worker_that_is_killed_from_outside(tmp_path: Path) -> None:
    slow = TRAIN.replace("time.sleep(0.02)", "time.sleep(0.05)")
    with launched(tmp_path, "-n", "2", "train.py", script=slow) as running:
        running.wait_for(running.has_said("step 20"), "the twentieth step")
        (found,) = Path(tmp_path / "runs").iterdir()
        pids = re.findall(r'"\d+": (\d+)', (found / "workers.json").read_text())
        os.kill(int(pids[0]), signal.SIGKILL)
        assert digest_of(running.end())
