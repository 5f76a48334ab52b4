"""Small models that between them use every kind of parameter, each with its data and its loss.

A model is built from the global torch seed and reads its batches from a generator that the caller
seeds by place (rank, step, micro-batch). Activations are smooth on purpose: where two runs may
differ in the last bit, a kink would turn that bit into a visible difference. Nothing here knows of
ranks groups, optimizers or reducers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Place:
    """Where a batch belongs: its rank of how many, the step, and the micro-batch within it."""

    rank: int
    size: int
    step: int
    micro: int = 0

    def generator(self) -> torch.Generator:
        seed = 1 + self.rank + 16 * (self.micro + 16 * self.step)
        return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Model:
    """How to build a module, the inputs it gets at a place, and the loss of its output."""

    build: Callable[[], nn.Module]
    inputs: Callable[[Place], tuple[Any, ...]]
    loss: Callable[[Tensor], Tensor]


def _squares(output: Tensor) -> Tensor:
    """A loss whose gradient differs for every output and is far from zero."""
    return (output - 1.0).abs().square().mean()


def _noise(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Place], tuple[Any, ...]]:
    return lambda place: (torch.randn(*shape, generator=place.generator(), dtype=dtype),)


def _tokens(vocabulary: int, *shape: int) -> Callable[[Place], tuple[Any, ...]]:
    return lambda place: (torch.randint(vocabulary, shape, generator=place.generator()),)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3)
    )


def wide() -> nn.Module:
    """Gradients large enough to fill the first bucket and to be copied one by one."""
    return nn.Sequential(
        nn.Linear(6, 512, bias=False),
        nn.Tanh(),
        nn.Linear(512, 512, bias=False),
        nn.Tanh(),
        nn.Linear(512, 32, bias=False),
    )


def frozen() -> nn.Module:
    """The first layer does not train."""
    module = mlp()
    module[0].requires_grad_(False)
    return module


def conv() -> nn.Module:
    """Convolutions and BatchNorm. No bias before BatchNorm: its gradient is zero but for noise."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.Conv2d(8, 4, 3, stride=2, bias=False),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(4 * 2 * 2, 3),
    )


def conv_channels_last() -> nn.Module:
    return conv().to(memory_format=torch.channels_last)


def _images_channels_last(place: Place) -> tuple[Any, ...]:
    (images,) = _noise(4, 3, 7, 7)(place)
    return (images.to(memory_format=torch.channels_last),)


def transformer(dropout: float = 0.0) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        8, nhead=2, dim_feedforward=16, dropout=dropout, activation="gelu", batch_first=True
    )
    encoder = nn.TransformerEncoder(layer, num_layers=1, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(11, 8), encoder, nn.Linear(8, 3))


class Embeddings(nn.Module):
    """A token embedding and a bag of them, with a dense layer on top."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, 4, sparse=sparse)
        self.bags = nn.EmbeddingBag(13, 4, mode="mean", sparse=sparse)
        self.top = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.top(torch.cat([self.tokens(tokens).mean(1), self.bags(tokens)], dim=1).tanh())


class Tied(nn.Module):
    """One weight is embedding and output layer, and one layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.twice = nn.Linear(8, 8)
        self.output = nn.Linear(8, 11, bias=False)
        self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens)
        return self.output(self.twice(self.twice(hidden).tanh()).tanh())


class Branches(nn.Module):
    """A stem, and two branches of which a forward uses those it is told."""

    def __init__(self, width: int = 6, bias: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(5, width, bias)
        self.branches = nn.ModuleList(nn.Linear(width, width, bias) for _ in range(2))
        self.top = nn.Linear(width, 2, bias)

    def forward(self, inputs: Tensor, taken: tuple[int, ...]) -> Tensor:
        hidden = self.stem(inputs.to(self.stem.weight.dtype)).tanh()
        for branch in taken:
            hidden = hidden + self.branches[branch](hidden).tanh()
        return self.top(hidden)


def _branches_inputs(place: Place) -> tuple[Any, ...]:
    """Over the steps: all branches; one by rank; none but on rank 0; none at all; both by rank."""
    own = (place.rank + place.micro) % 2
    taken: tuple[tuple[int, ...], ...] = (
        (0, 1),
        (own,),
        (0,) if place.rank == 0 else (),
        (),
        (0, 1) if own else (1,),
    )
    return (*_noise(4, 5)(place), taken[place.step % len(taken)])


def _branches_inputs_fixed(place: Place) -> tuple[Any, ...]:
    """The second branch is never used, on any rank."""
    return (*_noise(4, 5)(place), (0,))


class Mixed(nn.Module):
    """Layers of three dtypes, interleaved."""

    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float64)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=dtype) for dtype in self.dtypes)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer, dtype in zip(self.layers, self.dtypes, strict=True):
            hidden = layer(hidden.to(dtype)).tanh()
        return hidden


class Complex(nn.Module):
    """Complex matrices of both precisions beside a real one, and a scalar without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 5, dtype=torch.complex64) / 2)
        self.second = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128) / 2)
        self.real = nn.Parameter(torch.randn(3, 3, dtype=torch.float64) / 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.tanh(inputs @ self.first).to(torch.complex128) @ self.second
        return hidden @ self.real.to(torch.complex128) * self.scale


def _cross_entropy_of_shifted(vocabulary: int) -> Callable[[Tensor], Tensor]:
    """Targets that need no second input: the class of an output is its place in the batch."""

    def loss(output: Tensor) -> Tensor:
        flat = output.reshape(-1, vocabulary)
        return F.cross_entropy(flat, torch.arange(len(flat)) % vocabulary)

    return loss


MODELS: dict[str, Model] = {
    "mlp": Model(mlp, _noise(4, 6), _squares),
    "wide": Model(wide, _noise(4, 6), _squares),
    "frozen": Model(frozen, _noise(4, 6), _squares),
    "conv": Model(conv, _noise(4, 3, 7, 7), _squares),
    "channels_last": Model(conv_channels_last, _images_channels_last, _squares),
    "transformer": Model(transformer, _tokens(11, 2, 5), _cross_entropy_of_shifted(3)),
    "dropout": Model(lambda: transformer(0.2), _tokens(11, 2, 5), _cross_entropy_of_shifted(3)),
    "embedding": Model(lambda: Embeddings(False), _tokens(13, 4, 6), _cross_entropy_of_shifted(3)),
    "sparse": Model(lambda: Embeddings(True), _tokens(13, 4, 6), _cross_entropy_of_shifted(3)),
    "tied": Model(Tied, _tokens(11, 3, 4), _cross_entropy_of_shifted(11)),
    "branches": Model(Branches, _branches_inputs, _squares),
    "branches_fixed": Model(Branches, _branches_inputs_fixed, _squares),
    "branches_wide": Model(lambda: Branches(160, bias=False), _branches_inputs, _squares),
    "branches_bfloat16": Model(lambda: Branches().bfloat16(), _branches_inputs, _squares),
    "mixed": Model(Mixed, _noise(4, 6), _squares),
    "complex": Model(Complex, _noise(4, 4, dtype=torch.complex64), _squares),
}
