"""torch's DDP tests over a "closeranks" group: with torch's own class, and with ours.

The ordinary tests run a few of them.
"""

import pytest

from tests.conformance import baseline
from tests.conformance.by_pytest import check, run_selected
from tests.conformance.result import Result
from tests.conformance.settings import Settings
from tests.conformance.suites import cannot_run

CLOSERANKS = "closeranks:DistributedDataParallel"
DEADLINE_S = 1500.0

# It counts the spans that gloo's threads record of each all-reduce. Ours record them too, but a
# collective that its caller's own thread has done counts there as another kind, and with our class
# gradients do not go through the group at all.
LEFT_OUT = "DistributedTest.test_ddp_profiling_torch_profiler"
TESTS = [test for test in baseline.read(force_cpu=True) if test != LEFT_OUT]

pytestmark = pytest.mark.timeout(DEADLINE_S + 60)


@pytest.fixture(scope="module")
def torchs(request: pytest.FixtureRequest) -> dict[str, Result]:
    settings = Settings(backend="closeranks", force_cpu=True, deadline_s=DEADLINE_S)
    return run_selected(request, settings)


@pytest.fixture(scope="module")
def ours(request: pytest.FixtureRequest) -> dict[str, Result]:
    settings = Settings(ddp=CLOSERANKS, backend="closeranks", force_cpu=True, deadline_s=DEADLINE_S)
    return run_selected(request, settings)


@pytest.mark.parametrize("test", TESTS)
def test_torchs_class(torchs: dict[str, Result], test: str) -> None:
    if reason := cannot_run(test):
        pytest.skip(reason)
    result = torchs[test]
    assert result.status == "pass", f"{test} ended with '{result.status}'\n{result.why}"


@pytest.mark.parametrize("test", TESTS)
def test_our_class(ours: dict[str, Result], test: str) -> None:
    check(ours, test)
