"""The mean over the ranks: our class against torch's and against the naive twin, tensor by tensor.

After each of five steps the gradients and buffers, and the weights after the last, must be as
theirs on every rank, bit by bit with one or two ranks; the ranks must hold the same bits always.
"""

from __future__ import annotations

import pytest

from tests.parity.cases import MEAN_CASES, sized
from tests.parity.conftest import Problems
from tests.parity.runs import TEST_TIMEOUT_S

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)


@pytest.mark.parametrize(("size", "name"), sized(MEAN_CASES))
def test_trains_as_torch_and_the_naive_twin_do(size: int, name: str, problems: Problems) -> None:
    found = problems(size, name)
    assert not found, "\n".join(found[:20])
