"""The tests that torch's own class passes, and what a class under test loses of them.

One sorted list of names for each way to run, at world size 2, in plain text files that
`python -m tests.conformance --write-baseline` makes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.conformance.result import PASS, PROMISED, SKIP, Result
from tests.conformance.settings import Settings
from tests.conformance.suites import cannot_run

_WORLD_SIZE = 2
_FOLDER = Path(__file__).with_name("baselines")


def read(force_cpu: bool) -> list[str]:
    return _file(force_cpu).read_text().split()


def write(force_cpu: bool, results: Iterable[Result]) -> None:
    passed = sorted(result.test for result in results if result.status == PASS)
    _file(force_cpu).write_text("".join(f"{test}\n" for test in passed))


def lost(results: list[Result], settings: Settings) -> list[str]:
    """Tests of the baseline that were selected and neither passed nor differ by promise.

    At another world size than that of the baseline, tests may skip themselves.
    """
    held = {PASS, PROMISED} | ({SKIP} if settings.world_size != _WORLD_SIZE else set())
    holding = {result.test for result in results if result.status in held}
    return [test for test in expected(settings) if test not in holding]


def expected(settings: Settings) -> list[str]:
    """Tests of the baseline that the settings select and this machine can run."""
    selected = [test for test in read(settings.force_cpu) if settings.selects(test)]
    return [test for test in selected if not cannot_run(test)]


def _file(force_cpu: bool) -> Path:
    return _FOLDER / ("force-cpu.txt" if force_cpu else "native.txt")
