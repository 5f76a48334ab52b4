"""Where closeranks differs from torch's class on purpose, test by test.

closeranks has no error for unused parameters (docs/decisions/0001-no-unused-parameter-error.md).
Five of torch's tests want that error: they do `try: step() except RuntimeError: ... else:` and
fail by an assertion in the `else` branch. That single assertion is tolerated, in these tests only
and with that message only; the rest of the test, at every debug level, still has to hold. A test
then counts as `promised` if the assertion was met exactly as often as the test asks for the error.
"""

from __future__ import annotations

import re
import unittest
from collections.abc import Callable
from dataclasses import dataclass

from tests.conformance import notes
from tests.conformance.result import FAIL, PASS, PROMISED
from tests.conformance.settings import Settings


@dataclass(frozen=True)
class Promise:
    reason: str
    message: str  # regular expression for the whole message of the assertion
    times_per_rank: int  # how often one rank meets it: once for each debug level


_LEVELS = 3  # these tests run with TORCH_DISTRIBUTED_DEBUG at OFF, INFO and DETAIL
_SUITE = "DistributedTest"

PROMISES = {
    f"{_SUITE}.test_ddp_control_flow_same_across_ranks": Promise(
        "wants the unused-parameter error for a layer that no rank uses",
        r"True is not false : DDP error not raised",
        _LEVELS,
    ),
    f"{_SUITE}.test_ddp_control_flow_different_across_ranks": Promise(
        "wants the unused-parameter error for a layer that some ranks use",
        r"True is not false : DDP error not raised",
        _LEVELS,
    ),
    f"{_SUITE}.test_ddp_unused_params_rebuild_buckets_exception": Promise(
        "wants the unused-parameter error where torch rebuilds its buckets",
        r"True is not false : DDP unused parameters error not raised\.",
        _LEVELS,
    ),
    f"{_SUITE}.test_ddp_multiple_nested_unused_params_error": Promise(
        "wants the unused-parameter error to name nested parameters",
        r"False is not true : Expected error was not raised!",
        _LEVELS,
    ),
    f"{_SUITE}.test_ddp_multiple_nested_unused_params_err_ignore_params": Promise(
        "wants the unused-parameter error to name nested parameters, but not ignored ones",
        r"False is not true : Expected error was not raised!",
        _LEVELS,
    ),
}


class PromisedDifferences(unittest.TestCase):
    """Mixed into torch's test classes, in front: tolerates what PROMISES lists, and notes it."""

    def assertTrue(self, expr: object, msg: object = None) -> None:
        self._tolerate(super().assertTrue, expr, msg)

    def assertFalse(self, expr: object, msg: object = None) -> None:
        self._tolerate(super().assertFalse, expr, msg)

    def _tolerate(self, assertion: Callable[..., None], expr: object, msg: object) -> None:
        try:
            assertion(expr, msg)
        except AssertionError as failure:
            settings = Settings.from_environment()
            promise = PROMISES.get(f"{type(self).__name__}.{self._testMethodName}")
            if not settings.differs_by_promise or promise is None:
                raise
            if not re.fullmatch(promise.message, str(failure)):
                raise
            notes.add(settings, notes.TOLERATED)


def judge(test: str, tolerated: int, settings: Settings) -> tuple[str, str]:
    """Status and reason of a test that came to its end without a failure."""
    promise = PROMISES.get(test)
    if promise is None or not settings.differs_by_promise:
        return PASS, ""
    expected = promise.times_per_rank * settings.world_size
    if tolerated == expected:
        return PROMISED, promise.reason
    if tolerated == 0:
        return PASS, f"promised to differ ({promise.reason}), but it does not"
    return FAIL, f"the promised difference showed {tolerated} times instead of {expected}"
