"""The loop of the demo: train a model with our class, judge it, and prove that the replicas agree.

Knows ranks, and no data; a `Task` brings the model, its samples, and what a batch costs.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from closeranks.ddp.wrapper import DistributedDataParallel
from closeranks.observe import whereabouts
from closeranks.observe.progress import progress

Batch = list[Tensor]


@dataclass(frozen=True)
class Task:
    """Something to learn: for each input (or each place in it) one of several classes."""

    title: str
    model: nn.Module
    train_set: Dataset[Any]
    held_out: Batch  # inputs and targets, all of them
    batch_size: int  # of one rank
    steps: int
    lr: float
    unit: str  # what a sample is called
    last_words: Callable[[nn.Module], str] = lambda model: ""


def train(task: Task) -> bool:
    """All of it; whether the replicas are equal in every bit."""
    sampler: DistributedSampler[Any] = DistributedSampler(task.train_set, seed=0, drop_last=True)
    loader = DataLoader(task.train_set, task.batch_size, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(task.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr)
    count = sum(parameter.numel() for parameter in model.parameters())
    say(f"\n{task.title}: {count:,} parameters, gradients by {model.exchange}")
    loss = torch.zeros(())
    model.train()
    began_s, waited_before_s = time.monotonic(), whereabouts.waited_s()
    for batch in (bar := progress(_Steps(loader, sampler, task.steps))):
        optimizer.zero_grad()
        loss = _loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        bar.show(loss=loss.detach())
    took_s = time.monotonic() - began_s
    waited = (whereabouts.waited_s() - waited_before_s) / took_s
    _say_throughput(task.steps * task.batch_size / took_s, waited, task.unit)
    _say_quality(task, model)
    return _prove_equal(model)


def say(text: str) -> None:
    """Once, for all ranks."""
    if dist.get_rank() == 0:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


class _Steps:
    """So many batches, epoch after epoch."""

    def __init__(
        self, loader: DataLoader[Any], sampler: DistributedSampler[Any], count: int
    ) -> None:
        self._loader, self._sampler, self._count = loader, sampler, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        done = epoch = 0
        while done < self._count:
            self._sampler.set_epoch(epoch)
            for batch in self._loader:
                yield batch
                done += 1
                if done == self._count:
                    return
            epoch += 1


def _say_throughput(samples_per_s: float, waited: float, unit: str) -> None:
    mine = torch.tensor([samples_per_s, waited], dtype=torch.float64)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    for rank, (rate, share) in enumerate(each.tolist() for each in everyones):
        say(f"  rank {rank}: {rate:8.0f} {unit}/s, waited for others {share:.0%} of the time")


@torch.no_grad()
def _say_quality(task: Task, model: DistributedDataParallel) -> None:
    """Loss and accuracy on what was held out, each sample judged once, by one of the ranks.

    The wrapped model is called once by every rank, also by one that has nothing to judge: the call
    hands rank 0's buffers to all, and batch norms have collected statistics of their own.
    """
    model.eval()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    inputs, targets = (tensor[mine] for tensor in task.held_out)
    guessed = model(inputs)
    sums = torch.zeros(3, dtype=torch.float64)  # loss, right guesses, guesses
    if len(inputs):
        right = (guessed.argmax(dim=-1) == targets).sum()
        loss = _loss(guessed, targets) * targets.numel()
        sums = torch.stack([loss, right, torch.tensor(targets.numel())]).double()
    dist.all_reduce(sums)
    loss_sum, right_sum, count = sums.tolist()
    say(
        f"  held out: loss {loss_sum / count:.3f}, accuracy {right_sum / count:.1%} "
        f"({right_sum:.0f} of {count:.0f})"
    )
    if words := task.last_words(model.module):
        say(words)


def _loss(guessed: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(guessed.flatten(0, -2), targets.flatten())


def _prove_equal(model: nn.Module) -> bool:
    """Compare the sha256 of every replica's parameters and buffers; all ranks learn the result."""
    sha = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    mine = torch.frombuffer(bytearray(sha.digest()), dtype=torch.uint8)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    for rank, each in enumerate(everyones):
        say(f"  rank {rank}: {bytes(each.tolist()).hex()}")
    are_equal = all(torch.equal(each, mine) for each in everyones)
    verdict = "equal in every bit" if are_equal else "NOT EQUAL: the training was wrong"
    say(f"  The {len(everyones)} replicas are {verdict}.")
    return are_equal
