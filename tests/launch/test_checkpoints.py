"""Checkpoints under the real launcher: killed whole, resumed by the same command, locked."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.launch.job import launched, run

SCRIPT = """
    import os, sys, time
    import torch
    from torch import nn
    import closeranks as cr
    ranks = cr.Ranks(lanes=4, checkpoint="ckpt", every=4)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    ranks.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(320, 8, generator=generator))
    for step in ranks.steps(data, 16, epochs=2):
        for (x,) in step:
            loss = model(x).square().mean()
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05 if "slowly" in sys.argv else 2.0 if "crawling" in sys.argv else 0.0)
        ranks.print(f"step {step.number} {step.values['loss']:.6f}")
        if "die" in sys.argv and step.number == 21 and not os.path.exists(f"dead-{ranks.rank}"):
            open(f"dead-{ranks.rank}", "w").close()
            time.sleep(0.3)
            os.kill(os.getpid(), 9)
    ranks.print("digest", ranks.digest())
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    done = run(tmp_path_factory.mktemp("undisturbed"), "-n", "1", "train.py", script=SCRIPT)
    assert done.code == 0, done.err
    return done.out


def test_all_workers_die_and_the_job_goes_on(tmp_path: Path, undisturbed: str) -> None:
    done = run(tmp_path, "-n", "2", "train.py", "die", script=SCRIPT)
    assert done.code == 0, done.err
    assert (tmp_path / "dead-0").exists() and (tmp_path / "dead-1").exists()
    assert done.out == undisturbed
    gone = [line for line in done.report if "all workers were gone" in line]
    assert len(gone) == 1 and "from step " in gone[0], done.report


def test_a_killed_launcher_is_resumed_by_the_same_command(tmp_path: Path, undisturbed: str) -> None:
    steps = undisturbed.splitlines()
    with launched(tmp_path, "-n", "3", "train.py", "slowly", script=SCRIPT) as job:
        job.wait_for(job.has_said("step 12 "), "half of the training")
        os.kill(job.process.pid, signal.SIGKILL)
        job.process.wait()
    done = run(tmp_path, "-n", "2", "train.py")
    assert done.code == 0, done.err
    said = done.out.splitlines()
    assert said == steps[-len(said) :] and 2 <= len(said) < len(steps) - 4
    again = run(tmp_path, "-n", "3", "train.py")
    assert again.code == 0 and again.out.splitlines() == steps[-1:], again.err


def test_a_second_job_is_told_who_is_there(tmp_path: Path) -> None:
    with launched(tmp_path, "-n", "1", "train.py", "crawling", script=SCRIPT) as first:
        first.wait_for(first.has_said("step 1 "), "a step")
        other = tmp_path / "other"
        other.mkdir()
        os.symlink(tmp_path / "ckpt", other / "ckpt")
        second = run(other, "-n", "1", "train.py", script=SCRIPT)
        assert second.code == 1
        assert f"the job of launcher {first.process.pid} on host" in second.err, second.err
        first.send(signal.SIGINT)
        first.end()
