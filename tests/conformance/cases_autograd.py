"""torch's tests of DDP under distributed autograd, as classes whose ranks this harness starts.

Importing this module puts the class under test in place first. These tests need no GPU.
"""

from tests.conformance import under_test
from tests.conformance.promised import PromisedDifferences

under_test.install()

import torch.testing._internal.distributed.ddp_under_dist_autograd_test as upstream  # noqa: E402
from torch.testing._internal.common_distributed import MultiProcessTestCase  # noqa: E402
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (  # noqa: E402
    TensorPipeRpcAgentTestFixture,
)


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
