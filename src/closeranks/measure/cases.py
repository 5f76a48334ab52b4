"""What is trained in a measurement: the models, their batches, and one step of each.

Knows modules and optimizers; must not know process groups, clocks or wrappers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from closeranks.bench.raw import TITLES


@dataclass(frozen=True)
class Case:
    """A model and the batches of one rank."""

    name: str
    title: str
    make: Callable[[], nn.Module]
    batch_shape: tuple[int, ...]
    block_steps: int  # timed steps in one block, before another variant has its turn

    def batch(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 + rank)
        return torch.randn(self.batch_shape, generator=generator)


def tiny_layers() -> nn.Module:
    """320 parameters of 16 or 256 numbers: nearly all of a step is overhead per parameter.

    Orthogonal weights keep the gradients of so deep a chain away from zero: numbers too small for
    the normal format are slow to multiply.
    """
    layers = [nn.Linear(16, 16) for _ in range(160)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    return nn.Sequential(*layers)


def perceptron(layers: int = 6) -> nn.Module:
    """4.2 MB of gradients a layer."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*parts)


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


CASES = {
    case.name: case
    for case in (
        Case("tiny", TITLES["tiny"], tiny_layers, (8, 16), 10),
        Case("mlp16", TITLES["mlp16"], perceptron, (16, 1024), 4),
        Case("mlp128", TITLES["mlp128"], perceptron, (128, 1024), 2),
        Case("transformer", TITLES["transformer"], transformer, (8, 64, 256), 2),
    )
}


def loss_of(output: Tensor) -> Tensor:
    loss: Tensor = output.square().mean()
    return loss


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4)
