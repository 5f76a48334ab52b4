"""A job that is ended from outside: nothing is left, whoever ends it and however."""

import os
import signal
import time
from pathlib import Path

import pytest

from closeranks.launch import worker
from tests.launch.job import DEADLINE_S, Running, launched

# Each rank has a child in its own process group and one that has left it.
FAMILY = """
    import subprocess, sys, time
    for apart in (False, True):
        subprocess.Popen(["sleep", "300"], start_new_session=apart)
    print("up", flush=True)
    time.sleep(300)
"""
STUBBORN = """
    import signal, time
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    print("up", flush=True)
    while True:
        time.sleep(300)
"""


def _all_up(running: Running, ranks: int) -> None:
    running.wait_for(lambda: running.text().count("up") == ranks, "the start of all ranks")


def _wait_until_nothing_is_left(running: Running) -> float:
    started = time.monotonic()
    while running.left():
        assert time.monotonic() < started + DEADLINE_S, running.left()
        time.sleep(0.01)
    return time.monotonic() - started


@pytest.mark.parametrize("way", [[], ["--no-fork"]], ids=["forked", "anew"])
def test_ctrl_c_leaves_one_line_and_nothing_else(tmp_path: Path, way: list[str]) -> None:
    with launched(tmp_path, *way, "-n", "2", "train.py", script=FAMILY) as running:
        _all_up(running, 2)
        running.send(signal.SIGINT)
        done = running.end()
    assert done.code == 130
    assert done.report == ["interrupted: stopping 2 workers; Ctrl-C again kills at once"]
    assert "Traceback" not in done.err


def test_who_ignores_ctrl_c_is_killed(tmp_path: Path) -> None:
    with launched(tmp_path, "-n", "2", "train.py", script=STUBBORN) as running:
        _all_up(running, 2)
        running.send(signal.SIGINT)
        assert running.end().code == 130


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    """After a SIGTERM with a long grace, which only an interrupt can cut short here."""
    with launched(tmp_path, "-n", "2", "--grace", "300", "train.py", script=STUBBORN) as running:
        _all_up(running, 2)
        running.send(signal.SIGTERM)
        running.wait_for(running.has_said("passed on to 2 workers"), "the notice")
        running.send(signal.SIGINT)
        assert running.end().code == 143


def test_sigterm_is_passed_on_and_leaves_time(tmp_path: Path) -> None:
    script = """
        import signal, sys, time
        def save(number, frame):
            time.sleep(0.5)
            print("saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("up", flush=True)
        time.sleep(300)
    """
    with launched(tmp_path, "-n", "2", "train.py", script=script) as running:
        _all_up(running, 2)
        running.send(signal.SIGTERM)
        done = running.end()
    assert done.code == 143
    assert done.lines_of(0) == done.lines_of(1) == ["up", "saved"]
    assert done.report == ["SIGTERM: passed on to 2 workers; killed in 20 s if need be"]


def test_who_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    with launched(tmp_path, "-n", "1", "--grace", "0.5", "train.py", script=STUBBORN) as running:
        _all_up(running, 1)
        running.send(signal.SIGTERM)
        assert running.end().code == 143


@pytest.mark.parametrize("way", [[], ["--no-fork"]], ids=["forked", "anew"])
def test_a_launcher_killed_takes_everything_with_it(tmp_path: Path, way: list[str]) -> None:
    script = """
        import subprocess, time
        subprocess.Popen(["sleep", "300"])
        print("up", flush=True)
        time.sleep(300)
    """
    with launched(tmp_path, *way, "-n", "2", "train.py", script=script) as running:
        _all_up(running, 2)
        assert len(running.left()) >= 5  # two ranks, two children, the guard
        running.send(signal.SIGKILL)
        running.process.wait()
        _wait_until_nothing_is_left(running)


def test_a_launcher_interrupted_while_workers_start_leaves_nothing(tmp_path: Path) -> None:
    with launched(tmp_path, "-n", "2", "train.py", script=FAMILY) as running:
        running.wait_for(lambda: len(running.left()) >= 2, "the guard and the server")
        running.send(signal.SIGINT)
        assert running.end().code == 130


def test_a_dead_workers_children_die_with_it(tmp_path: Path) -> None:
    script = """
        import os, subprocess, time
        if os.environ["RANK"] == "0":
            subprocess.Popen(["sleep", "300"])
            print("gone", flush=True)
        else:
            time.sleep(300)
    """
    with launched(tmp_path, "-n", "2", "train.py", script=script) as running:
        running.wait_for(running.has_said("gone"), "the end of rank 0")
        running.wait_for(
            lambda: not any("sleep" in line for line in running.left()), "the end of its child"
        )
        assert running.process.poll() is None
        running.send(signal.SIGINT)
        assert running.end().code == 130


def test_a_worker_whose_launcher_is_dead_waits_for_nobody() -> None:
    """Whoever takes its place as the parent, and were it the first process of all."""
    began = time.monotonic()
    worker.wait_for_end_of(os.getppid() + 1)
    assert time.monotonic() - began < 10.0


def test_a_dead_fork_server_is_reported(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import os; os._exit(1)")
    with launched(tmp_path, "-n", "2", "train.py", script="print(1)") as running:
        done = running.end()
    assert done.code == 1 and done.out == ""
    assert "--no-fork" in done.report[-1]


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = {"TMPDIR": str(temporary)}
    with launched(tmp_path, "-n", "2", "train.py", script="print(1)", env=env) as running:
        assert running.end().code == 0
    assert os.listdir(temporary) == []
