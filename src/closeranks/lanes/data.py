"""Which samples are in which batch and lane, and how they are fetched: always the same.

The order of an epoch is a function of (seed, epoch), or whatever the user's sampler says when it is
asked under a seed of (seed, epoch). A sample is fetched under a seed of (seed, epoch, sample), so
that its augmentation is the same whoever fetches it, and as often as it is fetched.

Knows datasets; must not know workers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from closeranks.lanes.seeds import derive, seed_all


@dataclass(frozen=True)
class Source:
    """A dataset as training or evaluation goes through it."""

    dataset: Any
    batch_size: int
    seed: int
    shuffle: bool = False
    drop_last: bool = False
    collate_fn: Callable[[list[Any]], Any] | None = None
    sampler: Iterable[int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.dataset, IterableDataset):
            raise TypeError(
                f"the dataset is a {type(self.dataset).__name__}, an IterableDataset: its samples "
                "have no numbers, so nobody else could fetch one again. Nothing was trained; give "
                "a dataset with __getitem__ and __len__."
            )
        if not hasattr(self.dataset, "__getitem__") or not hasattr(self.dataset, "__len__"):
            raise TypeError(
                f"the dataset is a {type(self.dataset).__name__}; wanted one with __getitem__ and "
                "__len__. Nothing was trained."
            )
        if self.batch_size < 1:
            raise ValueError(
                f"batch_size is {self.batch_size}; wanted the number of samples of a global batch, "
                "at least 1. Nothing was trained."
            )

    def order(self, epoch: int) -> list[int]:
        """The samples of an epoch, in order."""
        if self.sampler is not None:
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            seed_all(derive(self.seed, "order", epoch))
            return [int(index) for index in self.sampler]
        count = len(self.dataset)
        if not self.shuffle:
            return list(range(count))
        generator = torch.Generator().manual_seed(derive(self.seed, "order", epoch))
        order: list[int] = torch.randperm(count, generator=generator).tolist()
        return order

    def batches(self, epoch: int) -> list[list[int]]:
        """The samples of every batch of an epoch."""
        order = self.order(epoch)
        end = len(order)
        if self.drop_last:
            end -= end % self.batch_size
        return [order[k : min(k + self.batch_size, end)] for k in range(0, end, self.batch_size)]

    def fetch(self, epoch: int, samples: Sequence[int]) -> Any:
        """These samples as a batch; the generators are left anywhere."""
        if self._is_table:
            return [tensor[samples] for tensor in self.dataset.tensors]
        fetched = []
        for sample in samples:
            seed_all(derive(self.seed, "sample", epoch, sample))
            fetched.append(self.dataset[sample])
        return (self.collate_fn or default_collate)(fetched)

    @functools.cached_property
    def _is_table(self) -> bool:
        """Whether a batch is what indexing gives: the same as collating samples, but faster."""
        return (
            type(self.dataset) is TensorDataset
            and self.collate_fn is None
            and all(tensor.is_contiguous() for tensor in self.dataset.tensors)
        )
