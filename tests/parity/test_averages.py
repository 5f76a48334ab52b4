"""Sums and weighted means, which torch's class does not have: our class against the naive twin.

With them only the increment since the last exchange is exchanged, so every schedule of backwards
is tried. A weight is asked for once per synchronised backward, and may be zero.
"""

from __future__ import annotations

import pytest

from tests.parity.cases import AVERAGE_CASES, sized
from tests.parity.conftest import Problems
from tests.parity.runs import TEST_TIMEOUT_S

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)


@pytest.mark.parametrize(("size", "name"), sized(AVERAGE_CASES))
def test_trains_as_the_naive_twin_does(size: int, name: str, problems: Problems) -> None:
    found = problems(size, name)
    assert not found, "\n".join(found[:20])
