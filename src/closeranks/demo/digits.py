"""The first task of the demo: a convolutional net learns handwritten digits of 8 x 8 pixels."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from closeranks.demo.training import Task

_HELD_OUT = 400
_STEPS = 400


def task(is_quick: bool) -> Task:
    """1797 digits of scikit-learn's, which come with it: nothing is downloaded."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    held_out, train = order[:_HELD_OUT], order[_HELD_OUT:]
    return Task(
        title="digits, a convolutional net",
        model=_net(),
        train_set=TensorDataset(x[train], y[train]),
        held_out=[x[held_out], y[held_out]],
        batch_size=32,
        steps=_STEPS // 10 if is_quick else _STEPS,
        lr=2e-3,
        unit="images",
    )


def _net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )
