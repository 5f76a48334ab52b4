"""The harness itself: what it selects, what it tolerates, and how it ends what does not end."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.conformance import baseline, notes, runner
from tests.conformance.promised import PROMISES, PromisedDifferences, judge
from tests.conformance.result import FAIL, PASS, PROMISED, SKIP, Message, Result
from tests.conformance.settings import Settings
from tests.conformance.suites import concerning_ddp

OURS = Settings(ddp="some:Class")
PROMISED_TEST = "DistributedTest.test_ddp_control_flow_same_across_ranks"
ONE_TEST = "DistributedTest.test_DistributedDataParallelCPU"

pytestmark = pytest.mark.timeout(180)


def test_baselines_are_sorted_and_hold_all_promises() -> None:
    native, forced = baseline.read(force_cpu=False), baseline.read(force_cpu=True)
    assert native == sorted(set(native)) and forced == sorted(set(forced))
    assert set(native) <= set(forced) and set(PROMISES) <= set(forced)
    assert (len(native), len(forced)) == (18, 87)


def test_a_test_is_lost_unless_it_passes_or_differs_by_promise() -> None:
    first, second, third, *rest = baseline.read(force_cpu=False)
    results = [Result(first, SKIP), Result(second, PROMISED), Result(third, FAIL)]
    results += [Result(test, PASS) for test in rest]
    assert baseline.lost(results, OURS) == [first, third]
    assert baseline.lost(results, replace(OURS, only=(second, third))) == [third]
    assert baseline.lost(results, replace(OURS, world_size=3)) == [third]
    assert baseline.lost([], replace(OURS, filter=re.escape(first) + "$")) == [first]


def test_what_reaches_ddp_is_found_through_helpers() -> None:
    source = "\n".join(
        (
            "def helper(): return nn.parallel.DistributedDataParallel(m)",
            "class DistributedTest:",
            "  def test_direct(self): DDP(m)",
            "  def test_by_helper(self): self.between()",
            "  def between(self): helper()",
            "  def test_other(self): DistributedTest.test_direct",
        )
    )
    tests = ["test_direct", "test_by_helper", "test_other", "test_direct_parameter_3"]
    assert concerning_ddp(source, tests) == [tests[0], tests[1], tests[3]]


def test_settings_and_messages_survive_their_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(ddp="a:b", only=("x", "y"), filter="z", force_cpu=True)
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    assert Settings.from_environment() == settings
    for message in (
        Message(selected=[]),
        Message(running="a.b"),
        Message(result=Result("a.b", FAIL, "why\nso", 1.5, 2)),
    ):
        assert Message.decode(message.encode()) == message


def test_a_promise_holds_only_if_met_exactly_as_often_as_said() -> None:
    assert judge(PROMISED_TEST, 6, OURS)[0] == PROMISED
    assert judge(PROMISED_TEST, 9, replace(OURS, world_size=3))[0] == PROMISED
    assert judge(PROMISED_TEST, 4, OURS)[0] == FAIL
    status, why = judge(PROMISED_TEST, 0, OURS)
    assert status == PASS and "promised to differ" in why
    assert judge(PROMISED_TEST, 0, Settings()) == (PASS, "")  # torch's own promised nothing


def _tolerated(monkeypatch: pytest.MonkeyPatch, folder: Path, settings: Settings, msg: str) -> int:
    class DistributedTest(PromisedDifferences):
        def test_ddp_control_flow_same_across_ranks(self) -> None:
            self.assertFalse(True, msg)

    settings = replace(settings, scratch=str(folder))
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    notes.clear(settings)
    outcome = unittest.TestResult()
    DistributedTest("test_ddp_control_flow_same_across_ranks").run(outcome)
    tolerated = notes.count(settings)[notes.TOLERATED]
    assert tolerated == 1 - len(outcome.failures)
    return tolerated


def test_only_the_promised_assertion_is_tolerated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert _tolerated(monkeypatch, tmp_path, OURS, "DDP error not raised") == 1
    assert _tolerated(monkeypatch, tmp_path, OURS, "something else") == 0
    assert _tolerated(monkeypatch, tmp_path, Settings(), "DDP error not raised") == 0


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where harness runs of this test keep their files; others may run at the same time."""
    with tempfile.TemporaryDirectory(prefix="harness-") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def _leftovers(folder: Path) -> set[str]:
    """Processes and folders of harness runs that are there now."""
    found = {str(path) for path in folder.iterdir()}
    for process in psutil.process_iter(["cwd"]):
        if (process.info["cwd"] or "").startswith(str(folder)):
            found.add(str(process.pid))
    return found


def test_a_hang_is_told_with_its_stacks_and_leaves_nothing(folder: Path) -> None:
    settings = Settings(broken="hangs", only=(ONE_TEST,), timeout_s=3.0, deadline_s=90.0)
    (result,) = runner.run(settings)
    assert result.status == FAIL and "timed out" in result.why
    assert re.search(r'broken\.py", line \d+ in forward', result.why), result.why
    assert not _leftovers(folder)


def test_a_run_that_takes_too_long_fails_all_that_is_left(folder: Path) -> None:
    other = "DistributedTest.test_ddp_create_graph"
    settings = Settings(broken="hangs", only=(ONE_TEST, other), deadline_s=2.0)
    results = runner.run(settings)
    assert [(r.test, r.status) for r in results] == [(ONE_TEST, FAIL), (other, FAIL)]
    assert "not ended within 2.0 s" in results[0].why and "in forward" in results[0].why
    assert not _leftovers(folder)


def test_a_killed_runner_leaves_nothing(folder: Path) -> None:
    command = [sys.executable, "-m", "tests.conformance", "--broken", "hangs", "--filter", ONE_TEST]
    killed = subprocess.Popen(command, cwd=runner.ROOT)
    while len(psutil.Process(killed.pid).children(recursive=True)) < 1 + 2:  # worker and ranks
        time.sleep(0.1)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    give_up = time.monotonic() + 60.0
    while _leftovers(folder):
        assert time.monotonic() < give_up, _leftovers(folder)
        time.sleep(0.1)
