"""Trains a small classifier on scikit-learn's digits, and proves that the replicas are equal.

    closeranks run examples/digits.py
    torchrun --standalone --nproc-per-node=2 examples/digits.py

An ordinary torch script: the import of DistributedDataParallel is the only line that torch's own
class would have otherwise. Each worker trains on its own share of the samples; the gradients are
averaged in every backward pass, so that all workers take the same steps. At the end every worker
hashes its parameters and buffers, and the script fails if two of them differ in a single bit.
"""

import argparse
import hashlib
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from closeranks import DistributedDataParallel as DDP


class Net(nn.Module):
    """A convolutional net for images of 8 x 8; its batch norms give the replicas buffers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """The samples to train on and the held-out ones, the same split on every worker."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        sys.exit("The digits come from scikit-learn: pip install 'closeranks[demo]'")
    images, labels = load(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    held_out, train = order[:400], order[400:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[held_out], y[held_out])


def train_epoch(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> float:
    """One pass over this worker's share; returns the mean loss over the shares of all workers."""
    model.train()
    sums = torch.zeros(2, dtype=torch.float64)  # loss, samples
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        sums += torch.tensor([loss.item() * len(labels), len(labels)])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def evaluate(model: nn.Module, samples: TensorDataset) -> tuple[int, int]:
    """Right answers and samples over all workers, every sample counted exactly once.

    DistributedSampler would repeat samples until all shares are of one size, and count those twice.
    Here the shares may differ by a sample, but each worker calls the wrapped model just once. That
    call also hands rank 0's buffers to all: batch norms collect statistics of their own worker's
    samples, and without it every worker would judge a slightly different model.
    """
    model.eval()
    images, labels = samples.tensors
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    right = (model(images[mine]).argmax(dim=1) == labels[mine]).sum()
    counts = torch.stack([right, torch.tensor(len(labels[mine]))])
    dist.all_reduce(counts)
    return int(counts[0]), int(counts[1])


def digest(model: nn.Module) -> torch.Tensor:
    """The sha256 of every parameter and buffer of this replica: name, type, shape and bytes."""
    sha = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
    return torch.tensor(list(sha.digest()), dtype=torch.uint8)


def prove_replicas_equal(model: nn.Module) -> bool:
    """Compare the digests of all replicas, and show them on rank 0. Every worker is told."""
    mine = digest(model)
    digests = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, mine)
    equal = all(torch.equal(other, mine) for other in digests)
    if dist.get_rank() == 0:
        print("\nsha256 over all parameters and buffers:")
        for rank, each in enumerate(digests):
            print(f"  rank {rank}  {bytes(each.tolist()).hex()}")
        verdict = "equal in every bit" if equal else "NOT EQUAL: the training was wrong"
        print(f"The {len(digests)} replicas are {verdict}.", flush=True)
    return equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per worker and step")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(f"Start it with: closeranks run {sys.argv[0]} (or with torchrun)")

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    train_set, held_out = load_digits()
    sampler = DistributedSampler(train_set, seed=0)
    loader = DataLoader(train_set, batch_size=options.batch_size, sampler=sampler)
    torch.manual_seed(rank)  # Each replica starts elsewhere; wrapping gives all of them rank 0's.
    model = DDP(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if rank == 0:
        print(f"{dist.get_world_size()} workers, {len(train_set)} samples to train on")

    started = time.perf_counter()
    for epoch in range(1, options.epochs + 1):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer)
        if epoch % 3 == 0 or epoch in (1, options.epochs):
            right, seen = evaluate(model, held_out)
            if rank == 0:
                accuracy = f"accuracy {right / seen:6.1%} ({right} of {seen} held-out samples)"
                seconds = time.perf_counter() - started
                print(f"epoch {epoch:2}  loss {loss:.4f}  {accuracy}  {seconds:4.1f} s", flush=True)

    equal = prove_replicas_equal(model)
    dist.barrier()  # Whoever leaves first with an error has the others killed before they speak.
    dist.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
