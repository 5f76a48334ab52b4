"""Runs one suite in a process of its own: `python -m tests.conformance.worker SUITE`.

The runner starts it, with the Settings in the environment and a pipe as standard input. What
happens is written, one Message a line, to the file `messages` in the scratch folder. When the
pipe ends, the runner is gone, and the worker removes the folder, all its ranks and itself.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
import threading
import time
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from tests.conformance import notes, stacks
from tests.conformance.result import FAIL, PASS, SKIP, Message, Result
from tests.conformance.settings import Settings
from tests.conformance.suites import SUITES, Suite, cannot_run, concerning_ddp, environment_of

MESSAGES, LOG = "messages", "log"
_LOG_CHARACTERS = 3000


def main() -> None:
    settings = Settings.from_environment()
    threading.Thread(target=_end_with_runner, args=(settings,), daemon=True).start()
    suite = SUITES[sys.argv[1]]
    module = importlib.import_module(suite.cases)  # puts the class under test in place
    selected = _selected_of(suite, module, settings)
    with settings.in_scratch(MESSAGES).open("a", buffering=1) as messages:
        messages.write(Message(selected=selected).encode())
        for test in selected:
            messages.write(Message(running=test).encode())
            messages.write(Message(result=_run(test, module, settings)).encode())


def _end_with_runner(settings: Settings) -> None:
    while os.read(0, 1):
        pass
    shutil.rmtree(settings.scratch, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _selected_of(suite: Suite, module: Any, settings: Settings) -> list[str]:
    selected = []
    for name in suite.classes:
        methods = unittest.TestLoader().getTestCaseNames(getattr(module, name))
        if not suite.all_concern_ddp and not settings.only:  # tests asked for by name do
            methods = concerning_ddp(module.SOURCE, list(methods))
        tests = [f"{name}.{method}" for method in methods]
        selected += [t for t in tests if settings.selects(t) and t not in settings.done]
    return selected


def _run(test: str, module: Any, settings: Settings) -> Result:
    from tests.conformance import processes  # imports torch, which the suite has done by now
    from tests.conformance.pretend import meaningless
    from tests.conformance.promised import judge

    class_name, method = test.split(".")
    reason = cannot_run(test) or (meaningless(method) if settings.force_cpu else "")
    if reason:
        return Result(test, SKIP, reason)
    log = settings.in_scratch(LOG)
    log_start = log.stat().st_size
    notes.clear(settings)
    started = time.monotonic()
    with mock.patch.dict(os.environ, environment_of(test)):
        status, why = _run_case(getattr(module, class_name)(method))
    seconds = round(time.monotonic() - started, 1)
    processes.kill_ranks()
    counted = notes.count(settings)
    if status == PASS:
        status, why = judge(test, counted[notes.TOLERATED], settings)
    if status == PASS and not counted[notes.CONSTRUCTED]:
        status, why = SKIP, "the class under test was never constructed: proves nothing"
    if status == FAIL:
        why += stacks.take(settings) + "--- output ---\n" + _tail(log, log_start)
    return Result(test, status, why, seconds, counted[notes.CONSTRUCTED])


def _run_case(case: unittest.TestCase) -> tuple[str, str]:
    outcome = unittest.TestResult()
    try:
        case.run(outcome)
    except SystemExit as ended:  # torch's way of skipping before there is a rank
        return _meaning_of_exit(ended.code)
    if outcome.errors or outcome.failures:
        return FAIL, (outcome.errors + outcome.failures)[0][1]
    if outcome.skipped:
        return SKIP, outcome.skipped[0][1]
    return (FAIL, "unexpected success\n") if outcome.unexpectedSuccesses else (PASS, "")


def _meaning_of_exit(code: Any) -> tuple[str, str]:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    reasons = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    return (SKIP, reasons[code]) if code in reasons else (FAIL, f"ended with exit code {code}\n")


def _tail(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")[-_LOG_CHARACTERS:]


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # no thread of torch may delay the end
