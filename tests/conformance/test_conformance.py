"""closeranks' class passes all of torch's DDP tests that torch's own class passes.

With the start method `spawn`, which is slow, and over a "closeranks" group only a few are run here;
tests/chaos runs them all.
"""

import pytest

from tests.conformance import baseline
from tests.conformance.by_pytest import check, run_selected
from tests.conformance.result import Result
from tests.conformance.settings import Settings

CLOSERANKS = "closeranks:DistributedDataParallel"
DEADLINE_S = 900.0

FEW = (
    "DistributedTest.test_ddp_apply_optim_in_backward_ignored_params",
    "DistributedTest.test_ddp_control_flow_different_across_ranks",
)

# Over a "closeranks" group, with torch's own class, whose reducer in C++ holds works of ours.
FEW_OVER_OURS = (
    "DistributedTest.test_ddp_grad_div_uneven_inputs",
    "DistributedTest.test_ddp_buffer_hook_allreduce",
    "DistributedTest.test_ddp_hook_parity_powerSGD",
    "DistributedTest.test_post_localSGD_optimizer_parity",
)

pytestmark = pytest.mark.timeout(DEADLINE_S + 60)  # the first test of a run waits for all


@pytest.fixture(scope="module")
def native(request: pytest.FixtureRequest) -> dict[str, Result]:
    return run_selected(request, Settings(ddp=CLOSERANKS, deadline_s=DEADLINE_S))


@pytest.fixture(scope="module")
def forced(request: pytest.FixtureRequest) -> dict[str, Result]:
    return run_selected(request, Settings(ddp=CLOSERANKS, force_cpu=True, deadline_s=DEADLINE_S))


@pytest.fixture(scope="module")
def spawned(request: pytest.FixtureRequest) -> dict[str, Result]:
    settings = Settings(ddp=CLOSERANKS, force_cpu=True, start="spawn", deadline_s=DEADLINE_S)
    return run_selected(request, settings)


@pytest.mark.parametrize("test", baseline.read(force_cpu=False))
def test_native(native: dict[str, Result], test: str) -> None:
    check(native, test)


@pytest.mark.parametrize("test", baseline.read(force_cpu=True))
def test_force_cpu(forced: dict[str, Result], test: str) -> None:
    check(forced, test)


@pytest.mark.parametrize("test", FEW)
def test_spawn(spawned: dict[str, Result], test: str) -> None:
    check(spawned, test)


@pytest.fixture(scope="module")
def over_ours(request: pytest.FixtureRequest) -> dict[str, Result]:
    settings = Settings(backend="closeranks", force_cpu=True, deadline_s=DEADLINE_S)
    return run_selected(request, settings)


@pytest.mark.parametrize("test", FEW_OVER_OURS)
def test_over_our_backend(over_ours: dict[str, Result], test: str) -> None:
    check(over_ours, test)
