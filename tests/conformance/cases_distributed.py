"""torch's distributed_test as a test class whose ranks this harness starts.

Importing this module puts the class under test in place first.
"""

import inspect
import sys
from typing import Any

from tests.conformance import under_test
from tests.conformance.promised import PromisedDifferences

SETTINGS = under_test.install()
sys.modules["torchvision"] = None  # type: ignore[assignment] # a resnet50 is too slow on the CPU

import torch.testing._internal.distributed.distributed_test as upstream  # noqa: E402

SOURCE = inspect.getsource(upstream)
_PATIENCE_S = 90  # of a rank with others, for its groups and torch's barrier
upstream.default_pg_timeout = _PATIENCE_S


class DistributedTest(
    PromisedDifferences, upstream.TestDistBackend, upstream.DistributedTest._DistTestBase
):
    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _barrier(self, *args: Any, **kwargs: Any) -> None:
        """torch waits 10 s for the slowest rank: too short on a busy machine."""
        super()._barrier(*args, **{"timeout": _PATIENCE_S} | kwargs)


def _shrink_uneven_inputs() -> None:
    """1000 x 1000 convolutions take minutes on a CPU; with 40 x 40 the test says the same."""
    test = inspect.unwrap(DistributedTest.test_ddp_uneven_inputs)
    constants = tuple(40 if value == 1000 else value for value in test.__code__.co_consts)
    test.__code__ = test.__code__.replace(co_consts=constants)


if SETTINGS.force_cpu:
    _shrink_uneven_inputs()
