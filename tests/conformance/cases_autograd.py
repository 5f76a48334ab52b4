"""torch's tests of DDP under distributed autograd, as classes whose ranks this harness starts.

Importing this module puts the class under test in place first. These tests need no GPU.
"""

from tests.conformance import under_test
from tests.conformance.promised import PromisedDifferences

under_test.install()

import time  # noqa: E402
from typing import Any  # noqa: E402

import torch.distributed as dist  # noqa: E402
import torch.testing._internal.distributed.ddp_under_dist_autograd_test as upstream  # noqa: E402
from torch.testing._internal.common_distributed import MultiProcessTestCase  # noqa: E402
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (  # noqa: E402
    TensorPipeRpcAgentTestFixture,
)

_MEETING_S = 60.0
_make_trainer = upstream.Trainer.__init__


def _make_trainer_when_its_rank_has_met(self: Any, *args: Any) -> None:
    """The master asks a rank for a trainer as soon as it has met the others itself.

    On a busy machine that rank may not have returned from init_process_group yet, and torch's test
    fails, whatever is under test.
    """
    deadline = time.monotonic() + _MEETING_S
    while not dist.is_initialized() and time.monotonic() < deadline:
        time.sleep(0.01)
    _make_trainer(self, *args)


upstream.Trainer.__init__ = _make_trainer_when_its_rank_has_met


class _RankStarter(PromisedDifferences, MultiProcessTestCase):
    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


class DdpUnderDistAutogradTest(
    upstream.DdpUnderDistAutogradTest, TensorPipeRpcAgentTestFixture, _RankStarter
):
    pass


class DdpComparisonTest(upstream.DdpComparisonTest, TensorPipeRpcAgentTestFixture, _RankStarter):
    pass
