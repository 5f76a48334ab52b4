"""What is trained to see whether a wire format learns as well: two tasks small enough for minutes.

    gpt    a transformer that predicts the next character of Python's standard library
    cnn    a convolutional network on Fashion-MNIST, from Debian's package of that name

A batch is a function of seed, step and rank, so that all formats see the same data in the same
order. Knows models and data; must not know how gradients travel.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_CONTEXT, _WIDTH, _HEADS, _LAYERS = 64, 96, 4, 4
_TEXT_BYTES = 2_000_000
_PACKAGE = "dataset-fashion-mnist"


@dataclass(frozen=True)
class Task:
    """How to train, and what is measured at the end; a smaller metric is better."""

    metric: str
    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module, int], tuple[Any, Any]]  # and its schedule
    load: Callable[[], Any]
    loss: Callable[[nn.Module, Any, torch.Generator], Tensor]
    evaluate: Callable[[nn.Module, Any], float]
    steps: int


# Characters.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(_WIDTH)
        self.attention = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.mix = nn.Linear(_WIDTH, _WIDTH)
        self.between = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.before(x)).view(batch, length, 3, _HEADS, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(128, _WIDTH)
        self.places = nn.Embedding(_CONTEXT, _WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(_LAYERS)])
        self.last = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, 128)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[1]))
        return self.head(self.last(self.blocks(self.characters(x) + places)))


def _load_text() -> tuple[Tensor, Tensor]:
    """The modules of the standard library in order of their names; the last tenth is held out."""
    folder, found = Path(sysconfig.get_paths()["stdlib"]), bytearray()
    for path in sorted(folder.glob("*.py")):
        found += path.read_bytes()
        if len(found) >= _TEXT_BYTES:
            break
    text = torch.frombuffer(found[:_TEXT_BYTES], dtype=torch.uint8).long().clamp_(max=127)
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def _windows(text: Tensor, starts: Tensor) -> Tensor:
    return text[starts.unsqueeze(1) + torch.arange(_CONTEXT + 1)]


def _text_loss(model: nn.Module, data: Any, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(data[0]) - _CONTEXT - 1, (16,), generator=generator)
    return _next_loss(model, _windows(data[0], starts))


def _next_loss(model: nn.Module, windows: Tensor) -> Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def _evaluate_text(model: nn.Module, data: Any) -> float:
    held_out = data[1]
    starts = torch.linspace(0, len(held_out) - _CONTEXT - 2, 256).long()
    return float(_next_loss(model, _windows(held_out, starts)))


def _text_optimizer(model: nn.Module, steps: int) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)


# Clothes.


def _make_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def cache() -> Path:
    """Where downloads stay, outside of the checkout."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "closeranks"


def fetch_clothes() -> Path:
    """The folder with the four files of Fashion-MNIST; the package is unpacked once."""
    folder = cache() / _PACKAGE
    if not folder.exists():
        cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache()) as there:
            # apt gives its rights up for a download where it can; this folder is ours alone.
            as_us = ["-o", "APT::Sandbox::User=root"]
            subprocess.run(["apt-get", *as_us, "download", "-q", _PACKAGE], cwd=there, check=True)
            (package,) = Path(there).glob("*.deb")
            subprocess.run(["dpkg", "-x", package, Path(there) / "files"], check=True)
            (Path(there) / "files").rename(folder)
    found = list(folder.rglob("train-images-idx3-ubyte.gz"))
    if not found:
        raise FileNotFoundError(f"{folder} holds no Fashion-MNIST; remove it, then try again")
    return found[0].parent


def _load_clothes() -> dict[str, Tensor]:
    folder, data = fetch_clothes(), {}
    for name, part in (("train", "train"), ("test", "t10k")):
        pixels = _idx(folder / f"{part}-images-idx3-ubyte.gz", 16)
        data[name] = pixels.view(-1, 1, 28, 28)
        data[f"{name} labels"] = _idx(folder / f"{part}-labels-idx1-ubyte.gz", 8).long()
    return data


def _idx(path: Path, header_bytes: int) -> Tensor:
    with gzip.open(path) as file:
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8, offset=header_bytes)


def _clothes_loss(model: nn.Module, data: Any, generator: torch.Generator) -> Tensor:
    chosen = torch.randint(len(data["train"]), (64,), generator=generator)
    return F.cross_entropy(model(_seen(data["train"][chosen])), data["train labels"][chosen])


def _seen(pixels: Tensor) -> Tensor:
    """About mean 0 and deviation 1 over the training set."""
    return pixels.float().div_(255).sub_(0.286).div_(0.353)


def _evaluate_clothes(model: nn.Module, data: Any) -> float:
    """The fraction that it gets wrong."""
    answers = torch.cat([model(_seen(part)).argmax(1) for part in data["test"].split(500)])
    return float((answers != data["test labels"]).float().mean())


def _clothes_optimizer(model: nn.Module, steps: int) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)


TASKS = {
    "gpt": Task(
        "held-out loss, nats per character",
        Gpt,
        _text_optimizer,
        _load_text,
        _text_loss,
        _evaluate_text,
        steps=300,
    ),
    "cnn": Task(
        "test error",
        _make_cnn,
        _clothes_optimizer,
        _load_clothes,
        _clothes_loss,
        _evaluate_clothes,
        steps=500,
    ),
}
