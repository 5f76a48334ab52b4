"""A rank does not come: it is named with what it does, and so is what the others wait in."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.launch.job import Done, launched, run

TRAIN = """
    import os, signal, sys, threading, time
    import torch, torch.distributed as dist

    def slow_loader():
        time.sleep(1000)

    def hang(how):
        if how == "sleep":
            slow_loader()
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        if how == "busy":
            sum(range(10**12))

    def train(how, kind):
        if kind == "closeranks":
            import closeranks
            closeranks.init(timeout=120)
            wrap = closeranks.DistributedDataParallel
        else:
            dist.init_process_group("gloo")
            wrap = torch.nn.parallel.DistributedDataParallel
        model = wrap(torch.nn.Linear(8, 4)) if kind != "plain" else None
        for step in range(10):
            if dist.get_rank() == 1 and step == 3:
                hang(how)
            if model is None:
                dist.all_reduce(torch.ones(1000))
            else:
                model(torch.ones(2, 8)).sum().backward()
        if how == "stop":
            time.sleep(1.5)  # Long enough to be seen to go on.

    train(*sys.argv[1:])
"""
SHORT = ["--hang-report", "1.5", "--hang-timeout", "3"]


def _hang(tmp_path: Path, how: str, kind: str) -> Done:
    done = run(tmp_path, "-n", "3", *SHORT, "train.py", how, kind, script=TRAIN)
    assert done.code == 124, done
    assert done.report[1].startswith("rank 1 did not come: ranks 0 and 2 wait since "), done.err
    assert done.report[-1] == "ended, because it hung for 3 s"
    assert len(done.report) <= 15 and "Traceback" not in done.err
    return done


def test_a_slow_loader_is_named_with_its_line(tmp_path: Path) -> None:
    report = "\n".join(_hang(tmp_path, "sleep", "closeranks").report)
    assert re.search(r"rank 1 \(pid \d+\) is at\n", report)
    assert "in slow_loader: time.sleep(1000)" in report
    assert "its last span: 'after backward', since " in report
    assert "ranks 0 and 2 in exchange 4, bucket 0 (bias, weight; 144 bytes)" in report
    assert "model(torch.ones(2, 8)).sum().backward()" in report


def test_a_deadlock_is_named_with_its_line(tmp_path: Path) -> None:
    assert "in hang: lock.acquire()" in _hang(tmp_path, "lock", "closeranks").err


def test_a_rank_that_holds_pythons_lock_is_named_all_the_same(tmp_path: Path) -> None:
    report = "\n".join(_hang(tmp_path, "busy", "closeranks").report)
    assert "does not answer (something holds Python's lock), at" in report
    assert "in hang: sum(range(10**12))" in report


def test_in_a_plain_script_the_collective_is_named(tmp_path: Path) -> None:
    report = "\n".join(_hang(tmp_path, "sleep", "plain").report)
    assert "in slow_loader: time.sleep(1000)" in report
    call = "all_reduce of 1000 x float32, the default group (3 ranks)"
    assert f"ranks 0 and 2 in {call}" in report
    assert "in train: dist.all_reduce(torch.ones(1000))" in report


def test_under_torchs_own_class_the_count_of_collectives_tells(tmp_path: Path) -> None:
    report = "\n".join(_hang(tmp_path, "sleep", "torch").report)
    assert "in slow_loader: time.sleep(1000)" in report
    assert re.search(r"ranks 0 and 2 in collective \d+ of the default group \(3 ranks\)", report)


def test_a_stopped_rank_is_woken_for_its_stack_and_stopped_again(tmp_path: Path) -> None:
    arguments = ["-n", "3", "--hang-report", "1.5", "train.py", "stop", "closeranks"]
    with launched(tmp_path, *arguments, script=TRAIN) as running:
        running.wait_for(running.has_said("The job goes on"), "the report")
        match = re.search(r"rank 1 \(pid (\d+)\) is stopped", running.text())
        assert match, running.text()
        pid = int(match[1])
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state == "T"
        assert "in hang: os.kill(os.getpid(), signal.SIGSTOP)" in running.text()
        os.kill(pid, signal.SIGCONT)
        done = running.end()
    assert done.code == 0, done
    assert done.report[-1] == "rank 1 came; the job goes on"
    assert sum("did not come" in line for line in done.report) == 1


def test_ranks_that_never_meet_are_reported(tmp_path: Path) -> None:
    script = """
        import os, time, closeranks
        if os.environ["RANK"] == "1":
            time.sleep(1000)
        closeranks.init()
    """
    done = run(tmp_path, "-n", "2", *SHORT, "train.py", script=script)
    assert done.code == 124
    report = "\n".join(done.report)
    assert "rank 1 did not come: rank 0 waits since" in report
    assert "rank 0 in closeranks.init()" in report and "time.sleep(1000)" in report


def test_a_rank_that_is_done_is_named_as_the_one_that_will_not_come(tmp_path: Path) -> None:
    """Gloo tells at once that a rank has gone, with the blame on whoever noticed."""
    script = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        for step in range(3 if dist.get_rank() == 1 else 4):
            dist.all_reduce(torch.ones(10))
    """
    done = run(tmp_path, "-n", "2", "train.py", script=script)
    assert done.code == 1
    assert "Before it, rank 1 had ended with exit code 0" in done.report[-2], done.err


@pytest.mark.parametrize("script", ["import time; time.sleep(3)", "sum(range(10**8))"])
def test_ranks_that_wait_for_nobody_are_left_alone(tmp_path: Path, script: str) -> None:
    done = run(tmp_path, "-n", "2", *SHORT, "train.py", script=script)
    assert (done.code, done.err) == (0, "")
