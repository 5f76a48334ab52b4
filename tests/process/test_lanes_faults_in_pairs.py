"""Whoever is killed, stopped or slow: every pair of place, fault and number of workers."""

from __future__ import annotations

import pytest

from tests.lanes_matrix import Case, pairwise, survive


@pytest.mark.parametrize("case", pairwise(), ids=str)
def test_the_bits_do_not_change(case: Case) -> None:
    survive(case)
