"""Has the server that ranks are forked from import once what every first wrapping would import.

torch's class asks torch._dynamo for its mode, and importing that takes over a second per rank.
"""

from __future__ import annotations

import multiprocessing

from tests import ranks

multiprocessing.get_context("forkserver").set_forkserver_preload(
    [ranks.__name__, "torch.distributed.optim", "torch._dynamo", "closeranks.ddp.wrapper"]
)
