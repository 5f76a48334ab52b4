"""One run of torch's tests, shown by pytest as a test for each.

A fixture runs all tests that pytest has selected for it, once; each parametrised test looks its
own result up. So the cost is that of one run, and a loss has a name.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.conformance import runner
from tests.conformance.promised import PROMISES
from tests.conformance.result import PASS, PROMISED, Result
from tests.conformance.settings import Settings
from tests.conformance.suites import cannot_run


def run_selected(request: pytest.FixtureRequest, settings: Settings) -> dict[str, Result]:
    """Results by test, for the parameter `test` of all items that use the asking fixture."""
    wanted = [
        item.callspec.params["test"]
        for item in request.session.items
        if request.fixturename in getattr(item, "fixturenames", ())
    ]
    results = runner.run(replace(settings, only=tuple(wanted)))
    return {result.test: result for result in results}


def check(results: dict[str, Result], test: str) -> None:
    """Fail unless the test ended as it does with torch's class, or exactly as promised."""
    if reason := cannot_run(test):
        pytest.skip(reason)
    result = results[test]
    wanted = PROMISED if test in PROMISES else PASS
    assert result.status == wanted, (
        f"{test} ended with '{result.status}' instead of '{wanted}'\n{result.why}"
    )
