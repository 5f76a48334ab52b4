"""The digits once more, with Lightning Fabric over the closeranks backend.

    closeranks run -n 2 examples/fabric_digits.py
    torchrun --standalone --nproc-per-node=2 examples/fabric_digits.py

Fabric wraps the model in torch's own DistributedDataParallel; its DDPStrategy takes the name of the
backend. Needs `pip install 'closeranks[examples]'`.
"""

import os
import sys

import torch
import torch.distributed as dist
from digits import Net, load_digits, prove_replicas_equal
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from torch.utils.data import DataLoader

import closeranks  # noqa: F401 - gives torch.distributed the backend


def main() -> int:
    strategy = DDPStrategy(process_group_backend="closeranks")
    workers = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=workers, strategy=strategy)
    fabric.launch()
    torch.manual_seed(fabric.global_rank)  # wrapping gives all of them rank 0's parameters
    train_set, held_out = load_digits()
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=2e-3))
    loader = fabric.setup_dataloaders(DataLoader(train_set, batch_size=32, shuffle=True))
    if fabric.is_global_zero:
        print(f"{type(strategy).__name__} over {dist.get_backend()}")

    images, labels = held_out.tensors
    mine = slice(fabric.global_rank, None, fabric.world_size)
    for epoch in range(1, 4):
        model.train()
        for batch, targets in loader:
            optimizer.zero_grad()
            fabric.backward(torch.nn.functional.cross_entropy(model(batch), targets))
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = (model(images[mine]).argmax(dim=1) == labels[mine]).sum()
        right, seen = fabric.all_reduce(
            torch.stack([right, torch.tensor(len(labels[mine]))]), reduce_op="sum"
        ).tolist()
        if fabric.is_global_zero:
            print(f"epoch {epoch}  accuracy {right / seen:.1%} ({right} of {seen})")

    equal = prove_replicas_equal(net)
    fabric.barrier()
    dist.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
