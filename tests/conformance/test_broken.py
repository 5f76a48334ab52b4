"""torch's tests notice what is wrong: each broken class loses tests that the whole one passes.

This is what makes a pass mean something: the class under test is really the one that runs, and a
gradient that is not the average is really seen.
"""

import pytest

from tests.conformance import runner
from tests.conformance.result import FAIL
from tests.conformance.settings import Settings
from tests.conformance.test_conformance import CLOSERANKS

_CPU = "DistributedTest.test_DistributedDataParallelCPU"
_REQUIRES_GRAD = "DistributedTest.test_DistributedDataParallel_requires_grad"
_NO_SYNC = "DistributedTest.test_accumulate_gradients_no_sync"
_SAME_GRADS = "DistributedTest.test_grads_same_across_ranks_with_no_sync"
_BUFFERS = "DistributedTest.test_ddp_broadcast_buffer"
_BUFFERS_BY_HOOK = "DistributedTest.test_ddp_broadcast_buffer_via_hook"

LOSES = {
    "never-reduces": (_CPU, _SAME_GRADS),
    "forgets-to-divide": (_CPU, _NO_SYNC),
    "skips-last-bucket": (_CPU, _SAME_GRADS),
    "keeps-own-state": (_BUFFERS, _BUFFERS_BY_HOOK),
    "merely-forwards": (_CPU, _REQUIRES_GRAD),
}
DEADLINE_S = 300.0

pytestmark = pytest.mark.timeout(DEADLINE_S + 60)


@pytest.mark.parametrize("broken", LOSES)
def test_a_broken_class_loses_tests(broken: str) -> None:
    results = runner.run(
        Settings(
            ddp=CLOSERANKS,
            broken=broken,
            force_cpu=broken == "keeps-own-state",
            only=LOSES[broken],
            deadline_s=DEADLINE_S,
        )
    )
    endings = {result.test: result.status for result in results}
    assert endings == dict.fromkeys(LOSES[broken], FAIL)
