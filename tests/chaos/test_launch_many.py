"""64 workers on however few cores: they start, take steps together, and stop."""

from pathlib import Path

import pytest

from tests.launch.job import run

STEP = """
    import torch, closeranks
    world = closeranks.init(timeout=300)
    torch.manual_seed(world.rank)
    model = closeranks.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    print(model.module.weight.sum().item())
"""


@pytest.mark.timeout(600)
def test_64_workers_start_step_and_stop(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "64", "train.py", script=STEP, deadline_s=500.0)
    assert done.code == 0, done.err
    sums = [line.partition(" | ")[2] for line in done.out.splitlines()]
    assert len(sums) == 64 and len(set(sums)) == 1
