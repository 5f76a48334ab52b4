"""Every fault at every place with every number of workers, and faults by the dice."""

from __future__ import annotations

import pytest

from tests.lanes_matrix import Case, everything, survive


@pytest.mark.parametrize("case", everything(), ids=str)
def test_the_bits_do_not_change(case: Case) -> None:
    survive(case)
