"""One script for every launcher: closeranks.init() finds this process's place, progress() shows it.

    closeranks run examples/anywhere.py
    torchrun --standalone --nproc-per-node=2 examples/anywhere.py
    srun -n 2 python examples/anywhere.py
    mpirun -n 2 python examples/anywhere.py
    python examples/anywhere.py

Learns a line through noise: every worker draws noise of its own, and all end with the same line.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

import closeranks


def main() -> int:
    world = closeranks.init()  # instead of init_process_group
    noise = torch.Generator().manual_seed(world.rank)
    model = closeranks.DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for _ in (bar := closeranks.progress(range(200))):
        x = torch.rand(64, 1, generator=noise)
        y = 3 * x + 2 + 0.1 * torch.randn(64, 1, generator=noise)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        bar.show(loss=loss.detach())

    if world.rank == 0:
        slope, start = model.module.weight.item(), model.module.bias.item()
        print(f"y = {slope:.2f} x + {start:.2f}, by {world.size} workers, {model.exchange}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
