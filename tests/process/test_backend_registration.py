"""torch knows the backend whoever was imported first, and importing closeranks imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_WORK = """
import sys
assert dist.is_backend_available("closeranks")
dist.init_process_group("closeranks", store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_backend() == "closeranks"
x = torch.ones(3)
dist.all_reduce(x)
assert x.tolist() == [1.0] * 3
spec = sys.modules["torch.distributed.distributed_c10d"].__spec__
assert type(spec.loader).__name__ == "SourceFileLoader", spec
assert not [f for f in sys.meta_path if type(f).__module__.startswith("closeranks")]
dist.destroy_process_group()
print("fine")
"""

_ORDERS = {
    "torch first": "import torch, torch.distributed as dist, closeranks",
    "closeranks first": """
import sys, closeranks
assert "torch" not in sys.modules
import torch, torch.distributed as dist""",
    "closeranks first, by a name": """
from closeranks import CloseranksError
import torch
dist = torch.distributed""",
    "closeranks twice": """
import sys, closeranks
del sys.modules["closeranks"]
import closeranks
import torch, torch.distributed as dist""",
    "in a thread": """
import threading, closeranks
def load():
    import torch
thread = threading.Thread(target=load)
thread.start()
thread.join()
import torch, torch.distributed as dist""",
    "for two devices": """
import torch, closeranks, torch.distributed as dist
dist.init_process_group("cpu:closeranks,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_backend() == "cpu:closeranks,cuda:gloo"
assert type(dist.group.WORLD).__name__ == "CloseranksGroup"
dist.destroy_process_group()""",
}


@pytest.mark.parametrize("order", _ORDERS)
def test_the_backend_is_known(order: str) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", _ORDERS[order] + _WORK],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
    )
    assert run.stdout == "fine\n", run.stderr
