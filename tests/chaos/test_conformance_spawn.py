"""All of torch's DDP tests once more, with ranks that torch starts by `spawn`.

Each rank then imports torch and the class under test anew, as in a real job. That takes three
times as long as `fork`, so that it is not part of `make test`.
"""

import pytest

from tests.conformance import baseline
from tests.conformance.by_pytest import check, run_selected
from tests.conformance.result import Result
from tests.conformance.settings import Settings

CLOSERANKS = "closeranks:DistributedDataParallel"
DEADLINE_S = 3000.0

pytestmark = pytest.mark.timeout(DEADLINE_S + 60)  # the first test of a run waits for all


@pytest.fixture(scope="module")
def native(request: pytest.FixtureRequest) -> dict[str, Result]:
    return run_selected(request, Settings(ddp=CLOSERANKS, start="spawn", deadline_s=DEADLINE_S))


@pytest.fixture(scope="module")
def forced(request: pytest.FixtureRequest) -> dict[str, Result]:
    settings = Settings(ddp=CLOSERANKS, force_cpu=True, start="spawn", deadline_s=DEADLINE_S)
    return run_selected(request, settings)


@pytest.mark.parametrize("test", baseline.read(force_cpu=False))
def test_native(native: dict[str, Result], test: str) -> None:
    check(native, test)


@pytest.mark.parametrize("test", baseline.read(force_cpu=True))
def test_force_cpu(forced: dict[str, Result], test: str) -> None:
    check(forced, test)
